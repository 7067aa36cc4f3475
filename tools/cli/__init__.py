"""The command, its options, and what is checked before torch is loaded."""
