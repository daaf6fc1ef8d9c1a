"""`Recorder`: chosen quantities of a module, every so many optimiser steps, from any training loop.

Between logging steps `step` counts and does nothing else: no hook stands. A logging step reduces activations inside hooks,
gradients in one launch, and copies the matrices; the next call compares them, so any optimiser, scaler or accumulation may
stand in between. Everything stays on its device until then and is fetched at once.
"""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.distributed import rank
from workbench.errors import WorkbenchError, warn_caller
from workbench.metrics import METRICS
from workbench.observing.interception.weights import is_sharded
from workbench.runs.run import FORMAT, runs_folder, written_now
from workbench.runs.trackers import Sink, checked, opened
from workbench.training.recorder.activation_capture import BY_POSITION, GRADIENT_NORM, GRADIENT_SINK, ActivationCapture
from workbench.training.recorder.capture_points import (
    ATTENTION_INPUT,
    Places,
    blocks_of,
    capture_points,
    has_named_hooks,
    matrix_places,
)
from workbench.training.recorder.quantities import DEFAULT, UNITS, NotRecorded, Stopped, aliases_of, chosen, first_line
from workbench.training.recorder.recording_folder import RecordingFolder
from workbench.training.recorder.step_record import StepRecord, frobenius_norms, noted_row, one_number

