"""Files, their hashes and owners: the one way to write, and what a process leaves behind."""
