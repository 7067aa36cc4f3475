"""What is done to a store that is there: verify, repair, compact."""
