"""Which process encodes which shard: leases and parts."""
