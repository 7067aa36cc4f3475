"""How each peer stores and reads the same records."""
