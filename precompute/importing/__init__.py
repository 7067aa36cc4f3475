"""Features that others have cached, turned into a store."""
