"""The folder a recorder writes: `run.json` and growing telemetry parts, readable at any moment.

Parts are replaced as a whole, and only as often as writing stays a hundredth of the time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet  # noqa: F401 - now, not in the middle of a training

from workbench.checkpoints.identify import RUN_FILE
from workbench.errors import WorkbenchError
from workbench.files import read_json, write_json
from workbench.runs.records import read_parquet, records, write_parquet
from workbench.runs.run import Run

SPAN = 32  # logging steps in one part
MIN_PAUSE, MAX_SHARE = 1.0, 0.01  # seconds between writes, and the share of the time they may take


class RecordingFolder:
    """Rows on their way to `telemetry/<first>-<end>.parquet`, under the run's lock."""

    def __init__(self, path: Path, info: dict[str, Any], *, start: int | None, every: int) -> None:
        self.path, self.info, self.every = path, info, every
        path.mkdir(parents=True, exist_ok=True)
        self.lock, self.closed = Run(path).writing(), False
        try:
            self._continue(start)
            write_json(path / RUN_FILE, self.info)
        except BaseException:
            self.lock.release()
            raise
        self.first = self.end = start or 0
        self.frame, self.rows = records([]), list[dict[str, Any]]()
        self.cost, self.written = 0.0, -float("inf")

    def _continue(self, start: int | None) -> None:
        """Keep what an earlier recording of the same model wrote before `start`."""
        if (self.path / RUN_FILE).exists():
            old = read_json(self.path / RUN_FILE)
            if "recorder" not in old:
                raise WorkbenchError(f"{self.path} is a training's run, not a recording; choose another folder")
            if differing := [k for k in ("architecture", "seed", "model") if old.get(k) != self.info[k]]:
                raise WorkbenchError(f"{self.path} records another {', '.join(differing)}; choose another folder")
            self.info["created"] = old.get("created", self.info["created"])
        for leftover in self.path.glob("*/.*.part"):  # of a writer that was killed
            leftover.unlink()
        parts = Run(self.path).telemetry_parts()
        if parts and start is None:
            last = max(int(read_parquet([part])["step"].max()) for _, part in parts)
            held = f"{self.path} holds a recording up to step {last}"
            raise WorkbenchError(f"{held}; say start= (0 begins anew, {last + 1} goes on), or choose another folder")
        for _, part in parts:
            frame = read_parquet([part]) if start else records([])
            kept = frame[frame["step"] < (start or 0)]
            if not len(kept):
                part.unlink()
            elif len(kept) < len(frame):
                write_parquet(kept, part)

    def describe(self, **facts: Any) -> None:
        """Change what `run.json` says about the recorder."""
        self.info["recorder"] |= facts
        write_json(self.path / RUN_FILE, self.info)

    def add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows of a step; they are written at most once a second."""
        if step >= self.end:
            self.flush()
            self.frame, self.first, self.end = records([]), step, step + SPAN * self.every
        common = {"run": self.path.name, "architecture": self.info["architecture"], "seed": self.info["seed"]}
        self.rows += [{**common, **row} for row in rows]
        if time.perf_counter() - self.written > max(MIN_PAUSE, self.cost / MAX_SHARE):
            self.flush()

    def flush(self) -> None:
        """Write the part at hand."""
        if not self.rows:
            return
        began, new = time.perf_counter(), records(self.rows)
        self.frame = pd.concat([self.frame, new], ignore_index=True) if len(self.frame) else new
        self.rows = []
        write_parquet(self.frame, self.path / "telemetry" / f"{self.first:06d}-{self.end:06d}.parquet")
        self.written = time.perf_counter()
        self.cost = self.written - began

    def close(self) -> None:
        """Write what is left and release the folder's lock."""
        if not self.closed:
            self.closed = True
            try:
                self.flush()
            finally:
                self.lock.release()
