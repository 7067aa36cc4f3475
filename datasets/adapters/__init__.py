"""Batches in the form that other trainers expect."""
