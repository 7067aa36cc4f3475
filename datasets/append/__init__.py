"""Records that come one by one: what was declared, how values become rows, what is kept until the seal."""
