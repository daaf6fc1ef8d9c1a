"""Run folders, the index of many runs, and their records."""
