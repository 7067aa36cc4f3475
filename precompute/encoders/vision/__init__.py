"""Vision transformers, whose tokens of a picture are stored for representation alignment."""
