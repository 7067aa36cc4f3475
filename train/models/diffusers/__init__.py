"""Transformers from diffusers that can be trained, one file each: PixArt, Sana, SD3, Flux, Qwen-Image, Z-Image."""
