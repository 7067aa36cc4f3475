"""The PixArt, Sana and Stable Diffusion 3 of diffusers behind the common call."""
