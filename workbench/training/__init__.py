"""Training loop, recipe and telemetry, and the recorder for other training loops."""
