"""Rows over all shards of an array, gathered by memory map."""
