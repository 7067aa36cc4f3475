"""Reports of stores and runs, each one HTML file."""
