"""Every figure that needs a GPU, by one command that may be cut at any second."""
