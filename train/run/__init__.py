"""A run on disk: started, resumed, locked, saved."""
