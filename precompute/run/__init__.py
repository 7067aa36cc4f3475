"""One runner for every column of a store: load, encode, narrow, commit."""
