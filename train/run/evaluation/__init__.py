"""What a run shows while it trains: the loss of held-out records, and images."""