WITH_GRADIENT = ("stream", "v", "own_v", "first_v")
"""Activations whose gradients are recorded."""
_OPEN: weakref.WeakValueDictionary[Path, Recorder] = weakref.WeakValueDictionary()


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
        self.places: Places = {}
        self.untrained: set[str] = set()  # matrices that were recorded and no longer are
        self.active = _is_first_process()
        spread = any(is_sharded(p) for p in self.model.parameters())
        self.helps = not self.active and spread  # with norms of whole matrices
        self.ended = ""  # why nothing is recorded any more
        self.stopped = Stopped()
        self.capture = ActivationCapture(self.model, self.stopped, self.quantities)
        self.layout: list[int] = []
        self.unavailable = self._aim()
        if quantities is not DEFAULT:
            if "coefficient" in self.quantities and not has_named_hooks(self.model):
                self.unavailable["coefficient"] = f"{type(self.model).__name__} is no model of workbench"
            for name, reason in self.unavailable.items():
                raise WorkbenchError(f"{name} cannot be recorded: {reason}")
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
                warn_caller(_warning(self.unavailable), NotRecorded)
            if self.count % every == 0:
                self.capture.start()

    def step(self, loss: Any = None, *, scaler: Any = None, learning_rate: float | None = None) -> None:
        """Count an optimiser step, and record it where it is one of `every`.

        Call it once per optimiser step, after the last `backward` and before clipping and `optimizer.step()`. It never raises: a
        quantity that cannot be recorded any more stops with one `NotRecorded` warning, and the training goes on.

        Args:
            loss: number or tensor of one element to write down.
            scaler: the `GradScaler`, where the loss is scaled; before or after its `unscale_`.
            learning_rate: to write down.
        """
        try:
            due, next_due = self.count % self.every == 0, (self.count + 1) % self.every == 0
            if (self.open or due or next_due) and (self.active or self.helps or self.ended):
                began = time.perf_counter()
                self._finish()
                if due:
                    self._begin(loss, scaler, learning_rate)
                if self.active and next_due:
                    self._warn(self._aim())
                    self.stopped.attempt(self.capture.names, self.capture.start)
                self._warn()
                self.seconds += time.perf_counter() - began
        finally:
            self.count += 1

    def note(self, metric: str, value: float, *, step: int | None = None, **axes: Any) -> None:
        """Write down a number of your own; what cannot be written is left out with one `NotRecorded` warning.

        Args:
            metric: Name of the number.
            value: The number, or a tensor of one element.
            step: Optimiser step; default the current one.
            axes: Columns of a record, as `layer`, `head`, `part`, `site`, `variant`, `data` or `unit`.
        """
        if self.active or self.ended:
            try:
                row = noted_row(self.count if step is None else step, metric, value, axes)
            except (WorkbenchError, TypeError, ValueError, OverflowError, RuntimeError) as error:
                self._warn({f"note {metric!r}": first_line(error)})
            else:
                self._write(row["step"], [row])
                self._warn()

    def close(self) -> None:
        """Finish the last record and write everything; call it after the last optimiser step."""
        if not self.ended:
            self._finish()
            self._warn()
            self._end(f"the recorder{f' of {self.folder.path}' if self.active else ''} is closed")

    def _end(self, reason: str, *, forked: bool = False) -> None:
        """Record nothing from now on; a forked process leaves its parent's folder, lock and trackers alone."""
        active, self.ended, self.open = self.active, reason, None
        self.active = self.helps = False
        if active and forked:
            self.folder.closed = True
            self.sinks.clear()
        if active:
            _stop(self.capture, self.folder, self.sinks)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.open:
            self.open.weights.clear()  # whether the update took place is unknown
        self.close()

    @torch.no_grad()
    def _begin(self, loss: Any, scaler: Any, learning_rate: float | None) -> None:
        if self.ended:
            return
        self.stopped.attempt(self.capture.names, self.capture.stop)
        record = self.open = StepRecord(self.count)
        attempt = self._attempt
        self.add_to_record("train_loss", loss)
        self.add_to_record("learning_rate", learning_rate)
        attempt("coefficient", self._coefficients, record)
        matrices = self._trained()
        gradients = {n: p.grad for n, p in matrices.items() if p.grad is not None}
        if gradients:
            scaled = {GRADIENT_NORM, GRADIENT_SINK, BY_POSITION, "gradient_norm"} & set(self.quantities)
            scales = self.stopped.attempt(sorted(scaled), _scales, scaler) or (None, None)
            attempt("gradient_norm", self._gradients, record, gradients, scales[1])
            self.stopped.attempt(self.capture.names, self._activations, record, scales[0])
            self._warn(self.capture.missing())
        else:
            self._warn({"gradients": "there are none: call step after backward and before zero_grad"})
        attempt("weight_norm", self._weight_norms, record, matrices)
        attempt("update_ratio", self._copy, record, matrices)

    def _attempt(self, quantity: str, take: Callable[..., None], *inputs: Any) -> None:
        """Take one quantity if it is wanted, see `Stopped.attempt`."""
        if quantity in self.quantities:
            self.stopped.attempt([quantity], take, *inputs)

    def add_to_record(self, metric: str, value: Any) -> None:
        """Add a number of the loop to the current step's record, if there is one and the number is not None."""
        if (record := self.open) and value is not None:
            self.stopped.attempt([metric], lambda: record.add({"metric": metric}, one_number(value)))

    def _trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name; takes up new matrices, and warns once of each that is no longer trained."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.places = matrix_places(self.model, self.places)
        if gone := sorted(self.places.keys() - trained.keys() - self.untrained):
            self.untrained |= set(gone)
            named = ", ".join(gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
            self._warn({named: f"frozen, removed or renamed at step {self.count}"})
        return trained

    def _activations(self, record: StepRecord, scale: Tensor | None) -> None:
        for axes, value in self.capture.results(scale):
            record.add(axes, value)

    def _weight_norms(self, record: StepRecord, matrices: Mapping[str, Tensor]) -> None:
        names = [n for n in self.places if n in matrices]
        for name, norm in zip(names, frobenius_norms(matrices[n].detach() for n in names), strict=True):
            record.add({"metric": "weight_norm", **self._place(name)}, norm)

    def _copy(self, record: StepRecord, matrices: Mapping[str, Tensor]) -> None:
        """Keep the matrices before the update, with their norms."""
        before = {n: matrices[n].detach() for n in self.places if n in matrices}
        norms = frobenius_norms(before.values())
        record.weights = {n: (w.clone(), norm) for (n, w), norm in zip(before.items(), norms, strict=True)}

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

    def _coefficients(self, record: StepRecord) -> None:
        if not has_named_hooks(self.model):
            return
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
            self.stopped.attempt(["update_ratio"], self._updates, record)
        rows = list[dict[str, Any]]()
        try:
            rows = record.rows()
        except Exception as error:  # of the device
            self._warn({"a record": f"that of step {record.step} is dropped: {first_line(error)}"})
        spent, (before, clock), now_ = self.seconds + self.capture.seconds, self.since, time.perf_counter()
        if record.step > before:
            elapsed = now_ - clock
            pace = {"seconds_per_step": elapsed / (record.step - before), "recorder_share": spent / elapsed}
            rows += [{"step": record.step, "metric": m, "unit": UNITS[m], "value": value} for m, value in pace.items()]
        self.seconds = self.capture.seconds = 0.0
        self.since = record.step, now_
        self._write(record.step, rows)

    def _updates(self, record: StepRecord) -> None:
        """Add each matrix's change over its norm; without matrices that were removed or resized since."""
        now: dict[str, Tensor] = dict(self.model.named_parameters())
        alike = {n: w for n, (w, _) in record.weights.items() if n in now and now[n].shape == w.shape}
        for name in record.weights.keys() & now.keys() - alike.keys():
            self._warn({f"update_ratio of {name}": f"its shape changed in step {record.step}"})
        change = list(alike.values())
        after = [now[n].detach().to(w.device, w.dtype) for n, w in alike.items()]
        torch._foreach_sub_(change, after)
        for name, moved in zip(alike, frobenius_norms(change), strict=True):
            norm = record.weights[name][1]
            record.add({"metric": "update_ratio", **self._place(name)}, torch.where(norm > 0, moved / norm, torch.nan))

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        if not self.active:
            return
        self.folder.add(step, rows)
        for sink in list(self.sinks):
            self.stopped.attempt([name := f"numbers in {type(sink).__name__}"], sink.add, step, rows)
            if name in self.stopped.reasons:
                self.sinks.remove(sink)

    def _place(self, name: str) -> dict[str, Any]:
        part, layer = self.places[name]
        return {"part": part, "layer": layer}

    def _aim(self) -> dict[str, str]:
        """Choose where activations are read, again whenever modules were added or replaced; returns what they do not show."""
        layout = [id(module) for module in self.model.modules()]
        if layout == self.layout:
            return {}
        self.layout, unavailable = layout, dict[str, str]()
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
                unavailable[name] = f"{type(self.model).__name__} shows no {' or '.join(aliases)}{advice}"
        available = [m for m in metrics if m.name not in unavailable]
        self.capture.aim(points, available, [alias for aliases in pulls.values() for alias in aliases])
        return unavailable

    def _warn(self, reasons: Mapping[str, str] | None = None) -> None:
        """Warn once of each thing that is not recorded, of quantities that were stopped and of an ended recorder."""
        every = self.stopped.reasons | dict(reasons or {}) | ({"steps": self.ended} if self.ended else {})
        fresh = {name: reason for name, reason in every.items() if name not in self.unavailable}
        if fresh and not self.helps:
            self.unavailable |= fresh
            if self.active:
                self.folder.describe(unavailable=self.unavailable)
            warn_caller(_warning(fresh), NotRecorded)

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


def _scales(scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """Factors by which the gradients of activations and of parameters are scaled; `scaler.unscale_` has divided the latter."""
    scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
    if scale is None:
        return None, None
    unscaled = any(state["stage"].name == "UNSCALED" for state in scaler._per_optimizer_states.values())
    return scale, None if unscaled else scale


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
        sink = sinks.pop()
        try:
            sink.close()
        except Exception as error:  # of another library, or its server
            warn_caller(_warning({f"the end of {type(sink).__name__}": first_line(error)}), NotRecorded)


def _end_in_fork() -> None:
    for recorder in list(_OPEN.values()):
        recorder._end(f"process {os.getpid()} was forked from the one that records", forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_fork)


def _is_first_process() -> bool:
    """Whether this process writes; warns where only environment variables say that it does not."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    if rank():
        warn_caller(
            f"nothing is recorded in this process: RANK is {rank()}, and torch.distributed is not initialised. Initialise it before "
            "making the recorder or, where processes train different models, unset RANK and WORLD_SIZE",
            NotRecorded,
        )
    return rank() == 0


def _path(folder: str | Path | None, model: nn.Module) -> Path:
    if folder is not None:
        return runs_folder(folder)
    return runs_folder() / f"{type(model).__name__.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
