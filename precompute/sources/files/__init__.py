"""Files of a source, here or at a URL, and what their names say."""
