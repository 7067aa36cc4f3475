"""The loader benchmark: each peer in processes of its own, checked before it is timed."""
