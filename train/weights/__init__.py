"""Weights on disk: checkpoints of a run, published weights to start from."""
