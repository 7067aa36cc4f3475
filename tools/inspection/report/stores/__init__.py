"""The report of stores: their numbers, what is unusual about them, charts and decoded pictures."""
