"""What a store looks like on disk: schema, layout, buckets, the bytes of a shard, tables."""
