"""Networks whose features are compared, and how pictures become their input."""
