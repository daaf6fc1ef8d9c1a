"""Export of numbers to W&B, TensorBoard and MLflow, through their own clients.

workbench.Recorder(model, to="wandb")          # into the loop's own W&B run where one is open, else into an offline run
export_log(run, "mlflow")                      # the stored numbers of a run
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from workbench.environment import WANDB_MODE, WANDB_PROJECT, variable
from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.file_io import digest
from workbench.places import install
from workbench.runs.records import load_records, one_sample
from workbench.runs.run import Run

PROJECT = "workbench"
MANY = ["head", "position", "index"]  # axes along which every entry would be a separate chart
FITS, PARAMETERS, LONGEST = 1000, 100, 250  # MLflow: numbers and settings per request, characters of each


class Tracker(Protocol):
    """Receiver of the rows of one step."""

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class WandbSink:
    """The open W&B run, which stays open, or a new run in the folder, offline unless `WANDB_MODE` is set."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        import wandb

        mode: Any = variable(WANDB_MODE, "offline")
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True)
        self.own = None if wandb.run is not None else wandb.init(
            project=variable(WANDB_PROJECT, PROJECT), name=folder.name, id=run_identity(folder, info), resume="allow",
            dir=folder, mode=mode, config=dict(info), settings=quiet,
        )  # fmt: skip
        run: Any = self.own or wandb.run
        self.run = run
        # a separate axis: W&B drops steps before the latest one, and the loop may have logged later steps
        self.run.define_metric("workbench/step", hidden=True)
        self.run.define_metric("workbench/*", step_metric="workbench/step")

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log all numbers of a step at once."""
        self.run.log({"workbench/step": step, **{tag(row): row["value"] for row in rows}})

    def close(self) -> None:
        """End the run if it was opened here."""
        if self.own:
            self.own.finish()


class TensorBoardSink:
    """Event files in `tensorboard/` of the folder; a later writer hides older events from its first step on."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        from tensorboardX import SummaryWriter

        suffix = f".{time.time_ns()}"  # distinguishes two files of one second
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start, filename_suffix=suffix)

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write each number as a scalar."""
        for row in rows:
            self.writer.add_scalar(tag(row), row["value"], step)

    def close(self) -> None:
        """Write the remaining events."""
        self.writer.close()


class MlflowSink:
    """A run of the experiment `workbench` at `MLFLOW_TRACKING_URI`, the same one for every export of a run."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric, own = MlflowClient(), Metric, run_identity(folder, info)
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(PROJECT)
        matches = self.client.search_runs([experiment], filter_string=f"tags.`workbench.run` = '{own}'", max_results=1)
        # name, step and value of every number there: MLflow stores duplicates
        self.sent = set[tuple[str, int, float | None]]()
        if matches:
            self.id = matches[0].info.run_id
            for name in matches[0].data.metrics:
                history = self.client.get_metric_history(self.id, name)
                self.sent |= {(name, m.step, _comparable(m.value)) for m in history}
            self.client.update_run(self.id, status="RUNNING")
            return
        made = self.client.create_run(experiment, tags={"workbench.run": own}, run_name=folder.name)
        self.id = made.info.run_id
        pairs = [Param(key[:LONGEST], str(value)[:LONGEST]) for key, value in _flat(info)]
        for i in range(0, len(pairs), PARAMETERS):
            self.client.log_batch(self.id, params=pairs[i : i + PARAMETERS])

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send those numbers of a step that the server lacks, in requests of at most `FITS`."""
        now = int(time.time() * 1000)
        named = ((re.sub(r"[^\w\-. /]", "_", tag(row))[:LONGEST], float(row["value"])) for row in rows)
        unsent = [(name, value) for name, value in named if (name, step, _comparable(value)) not in self.sent]
        new = [self.metric(name, value, now, step) for name, value in unsent]
        for i in range(0, len(new), FITS):
            self.client.log_batch(self.id, metrics=new[i : i + FITS])

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.id)


TRACKERS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], int | None], Tracker]]] = {
    "wandb": ("wandb", WandbSink),
    "tensorboard": ("tensorboardX", TensorBoardSink),
    "mlflow": ("mlflow", MlflowSink),
}


def installed_trackers(to: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of trackers; raises `UnknownName`, and `WorkbenchError` if a client is not installed."""
    names = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
    for name in names:
        refuse_unknown("sink", name, TRACKERS)
        if importlib.util.find_spec(TRACKERS[name][0]) is None:
            raise WorkbenchError(f"to={name!r} needs its client: {install(name)}")
    return names


