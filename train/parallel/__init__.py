"""Ranks and strategies: one device, DDP, FSDP, HSDP, DeepSpeed."""
