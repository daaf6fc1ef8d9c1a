"""Scripts that answer one question each from runs: `python -m analyses.NAME [--runs DIR] [--out DIR]`."""
