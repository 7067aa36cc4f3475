"""Summaries, contact sheets and verification of a store."""
