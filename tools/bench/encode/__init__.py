"""Stage 1: encoding, decoding, planning, memory."""
