"""Where numbers go beside a run's folder: W&B, TensorBoard and MLflow, through their own clients.

workbench.Recorder(model, to="wandb")          # into the loop's own W&B run where one is open, else into an offline run
workbench.train(..., log="tensorboard")        # event files in the run's `tensorboard/`
export_log(run, "mlflow")                      # what is written down of a run already

A number is called `workbench/METRIC/PART/LAYER/hHEAD` there, as far as it has them, at the optimiser step it was recorded at.
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
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import digest
from workbench.places import install
from workbench.runs.records import load_records
from workbench.runs.run import Run

PROJECT = "workbench"
MANY = ["head", "position", "index"]  # axes of which each place would be a chart of its own
FITS, PARAMETERS, LONGEST = 1000, 100, 250  # numbers and settings in one request of MLflow's, characters of each


class Sink(Protocol):
    """What takes rows of one step."""

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class WandbSink:
    """The open W&B run, which stays open; or a run of its own in the folder, offline unless `WANDB_MODE` says otherwise."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        import wandb

        self.own = None if wandb.run is not None else self._opened(folder, info)
        run: Any = self.own or wandb.run
        self.run = run
        # an axis of its own: the loop may have logged later steps by the time a record is complete, and W&B drops earlier ones
        self.run.define_metric("workbench/step", hidden=True)
        self.run.define_metric("workbench/*", step_metric="workbench/step")

    @staticmethod
    def _opened(folder: Path, info: Mapping[str, Any]) -> Any:
        import wandb

        mode: Any = variable(WANDB_MODE, "offline")
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True)
        return wandb.init(
            project=variable(WANDB_PROJECT, PROJECT), name=folder.name, id=identity(folder, info), resume="allow",
            dir=folder, mode=mode, config=dict(info), settings=quiet,
        )  # fmt: skip

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log all numbers of a step at once."""
        self.run.log({"workbench/step": step, **{tag(row): row["value"] for row in rows}})

    def close(self) -> None:
        """End the run, where it is our own."""
        if self.own:
            self.own.finish()


class TensorBoardSink:
    """Event files in `tensorboard/` of the folder; what comes later hides what they hold from its first step on."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        from tensorboardX import SummaryWriter

        suffix = f".{time.time_ns()}"  # two within a second would be one file
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start, filename_suffix=suffix)

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write each number as a scalar."""
        for row in rows:
            self.writer.add_scalar(tag(row), row["value"], step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class MlflowSink:
    """A run of the experiment `workbench` at `MLFLOW_TRACKING_URI`, the same one whenever the folder's run is told again."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric, own = MlflowClient(), Metric, identity(folder, info)
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(PROJECT)
        found = self.client.search_runs([experiment], filter_string=f"tags.`workbench.run` = '{own}'", max_results=1)
        # name, step and number of what the run has there: MLflow keeps what comes twice
        self.told = set[tuple[str, int, float | None]]()
        if found:
            self.id = found[0].info.run_id
            for name in found[0].data.metrics:
                self.told |= {(name, m.step, _kept(m.value)) for m in self.client.get_metric_history(self.id, name)}
            self.client.update_run(self.id, status="RUNNING")
            return
        made = self.client.create_run(experiment, tags={"workbench.run": own}, run_name=folder.name)
        self.id = made.info.run_id
        pairs = [Param(key[:LONGEST], str(value)[:LONGEST]) for key, value in _flat(info)]
        for i in range(0, len(pairs), PARAMETERS):
            self.client.log_batch(self.id, params=pairs[i : i + PARAMETERS])

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send a step's numbers that are not there yet, so many in a request as one takes."""
        now = int(time.time() * 1000)
        named = ((re.sub(r"[^\w\-. /]", "_", tag(row))[:LONGEST], float(row["value"])) for row in rows)
        new = [
            self.metric(name, value, now, step) for name, value in named if (name, step, _kept(value)) not in self.told
        ]
        for i in range(0, len(new), FITS):
            self.client.log_batch(self.id, metrics=new[i : i + FITS])

    def close(self) -> None:
        """Note its end."""
        self.client.set_terminated(self.id)


