"""Which records are read when: shuffling, filters, batches and mixtures as pure functions."""
