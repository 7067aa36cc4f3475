"""Autoencoders and text encoders: found, checked, loaded, run."""
