"""What appears on a terminal: progress, aligned text, the outcome of a run."""
