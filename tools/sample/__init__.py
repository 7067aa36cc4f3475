"""Images from a run or a published checkpoint: a grid, or 50,000."""
