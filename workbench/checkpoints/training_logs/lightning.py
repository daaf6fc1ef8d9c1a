"""Lightning's `metrics.csv`: a table in a folder `version_N` for each run, with empty cells.

Source: Lightning, CSVLogger.
"""

from __future__ import annotations

from workbench.checkpoints.training_logs.reading import LogReader
from workbench.checkpoints.training_logs.tables import read_table

READER = LogReader(
    "metrics.csv", lambda path, head: path.name == "metrics.csv", read_table, home=lambda path: path.parent
)
