"""Where a recorder's numbers go beside its folder: W&B and TensorBoard, through their own clients.

workbench.Recorder(model, to="wandb")          # into the loop's own W&B run where one is open, else into an offline run
workbench.Recorder(model, to="tensorboard")    # event files in the folder's `tensorboard/`

A number is called `workbench/METRIC/PART/LAYER/hHEAD` there, as far as it has them, at the optimiser step it was recorded at.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import UnknownName, WorkbenchError


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

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True)
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "workbench"), name=folder.name, dir=folder, mode=mode,
            config=dict(info), settings=quiet,
        )  # fmt: skip

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Log all numbers of a step at once."""
        self.run.log({"workbench/step": step, **{tag(row): row["value"] for row in rows}})

    def close(self) -> None:
        """End the run, where it is the recorder's own."""
        if self.own:
            self.own.finish()


class TensorBoardSink:
    """Event files in `tensorboard/` of the folder; a resumed recording hides what they hold from its first step on."""

    def __init__(self, folder: Path, info: Mapping[str, Any], start: int | None) -> None:
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start)

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write each number as a scalar."""
        for row in rows:
            self.writer.add_scalar(tag(row), row["value"], step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


SINKS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], int | None], Sink]]] = {
    "wandb": ("wandb", WandbSink),
    "tensorboard": ("tensorboardX", TensorBoardSink),
}


def checked(to: str | Iterable[str]) -> tuple[str, ...]:
    """Names of sinks whose clients are installed; raises `UnknownName`, and `WorkbenchError` for one that is not."""
    names = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
    for name in names:
        if name not in SINKS:
            raise UnknownName("sink", name, SINKS)
        if importlib.util.find_spec(SINKS[name][0]) is None:
            raise WorkbenchError(f"to={name!r} takes its client: pip install {SINKS[name][0]}")
    return names


def tag(row: Mapping[str, Any]) -> str:
    """A row's name: `workbench/gradient_norm/q_proj/3`, with its variant behind the metric and `h2` for a head."""
    metric = "-".join(str(row[key]) for key in ("metric", "variant") if row.get(key) is not None)
    head = None if row.get("head") is None else f"h{row['head']}"
    places = (row.get("part"), row.get("site"), row.get("layer"), head)
    return "/".join(["workbench", metric, *(str(place) for place in places if place is not None)])
