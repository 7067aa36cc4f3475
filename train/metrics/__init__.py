"""What a run measures: losses, images a second, MFU, memory."""
