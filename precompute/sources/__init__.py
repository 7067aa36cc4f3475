"""Where pictures, captions and labels come from."""
