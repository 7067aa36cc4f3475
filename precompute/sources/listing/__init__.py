"""Millions of records, listed once and mapped from disk."""
