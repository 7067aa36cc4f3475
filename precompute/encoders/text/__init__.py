"""Text encoders: captions to token ids, and to embeddings."""
