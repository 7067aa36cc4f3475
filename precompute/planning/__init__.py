"""Which record goes into which row of which shard, and what changed since the last revision."""
