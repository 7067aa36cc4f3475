"""The demo: generate images, encode them, train and sample in minutes."""
