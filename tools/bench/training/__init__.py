"""Stage 2: the step and the planner."""
