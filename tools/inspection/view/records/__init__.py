"""The records of a store: searched, described, and shown as pictures."""
