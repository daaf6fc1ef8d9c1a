"""Telemetry of a training: rows of records in files that appear complete or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.runs.records import records, write_parquet
from workbench.runs.run import Run
from workbench.runs.trackers import Tracker, send_rows


class Telemetry:
    """Buffer of rows for `telemetry/<first>-<last>.parquet`; tensors are fetched only when a file is written.

    Every written file is also sent to the `trackers`.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.trackers, self.begin = run, list[Tracker](), 0
        self.rows: list[dict[str, Any]] = []
        self.pending: list[tuple[dict[str, Any], Tensor]] = []
        self.common = {"run": run.name, "architecture": run.architecture, "seed": run.seed}

    def add(self, step: int, metric: str, value: float | Tensor, **axes: Any) -> None:
        """Add one number of a step; a tensor stays on its device until the next flush."""
        row = self.common | {"step": step, "metric": metric, **axes}
        if isinstance(value, Tensor):
            self.pending.append((row, value.detach()))
        else:
            self.rows.append(row | {"value": value})

    def flush(self, end: int) -> None:
        """Write the rows of all steps before `end` as one file."""
        if self.pending:
            values = torch.stack([value.float() for _, value in self.pending]).tolist()
            self.rows += [row | {"value": value} for (row, _), value in zip(self.pending, values, strict=True)]
        if self.rows:
            frame = records(self.rows)
            write_parquet(frame, self.run.path / "telemetry" / f"{self.begin:06d}-{end:06d}.parquet")
            send_rows(self.trackers, frame)
        self.rows, self.pending, self.begin = [], [], end

    def merge(self) -> None:
        """Merge all files into one at the end of the training, which readers of many runs open much faster."""
        parts = [path for _, path in self.run.telemetry_parts()]
        if len(parts) > 1:
            first, end = parts[0].stem.split("-")[0], parts[-1].stem.split("-")[1]
            write_parquet(self.run.telemetry(), parts[0].with_name(f"{first}-{end}.parquet"))
            for path in parts:
                path.unlink()

    def rewind(self, step: int) -> None:
        """Remove files that a resumed run writes again."""
        for first, part in self.run.telemetry_parts():
            if first >= step:
                part.unlink()
        self.begin = step
