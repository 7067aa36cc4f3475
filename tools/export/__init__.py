"""Export to diffusers, or to an official checkpoint."""