def open_trackers(names: Sequence[str], folder: Path, info: Mapping[str, Any], start: int | None) -> list[Tracker]:
    """Open trackers by name; raises `WorkbenchError` if one cannot be opened (no key, no server, a read-only folder)."""
    trackers = list[Tracker]()
    for name in names:
        try:
            trackers.append(TRACKERS[name][1](folder, info, start))
        except Exception as error:  # every client has its own error types
            for tracker in trackers:
                tracker.close()
            raise WorkbenchError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
    return trackers


def send_rows(trackers: Sequence[Tracker], frame: pd.DataFrame) -> None:
    """Send the rows of a table to all trackers, step by step."""
    rows = frame[frame["step"].notna() & frame["value"].notna()].sort_values("step", kind="stable")
    plain = rows.astype("object").where(rows.notna(), None)
    for step, part in plain.groupby(rows["step"].astype("int64"), sort=True):
        for tracker in trackers:
            tracker.add(int(str(step)), [{str(k): v for k, v in row.items()} for row in part.to_dict("records")])


def export_log(run: Run, to: str, metrics: Sequence[str] | None = None) -> int:
    """Export a run's telemetry and records to a tracker, always to the same run there, and return how many numbers went.

    `metrics` selects metrics with all their axes. The default is all numbers without head, position or index, since trackers
    draw a chart for each name.
    """
    names = installed_trackers(to)
    frame = pd.concat([run.telemetry(), one_sample(load_records([run.path]))], ignore_index=True).dropna(
        subset=["step", "value"]
    )
    if metrics is None:
        frame = frame[frame[MANY].isna().all(axis=1)]
    else:
        for name in metrics:
            refuse_unknown(f"metric of {run.name}", name, set(frame["metric"]))
        frame = frame[frame["metric"].isin(metrics)]
    if frame.empty:
        raise BadData(f"{run.name} has no numbers to export: train or measure it first")
    known = {k: v for k, v in run.info.items() if k != "train" or "imported" not in run.info}  # a placeholder
    trackers = open_trackers(names, run.path, known, 0)
    try:
        send_rows(trackers, frame)
    finally:
        for tracker in trackers:
            tracker.close()
    return len(frame)


def tag(row: Mapping[str, Any]) -> str:
    """Return a row's name: `workbench/gradient_norm/q_proj/3`, with the variant after the metric and `h2` for a head."""
    metric = "-".join(str(row[key]) for key in ("metric", "variant", "control") if row.get(key) is not None)
    short = {"source": "from", "head": "h", "position": "at", "index": "i"}
    axes = [f"{sign}{row[axis]}" for axis, sign in short.items() if row.get(axis) is not None]
    places = (row.get("data"), row.get("part"), row.get("site"), row.get("layer"))
    return "/".join(["workbench", metric, *(str(place) for place in places if place is not None), *axes])


def run_identity(folder: Path, info: Mapping[str, Any]) -> str:
    """Return an id that a run keeps when its folder moves, and that a new run of the same name does not share."""
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', folder.name)}-{digest(folder.name, info.get('created'))[:8]}"


def _comparable(value: float) -> float | None:
    """Return a value that equals the one MLflow returns (None for NaN, the largest float for infinity)."""
    return None if math.isnan(value) else max(-sys.float_info.max, min(sys.float_info.max, value))


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs = list[tuple[str, Any]]()
    for key, value in values.items():
        pairs += _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else [(f"{before}{key}", value)]
    return pairs
