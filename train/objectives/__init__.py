"""Flow matching and DDPM: the losses, and the noise and times of each image."""
