"""Stores and batches of noise, at any size."""
