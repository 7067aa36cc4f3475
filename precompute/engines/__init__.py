"""Where shards are encoded: this process, one process a device, or a Ray cluster."""
