"""The report of runs: their figures over the steps, their pictures, and how their recipes differ."""
