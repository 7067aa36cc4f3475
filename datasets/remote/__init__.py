"""A store at a URL: shards come whole and checked into a local folder of bounded size."""
