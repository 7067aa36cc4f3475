"""Bytes of a picture to pixels, in child processes with a time limit."""
