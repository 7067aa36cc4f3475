"""Stores and batches of noise, of any size."""
