"""What a store holds: summaries, contact sheets, verification."""
