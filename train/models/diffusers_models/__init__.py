"""The PixArt and Sana of diffusers behind the common call, initialised for training from scratch."""
