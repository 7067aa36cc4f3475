"""The loader benchmark: each peer in fresh processes, checked before it is timed."""
