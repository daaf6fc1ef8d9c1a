"""Run folder of a recorder: `run.json` and growing telemetry files, readable at any time.

Files are replaced atomically, at most as often as writing takes 1 % of the time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet  # noqa: F401 - now, not in the middle of a training

from workbench.checkpoints.identify import RUN_FILE
from workbench.errors import WorkbenchError, warn_caller
from workbench.files import read_json, write_json
from workbench.runs.records import read_parquet, records, write_parquet
from workbench.runs.run import Run
from workbench.training.recorder.quantities import NotRecorded, first_line

SPAN = 32  # logging steps in one part
MIN_PAUSE, MAX_SHARE = 1.0, 0.01  # seconds between writes, and the share of the time they may take


class RecordingFolder:
    """Buffer of rows for `telemetry/<first>-<end>.parquet`, under the run's lock."""

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
        self.cost, self.tried = 0.0, -float("inf")
        self.described = True
        self.failure = ""  # of the last write

    def _continue(self, start: int | None) -> None:
        """Preserve the rows before `start` of an earlier recording of the same model."""
        if (self.path / RUN_FILE).exists():
            old = read_json(self.path / RUN_FILE)
            if "recorder" not in old:
                raise WorkbenchError(f"{self.path} is a training's run, not a recording; choose another folder")
            if differing := [k for k in ("architecture", "seed", "model") if old.get(k) != self.info[k]]:
                raise WorkbenchError(f"{self.path} records another {', '.join(differing)}; choose another folder")
            self.info["created"] = old.get("created", self.info["created"])
        for leftover in self.path.glob("*/.*.part"):  # from a killed process
            leftover.unlink()
        parts = Run(self.path).telemetry_parts()
        if parts and start is None:
            last = max(int(read_parquet([part])["step"].max()) for _, part in parts)
            held = f"{self.path} holds a recording up to step {last}"
            raise WorkbenchError(f"{held}; say start= (0 begins anew, {last + 1} goes on), or choose another folder")
        for _, part in parts:
            frame = read_parquet([part]) if start else records([])
            earlier = frame[frame["step"] < (start or 0)]
            if not len(earlier):
                part.unlink()
            elif len(earlier) < len(frame):
                write_parquet(earlier, part)

    def describe(self, **facts: Any) -> None:
        """Change what `run.json` says about the recorder, with the next rows."""
        self.info["recorder"] |= facts
        self.described = False

    def add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of a step; they are written at most once a second, and again later if writing fails."""
        common = {"run": self.path.name, "architecture": self.info["architecture"], "seed": self.info["seed"]}
        due = time.perf_counter() - self.tried > max(MIN_PAUSE, self.cost / MAX_SHARE)
        if step >= self.end and (due or not self.failure) and self.flush():
            self.frame, self.first, self.end = records([]), step, step + SPAN * self.every
        self.rows += [{**common, **row} for row in rows]
        if due:
            self.flush()

    def flush(self) -> bool:
        """Write the current file; if that fails, warn once, hold the rows and return False."""
        if not self.rows and self.described:
            return True
        began = time.perf_counter()
        try:
            if not self.described or not (self.path / RUN_FILE).exists():
                write_json(self.path / RUN_FILE, self.info)
                self.described = True
            if self.rows:
                new = records(self.rows)
                frame = pd.concat([self.frame, new], ignore_index=True) if len(self.frame) else new
                write_parquet(frame, self.path / "telemetry" / f"{self.first:06d}-{self.end:06d}.parquet")
                self.frame, self.rows = frame, []
        except Exception as error:  # a full disk, a folder that was removed or locked
            first, self.failure = not self.failure, first_line(error)
            if first and not self.closed:
                steps = f"from step {self.rows[0]['step']} on" if self.rows else "about the recorder"
                warn_caller(f"{self.path}: what is recorded {steps} waits to be written: {self.failure}", NotRecorded)
        else:
            self.failure = ""
        self.tried = time.perf_counter()
        self.cost = self.tried - began
        return not self.failure

    def close(self) -> None:
        """Write the remaining rows, warn if they are lost, and release the folder's lock."""
        if not self.closed:
            self.closed = True
            try:
                if not self.flush() and self.rows:
                    steps = f"{self.rows[0]['step']} to {self.rows[-1]['step']}"
                    warn_caller(f"{self.path}: the records of steps {steps} are lost: {self.failure}", NotRecorded)
            finally:
                self.lock.release()
