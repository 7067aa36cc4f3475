"""Bytes of an image to pixels, in child processes with a time limit."""
