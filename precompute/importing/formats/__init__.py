"""The formats of other caches, one reader each."""
