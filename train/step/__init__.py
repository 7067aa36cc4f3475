"""One training step, from a batch to an update."""
