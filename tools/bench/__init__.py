"""Benchmarks: commands that measure, each beside a baseline."""
