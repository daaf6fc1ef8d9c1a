"""A run's numbers in other people's trackers: Weights & Biases, TensorBoard, MLflow.

    export_log(run, "wandb")                      # what is written down of it
    train(..., log="tensorboard")                 # live, part by part as it is written down

A number's name is its metric and then its axes, `gradient_norm/q_proj/layer2`. Trackers draw a chart for each name, so of records
those by head or position stay out unless their metric is named.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import pandas as pd

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import digest
from workbench.places import install
from workbench.runs.records import load_records
from workbench.runs.run import Run

NAMED = ("data", "variant", "control", "site", "part")
COUNTED = ("layer", "source", "head", "position", "index")
MANY = ["head", "position", "index"]
PROJECT = "workbench"
FITS = 1000  # numbers in one request, MLflow's limit; of its parameters a tenth
LONGEST = 250  # characters of a name or a setting, MLflow's limit


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """The numbers of one step."""

    def close(self, failed: bool) -> None:
        """Nothing more comes."""


def export_log(run: Run, to: str, where: str | None = None, metrics: Sequence[str] | None = None) -> int:
    """Hand a tracker what is written down of a run, telemetry and records, and return how many numbers that were.

    `where`: the project of W&B, the folder of TensorBoard, the URI of MLflow; `metrics`: these alone, all of their axes. Done again it
    goes into the same run of the tracker. Raises `UnknownName` for a tracker or a metric, `BadData` where nothing is written down.
    """
    frame = pd.concat([run.telemetry(), load_records([run.path])], ignore_index=True)
    if metrics is None:
        frame = frame[frame[MANY].isna().all(axis=1)]
    else:
        for name in metrics:
            if not (frame["metric"] == name).any():
                raise UnknownName(f"metric of {run.name}", name, set(frame["metric"]))
        frame = frame[frame["metric"].isin(metrics)]
    if frame.empty:
        raise BadData(f"nothing is written down of {run.name}: there is nothing to hand on")
    with opened(to, run, where, first=int(frame["step"].min())) as told:
        told(frame)
    return len(frame)


@contextlib.contextmanager
def opened(to: str, run: Run, where: str | None = None, first: int = 0) -> Iterator[Callable[[pd.DataFrame], None]]:
    """A function that hands rows to a tracker until the end; `first` is the step at which they begin.

    Raises `UnknownName` for a tracker, `WorkbenchError` where its package is missing or it does not answer.
    """
    if to not in TRACKERS:
        raise UnknownName("tracker", to, TRACKERS)
    try:
        tracker = TRACKERS[to](run, where, first)
    except ImportError as error:
        raise WorkbenchError(f"{to} is not installed: {install(to)} ({error})") from error
    except Exception as error:  # of their own kinds: no key, no network, another program's folder
        raise WorkbenchError(f"{to} cannot be opened: {type(error).__name__}: {error}") from error
    failed = True
    try:
        yield lambda frame: _tell(tracker, frame)
        failed = False
    finally:
        tracker.close(failed)


def _tell(tracker: Tracker, frame: pd.DataFrame) -> None:
    rows = frame.dropna(subset=["step", "value"])
    for step, part in rows.assign(name=series_names(rows)).groupby("step", sort=True):
        tracker.log(int(cast(int, step)), dict(zip(part["name"], part["value"].astype(float), strict=True)))


def series_names(frame: pd.DataFrame) -> list[str]:
    """What each row is called."""
    names = []
    for metric, *axes in frame[["metric", *NAMED, *COUNTED]].astype("object").itertuples(index=False):
        told = [str(value) for value in axes[: len(NAMED)] if not pd.isna(value)]
        counted = zip(COUNTED, axes[len(NAMED) :], strict=True)
        told += [f"{axis}{int(value)}" for axis, value in counted if not pd.isna(value)]
        names.append("/".join([str(metric), *told]))
    return names


def settings(run: Run) -> dict[str, Any]:
    """What a tracker shows beside the numbers: architecture, options, seed, shape, recipe and data."""
    told = {key: run.info[key] for key in ("architecture", "seed", "versions") if key in run.info}
    groups = {
        key: run.info[key] for key in ("options", "model", "train", "data") if isinstance(run.info.get(key), dict)
    }
    return told | groups


def identity(run: Run) -> str:
    """The same for a run wherever it lies, another for one of its name that was begun anew."""
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', run.name)}-{digest(run.name, run.info.get('created'))[:8]}"


class _WandB:
    def __init__(self, run: Run, where: str | None, first: int) -> None:
        import wandb

        self.run = wandb.init(
            project=where or PROJECT, id=identity(run), name=run.name, config=settings(run), resume="allow"
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class _TensorBoard:
    def __init__(self, run: Run, where: str | None, first: int) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(where or "tensorboard") / run.name  # what it showed from the first step on is shown no more
        self.writer = SummaryWriter(logdir=str(folder), purge_step=first, filename_suffix=f".{first}")
        self.writer.add_text(
            "settings", "\n".join(f"    {key}: {value}" for key, value in settings(run).items()), first
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class _MLflow:
    def __init__(self, run: Run, where: str | None, first: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric = MlflowClient(tracking_uri=where), Metric
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(PROJECT)
        own = f"tags.`{PROJECT}.run` = '{identity(run)}'"
        if found := self.client.search_runs([experiment], filter_string=own, max_results=1):
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        self.id = self.client.create_run(
            experiment, tags={f"{PROJECT}.run": identity(run)}, run_name=run.name
        ).info.run_id
        pairs = [(k, value) for k, v in settings(run).items() for k, value in _flat(k, v)]
        for i in range(0, len(pairs), FITS // 10):
            self.client.log_batch(self.id, params=[Param(k, str(v)[:LONGEST]) for k, v in pairs[i : i + FITS // 10]])

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        told = [self.metric(re.sub(r"[^\w\-. /]", "_", k)[:LONGEST], v, now, step) for k, v in values.items()]
        for i in range(0, len(told), FITS):
            self.client.log_batch(self.id, metrics=told[i : i + FITS])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(key, value)]
    return [pair for inner, one in value.items() for pair in _flat(f"{key}.{inner}", one)]


TRACKERS: dict[str, Callable[[Run, str | None, int], Tracker]] = {
    "wandb": _WandB, "tensorboard": _TensorBoard, "mlflow": _MLflow,
}  # fmt: skip
