"""Estimates before a run: bytes, hours, memory."""
