"""What a run will take, before it starts: bytes, hours, memory."""
