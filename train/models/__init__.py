"""Diffusion transformers: our DiT, and the PixArt and Sana of diffusers."""