SINKS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], int | None], Sink]]] = {
    "wandb": ("wandb", WandbSink),
    "tensorboard": ("tensorboardX", TensorBoardSink),
    "mlflow": ("mlflow", MlflowSink),
}


def checked(to: str | Iterable[str]) -> tuple[str, ...]:
    """Names of sinks whose clients are installed; raises `UnknownName`, and `WorkbenchError` for one that is not."""
    names = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
    for name in names:
        if name not in SINKS:
            raise UnknownName("sink", name, SINKS)
        if importlib.util.find_spec(SINKS[name][0]) is None:
            raise WorkbenchError(f"to={name!r} takes its client: {install(name)}")
    return names


def opened(names: Sequence[str], folder: Path, info: Mapping[str, Any], start: int | None) -> list[Sink]:
    """The sinks of these names; raises `WorkbenchError` for one that cannot be opened: no key, no server, a folder that is closed."""
    made = list[Sink]()
    for name in names:
        try:
            made.append(SINKS[name][1](folder, info, start))
        except Exception as error:  # each client has kinds of its own
            for sink in made:
                sink.close()
            raise WorkbenchError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
    return made


def tell(sinks: Iterable[Sink], frame: pd.DataFrame) -> None:
    """Hand on the rows of a table, step by step."""
    rows = frame[frame["step"].notna() & frame["value"].notna()].sort_values("step", kind="stable")
    plain = rows.astype("object").where(rows.notna(), None)
    for step, part in plain.groupby(rows["step"].astype("int64"), sort=True):
        for sink in sinks:
            sink.add(int(str(step)), [{str(k): v for k, v in row.items()} for row in part.to_dict("records")])


def export_log(run: Run, to: str, metrics: Sequence[str] | None = None) -> int:
    """Hand on what is written down of a run, telemetry and records, and return how many numbers that were.

    `metrics`: these alone, with all of their axes; else all that have no head, position or index, since trackers draw a chart for
    each name. Told again it is the same run there. Raises `UnknownName` for a tracker or a metric, `BadData` where nothing is written.
    """
    names = checked(to)
    frame = pd.concat([run.telemetry(), load_records([run.path])], ignore_index=True).dropna(subset=["step", "value"])
    if metrics is None:
        frame = frame[frame[MANY].isna().all(axis=1)]
    else:
        for name in metrics:
            if not (frame["metric"] == name).any():
                raise UnknownName(f"metric of {run.name}", name, set(frame["metric"]))
        frame = frame[frame["metric"].isin(metrics)]
    if frame.empty:
        raise BadData(f"nothing is written down of {run.name}: there is nothing to hand on")
    sinks = opened(names, run.path, run.info, 0)
    try:
        tell(sinks, frame)
    finally:
        for sink in sinks:
            sink.close()
    return len(frame)


def tag(row: Mapping[str, Any]) -> str:
    """A row's name: `workbench/gradient_norm/q_proj/3`, with its variant behind the metric and `h2` for a head."""
    metric = "-".join(str(row[key]) for key in ("metric", "variant", "control") if row.get(key) is not None)
    short = {"source": "from", "head": "h", "position": "at", "index": "i"}
    axes = [f"{sign}{row[axis]}" for axis, sign in short.items() if row.get(axis) is not None]
    places = (row.get("data"), row.get("part"), row.get("site"), row.get("layer"))
    return "/".join(["workbench", metric, *(str(place) for place in places if place is not None), *axes])


def identity(folder: Path, info: Mapping[str, Any]) -> str:
    """The same for a run wherever it lies, another for one of its name that was begun anew."""
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', folder.name)}-{digest(folder.name, info.get('created'))[:8]}"


def _kept(value: float) -> float | None:
    """A number as it compares with what MLflow gives back: NaN equals nothing, and for infinity a database keeps the largest float."""
    return None if math.isnan(value) else max(-sys.float_info.max, min(sys.float_info.max, value))


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs = list[tuple[str, Any]]()
    for key, value in values.items():
        pairs += _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else [(f"{before}{key}", value)]
    return pairs
