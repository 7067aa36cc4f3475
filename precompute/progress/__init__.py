"""How far a run is, how long each stage takes, and when rejects are too many."""
