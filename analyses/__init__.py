"""Scripts that answer one question each from runs: `python -m analyses.NAME [RUN...] [--quick] [--out DIR]`."""
