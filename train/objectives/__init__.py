"""Flow matching and DDPM: the losses, and what is random in a step."""
