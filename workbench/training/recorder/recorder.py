"""`Recorder`: chosen quantities of a module, every so many optimiser steps, from any training loop.

Between logging steps `step` counts and does nothing else: no hook stands. A logging step reduces activations inside hooks,
gradients in one launch, and copies the matrices; the next call compares them, so any optimiser, scaler or accumulation may
stand in between. Everything stays on its device until then and is fetched at once.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.metrics import METRICS
from workbench.runs.run import FORMAT, runs_folder, written_now
from workbench.runs.trackers import Sink, checked, opened
from workbench.training.recorder.activation_capture import BY_POSITION, GRADIENT_NORM, GRADIENT_SINK, ActivationCapture
from workbench.training.recorder.capture_points import (
    ATTENTION_INPUT,
    blocks_of,
    capture_points,
    has_named_hooks,
    matrix_places,
)
from workbench.training.recorder.quantities import DEFAULT, UNITS, aliases_of, chosen
from workbench.training.recorder.recording_folder import RecordingFolder
from workbench.training.recorder.step_record import StepRecord, frobenius_norms, is_sharded

WITH_GRADIENT = ("stream", "v", "own_v", "first_v")
"""Activations whose gradients are recorded."""
_OPEN: weakref.WeakValueDictionary[Path, Recorder] = weakref.WeakValueDictionary()


class NotRecorded(UserWarning):
    """A quantity of the default set that this module or this step does not show."""


class Recorder:
    """Records a module's training into a run folder. `step` after `backward`, `close` after the last optimiser step.

    Args:
        model: any module; wrapped in DistributedDataParallel, compiled or sharded by `fully_shard` is fine. A foreign module
            under `workbench.observe` shows its attention too; the loop goes on calling the module itself.
        every: optimiser steps between logging steps.
        folder: the run folder; default a new one, named by the model and the time, under `runs` or `$WORKBENCH_RUNS`.
        quantities: names from `quantities()`.
        start: optimiser step the loop begins at; needed where the folder holds a recording already. What it holds from
            there on is dropped.
        seed: tells runs of one model apart.
        to: `wandb`, `tensorboard`, `mlflow` or several: where the numbers go beside the folder.

    Raises `UnknownName` for a quantity or a sink, `WorkbenchError` for one that this module does not show, for a folder
    in use or of another model. Only the first process of several writes; its activations are those of its share of the
    batch. Where parameters are sharded, every process calls `step` and `close`, and norms are those of whole matrices.
    """

    def __init__(
        self, model: nn.Module, every: int = 100, folder: str | Path | None = None, *,
        quantities: Iterable[str] = DEFAULT, start: int | None = None, seed: int = 0,
        to: str | Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.quantities, sinks = chosen(quantities), checked(to)
        if every < 1 or (start or 0) < 0:
            raise WorkbenchError(f"every={every}, start={start}: at least 1, and at least 0")
        self.model, self.every, self.count = _unwrapped(model), every, start or 0
        self.places = matrix_places(self.model)
        self.active = _rank() == 0
        self.helps = not self.active and any(
            is_sharded(p) for p in self.model.parameters()
        )  # with norms of spread tensors
        self.unavailable: dict[str, str] = {}
        self.capture = self._make_capture(strict=quantities is not DEFAULT)
        self.seconds, self.since = 0.0, (self.count, time.perf_counter())
        self.open: StepRecord | None = None
        self.sinks: list[Sink] = []
        self.variant: str | None = None  # of the gradient norms, where a trainer clips first
        if self.active:
            path = _path(folder, self.model)
            if path in _OPEN:  # the same cell of a notebook, run again
                _OPEN[path].close()
            self.folder = RecordingFolder(path, self._info(seed), start=start, every=every)
            _OPEN[path] = self
            weakref.finalize(self, _stop, self.capture, self.folder, self.sinks)  # also where `close` is never called
            self.sinks += opened(sinks, path, self.folder.info, start)
            if self.unavailable:
                warnings.warn(_warning(self.unavailable), NotRecorded, stacklevel=2)
            if self.count % every == 0:
                self.capture.start()

    def step(self, loss: Any = None, *, scaler: Any = None, learning_rate: float | None = None) -> None:
        """Count an optimiser step, and record it where it is one of `every`.

        Call it once per optimiser step, after the last `backward` and before clipping and `optimizer.step()`.

        Args:
            loss: number or tensor of one element to write down.
            scaler: the `GradScaler`, where the loss is scaled; before or after its `unscale_`.
            learning_rate: to write down.

        Raises `WorkbenchError` after `close` and where no gradients are there.
        """
        if self.active or self.helps:
            due, began = self.count % self.every == 0, 0.0
            if self.open or due or (self.count + 1) % self.every == 0:
                began = time.perf_counter()
                if self.active and self.folder.closed:
                    raise WorkbenchError(f"the recorder of {self.folder.path} is closed")
                self._finish()
                if due:
                    self._begin(loss, scaler, learning_rate)
                if self.active and (self.count + 1) % self.every == 0:
                    self.capture.start()
                self.seconds += time.perf_counter() - began
        self.count += 1

    def note(self, metric: str, value: float, *, step: int | None = None, **axes: Any) -> None:
        """Write down a number of your own; `step` defaults to the optimiser step at hand."""
        if self.active:
            at = self.count if step is None else step
            self._write(at, [{"step": at, "metric": metric, "value": float(value), **axes}])

    def close(self) -> None:
        """Finish the last record and write everything; call it after the last optimiser step."""
        if self.helps or (self.active and not self.folder.closed):
            self._finish()
        if self.active:
            _stop(self.capture, self.folder, self.sinks)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.open:
            self.open.weights.clear()  # whether the update took place is unknown
        self.close()

    @torch.no_grad()
    def _begin(self, loss: Any, scaler: Any, learning_rate: float | None) -> None:
        self.capture.stop()
        matrices = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        gradients = {n: p.grad for n, p in matrices.items() if p.grad is not None}
        if not gradients:
            raise WorkbenchError("no gradients: call recorder.step after backward and before the optimiser's zero_grad")
        scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
        record = self.open = StepRecord(self.count)
        if loss is not None:
            record.add({"metric": "train_loss"}, loss)
        if learning_rate is not None:
            record.add({"metric": "learning_rate"}, learning_rate)
        if "gradient_norm" in self.quantities:
            self._gradients(record, gradients, None if scale is None or _unscaled(scaler) else scale)
        if "coefficient" in self.quantities and has_named_hooks(self.model):
            self._coefficients(record)
        for axes, value in self.capture.results(scale):
            record.add(axes, value)
        if {"update_ratio", "weight_norm"} & set(self.quantities):
            recorded = {n: matrices[n].detach() for n in self.places}
            norms = frobenius_norms(recorded.values())
            if "weight_norm" in self.quantities:
                for name, norm in zip(recorded, norms, strict=True):
                    record.add({"metric": "weight_norm", **self._place(name)}, norm)
            if "update_ratio" in self.quantities:
                record.weights = {n: (w.clone(), norm) for (n, w), norm in zip(recorded.items(), norms, strict=True)}
        if self.active:
            self._warn_of_missing()

    def _gradients(self, record: StepRecord, gradients: dict[str, Tensor], scale: Tensor | None) -> None:
        norms = dict(zip(gradients, frobenius_norms(gradients.values()), strict=True))
        if scale is not None:
            norms = {n: norm / scale.to(norm.device) for n, norm in norms.items()}
        home = next(iter(norms.values())).device
        total = torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms.values()]))
        record.add({"metric": "gradient_norm", "part": "all", "variant": self.variant}, total)
        for name in self.places:
            if name in norms:
                record.add({"metric": "gradient_norm", "variant": self.variant, **self._place(name)}, norms[name])

    @torch.no_grad()
    def _coefficients(self, record: StepRecord) -> None:
        for shortcut in getattr(self.model, "shortcuts", ()):
            for part, values in shortcut.coefficients().items():
                for layer, value in enumerate(values):
                    if value == value:  # NaN: this layer has none
                        record.add({"metric": "coefficient", "part": part, "layer": layer}, value)

    @torch.no_grad()
    def _finish(self) -> None:
        """Complete the last record now that its update has taken place; the one sync."""
        record, self.open = self.open, None
        if record is None:
            return
        if record.weights:
            now = dict(self.model.named_parameters())
            change = [old for old, _ in record.weights.values()]
            torch._foreach_sub_(change, [now[n].detach() for n in record.weights])
            for (name, (_, norm)), moved in zip(record.weights.items(), frobenius_norms(change), strict=True):
                ratio = torch.where(norm > 0, moved / norm, torch.nan)
                record.add({"metric": "update_ratio", **self._place(name)}, ratio)
        rows = record.rows()
        spent, (before, clock), now_ = self.seconds + self.capture.seconds, self.since, time.perf_counter()
        if record.step > before:
            elapsed = now_ - clock
            pace = {"seconds_per_step": elapsed / (record.step - before), "recorder_share": spent / elapsed}
            rows += [{"step": record.step, "metric": m, "unit": UNITS[m], "value": value} for m, value in pace.items()]
        self.seconds = self.capture.seconds = 0.0
        self.since = record.step, now_
        self._write(record.step, rows)

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        if not self.active:
            return
        self.folder.add(step, rows)
        for sink in self.sinks:
            sink.add(step, rows)

    def _place(self, name: str) -> dict[str, Any]:
        part, layer = self.places[name]
        return {"part": part, "layer": layer}

    def _make_capture(self, *, strict: bool) -> ActivationCapture:
        metrics = [METRICS[q] for q in self.quantities if q in METRICS and METRICS[q].form == "per_sequence"]
        pulls = {GRADIENT_NORM: WITH_GRADIENT, GRADIENT_SINK: (ATTENTION_INPUT,), BY_POSITION: (ATTENTION_INPUT,)}
        pulls = {name: aliases for name, aliases in pulls.items() if name in self.quantities}
        reads = {m.name: aliases_of(m) for m in metrics} | pulls
        points = capture_points(self.model, [alias for aliases in reads.values() for alias in aliases])
        shown = {point.alias for point in points}
        for name, aliases in reads.items():
            if not shown & set(aliases):
                helps = name not in (GRADIENT_SINK, BY_POSITION) and not has_named_hooks(self.model)
                advice = "; give workbench.observe(model, ids) instead" if helps else ""
                self.unavailable[name] = f"{type(self.model).__name__} shows no {' or '.join(aliases)}{advice}"
        if "coefficient" in self.quantities and not has_named_hooks(self.model) and strict:
            self.unavailable["coefficient"] = f"{type(self.model).__name__} is no model of workbench"
        if strict and self.unavailable:
            name, reason = next(iter(self.unavailable.items()))
            raise WorkbenchError(f"{name} cannot be recorded: {reason}")
        available = [m for m in metrics if m.name not in self.unavailable]
        pulled = [alias for aliases in pulls.values() for alias in aliases]
        return ActivationCapture(self.model, points, available, pulled, self.quantities)

    def _warn_of_missing(self) -> None:
        """Warn once of what a step did not show: too short sequences, or hooks that were never called."""
        missing = self.capture.missing().items()
        if fresh := {name: reason for name, reason in missing if name not in self.unavailable}:
            self.unavailable |= fresh
            self.folder.describe(unavailable=self.unavailable)
            warnings.warn(_warning(fresh), NotRecorded, stacklevel=4)

    def _info(self, seed: int) -> dict[str, Any]:
        """What `run.json` says of a recording: no recipe and no checkpoints, but the shape and what is recorded."""
        named: Any = self.model if has_named_hooks(self.model) else None
        size = sum(p.numel() for p in self.model.parameters())
        shape = {"class": type(self.model).__name__, "n_layers": len(blocks_of(self.model)), "parameters": size}
        return {
            "format": FORMAT, "architecture": named.architecture if named else type(self.model).__name__,
            "options": dict(named.options) if named else {}, "seed": seed,
            "model": dataclasses.asdict(named.config) if named else shape, "data": {"kind": "recorded"},
            "recorder": {"every": self.every, "quantities": list(self.quantities), "unavailable": self.unavailable},
            **written_now(),
        }  # fmt: skip


def _unscaled(scaler: Any) -> bool:
    """Whether `scaler.unscale_` has divided the gradients of this step already."""
    return any(state["stage"].name == "UNSCALED" for state in scaler._per_optimizer_states.values())


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's wrappers; raises for FSDP1's flat parameters."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            break
        model = inner
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise WorkbenchError(
            "FullyShardedDataParallel keeps no matrix by itself; shard the model with fully_shard (FSDP2)"
        )
    return model


def _warning(missing: dict[str, str]) -> str:
    return "not recorded: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items())


def _stop(capture: ActivationCapture, folder: RecordingFolder, sinks: list[Sink]) -> None:
    capture.stop()
    folder.close()
    while sinks:
        sinks.pop().close()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def _path(folder: str | Path | None, model: nn.Module) -> Path:
    if folder is not None:
        return runs_folder(folder)
    return runs_folder() / f"{type(model).__name__.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
