"""Several processes on one store: a process for each device of a machine or of a Ray cluster."""
