"""Time, memory and hardware; a scratch folder; what every benchmark reads."""
