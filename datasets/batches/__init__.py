"""One batch: its rows looked up, gathered into reused memory, turned into what the model takes."""
