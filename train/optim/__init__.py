"""Optimizers, their learning rate and state, averaged weights, the loss scale of fp16."""
