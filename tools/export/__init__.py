"""A trained model as a folder for diffusers, or as an official checkpoint."""
