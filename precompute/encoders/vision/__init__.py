"""Vision transformers of transformers: found by their config, loaded, and given positions of another grid."""
