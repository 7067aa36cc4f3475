"""Terminal output: progress, aligned text, results of a run."""
