"""Which process encodes which shard: leases, and a part of the shards."""
