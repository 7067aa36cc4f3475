"""Plans, commit records and manifests: how a store comes to be, shard by shard."""
