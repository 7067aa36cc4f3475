"""Where images, captions and labels come from."""
