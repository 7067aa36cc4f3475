"""The transformers of diffusers that can be trained, one file each: PixArt, Sana and Stable Diffusion 3."""
