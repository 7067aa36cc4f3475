"""Vision transformers, whose tokens of an image are stored for representation alignment."""
