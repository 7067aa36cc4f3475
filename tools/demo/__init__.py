"""The demo: pictures drawn, encoded, trained on and generated in minutes."""
