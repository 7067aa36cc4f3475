"""Latents from a snapshot."""
