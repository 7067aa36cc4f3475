"""Which records train when: shuffling, filters, batches and mixtures as pure functions."""
