"""Error bars, and comparisons over seeds and documents."""
