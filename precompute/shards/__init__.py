"""One shard of latents or captions: decoded ahead, encoded, committed behind."""
