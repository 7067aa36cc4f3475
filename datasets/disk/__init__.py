"""Files, their hashes and locks: the one way to write, and what a process leaves behind."""
