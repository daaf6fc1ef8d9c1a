"""`Recorder`: selected quantities of a module at every n-th optimiser step of any training loop, and its run folder.

Between logging steps, `step` only counts, and no hook is installed. A logging step reduces activations inside hooks,
reduces gradients in one kernel launch, and copies the matrices. The next call compares the copies, so it works with any
optimiser, scaler or accumulation. All numbers stay on their devices until one transfer at the end.
"""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet  # noqa: F401 - now, not in the middle of a training
import torch
from torch import Tensor, nn

from workbench.checkpoints.paths import RUN_FILE
from workbench.distributed import rank
from workbench.errors import WorkbenchError, warn_caller
from workbench.file_io import read_json, write_json
from workbench.hook_names import STATISTICS
from workbench.metrics import METRICS
from workbench.observing.interception.sharded_weights import is_sharded
from workbench.runs.records import read_parquet, records, write_parquet
from workbench.runs.run import FORMAT, Run, runs_folder, written_now
from workbench.runs.tracker_export import Tracker, installed_trackers, open_trackers
from workbench.training.recorder.activation_capture import (
    ATTENTION_INPUT,
    BY_POSITION,
    GRADIENT_NORM,
    GRADIENT_SINK,
    ActivationCapture,
    Places,
    blocks_of,
    capture_points,
    has_named_hooks,
    matrix_places,
)
from workbench.training.recorder.quantities import (
    DEFAULT,
    UNITS,
    NotRecorded,
    StepRecord,
    Stopped,
    aliases_of,
    first_line,
    frobenius_norms,
    known_quantities,
    noted_row,
    one_number,
)

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


WITH_GRADIENT = ("stream", "v", "own_v", "first_v")  # activations with recorded gradients
_OPEN: weakref.WeakValueDictionary[Path, Recorder] = weakref.WeakValueDictionary()


class Recorder:
    """Recorder of a module's training. Call `step` after `backward`, and `close` after the last optimiser step.

    Args:
        model: Any module, also wrapped in DistributedDataParallel, compiled, or sharded by `fully_shard`. A foreign module
            under `workbench.observe` also shows its attention; the loop still calls the module itself.
        every: Optimiser steps between logging steps.
        folder: Run folder; default a new one, named by model and time, under `runs` or `$WORKBENCH_RUNS`.
        quantities: Names from `quantities()`.
        start: First optimiser step of the loop, required if the folder already holds a recording. Recorded steps from
            `start` on are removed.
        seed: Seed to distinguish runs of one model.
        to: Trackers that receive the numbers too: `wandb`, `tensorboard`, `mlflow`.

    Raises:
        UnknownName: There is no such quantity or tracker.
        WorkbenchError: The module does not show a quantity, or the folder is in use or belongs to another model.

    Note:
        Only the first of several processes writes, with the activations of its share of the batch. If parameters are
        sharded, every process must call `step` and `close`, and norms are computed on complete matrices.
    """

    def __init__(
        self, model: nn.Module, every: int = 100, folder: str | Path | None = None, *,
        quantities: Iterable[str] = DEFAULT, start: int | None = None, seed: int = 0,
        to: str | Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.quantities, names = known_quantities(quantities), installed_trackers(to)
        if every < 1 or (start or 0) < 0:
            raise WorkbenchError(f"every={every}, start={start}: at least 1, and at least 0")
        self.model, self.every, self.count = _unwrapped(model), every, start or 0
        self.places: Places = {}
        self.untrained: set[str] = set()  # matrices that are no longer recorded
        initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.active = (torch.distributed.get_rank() if initialised else rank()) == 0
        if rank() and not initialised:
            warn_caller(
                f"nothing is recorded in this process: RANK is {rank()}, and torch.distributed is not initialised. Initialise it before "
                "making the recorder or, where processes train different models, unset RANK and WORLD_SIZE",
                NotRecorded,
            )
        spread = any(is_sharded(p) for p in self.model.parameters())
        self.helps = not self.active and spread  # takes part in norms of complete matrices
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
        self.trackers: list[Tracker] = []
        self.variant: str | None = None  # of gradient norms, if a trainer clips first
        if self.active:
            stamp = f"{type(self.model).__name__.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
            path = runs_folder() / stamp if folder is None else runs_folder(folder)
            if path in _OPEN:  # a notebook cell that runs again
                _OPEN[path].close()
            self.folder = RecordingFolder(path, self._info(seed), start=start, every=every)
            _OPEN[path] = self
            weakref.finalize(self, _stop, self.capture, self.folder, self.trackers)  # in case `close` is never called
            self.trackers += open_trackers(names, path, self.folder.info, start)
            if self.unavailable:
                warn_caller(f"{_warning(self.unavailable)}. {self.coverage}".rstrip(), NotRecorded)
            if self.count % every == 0:
                self.capture.start()

    def step(self, loss: Any = None, *, scaler: Any = None, learning_rate: float | None = None) -> None:
        """Count an optimiser step, and record every n-th one.

        Call it once per optimiser step, after the last `backward` and before clipping and `optimizer.step()`. It never raises: a
        quantity that fails stops with one `NotRecorded` warning, and the training continues.

        Args:
            loss: Loss of the step, a number or a tensor of one element.
            scaler: The `GradScaler` of a scaled loss, before or after its `unscale_`.
            learning_rate: Learning rate of the step.
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
        """Record a number of the loop; a number that cannot be written is left out with one `NotRecorded` warning.

        Args:
            metric: Name of the number.
            value: The number, or a tensor of one element.
            step: Optimiser step; default the current one.
            **axes: Columns of a record, such as `layer`, `head`, `part`, `site`, `variant`, `data` or `unit`.
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
        """Complete the last record and write everything; call it after the last optimiser step."""
        if not self.ended:
            self._finish()
            self._warn()
            self._end(f"the recorder{f' of {self.folder.path}' if self.active else ''} is closed")

    def _end(self, reason: str, *, forked: bool = False) -> None:
        """Stop recording; a forked process leaves its parent's folder, lock and trackers alone."""
        active, self.ended, self.open = self.active, reason, None
        self.active = self.helps = False
        if active and forked:
            self.folder.closed = True
            self.trackers.clear()
        if active:
            _stop(self.capture, self.folder, self.trackers)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.open:
            self.open.weights.clear()  # the update may be missing
        self.close()

    @torch.no_grad()
    def _begin(self, loss: Any, scaler: Any, learning_rate: float | None) -> None:
        if self.ended:
            return
        self.stopped.attempt(self.capture.names, self.capture.stop)
        record = self.open = StepRecord(self.count)
        self.add_to_record("train_loss", loss)
        self.add_to_record("learning_rate", learning_rate)
        if self._wants("coefficient") and has_named_hooks(self.model):
            with self.stopped.guard("coefficient"):
                for shortcut in getattr(self.model, "shortcuts", ()):
                    for axes, value in shortcut.coefficient_rows():
                        record.add({"metric": "coefficient", **axes}, value)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.places = matrix_places(self.model, self.places)
        if gone := sorted(self.places.keys() - trained.keys() - self.untrained):
            self.untrained |= set(gone)
            named = ", ".join(gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
            self._warn({named: f"frozen, removed or renamed at step {self.count}"})
        gradients = {n: p.grad for n, p in trained.items() if p.grad is not None}
        if gradients:
            scaled = {GRADIENT_NORM, GRADIENT_SINK, BY_POSITION, "gradient_norm"} & set(self.quantities)
            scales = self.stopped.attempt(sorted(scaled), _scales, scaler) or (None, None)
            if self._wants("gradient_norm"):
                with self.stopped.guard("gradient_norm"):
                    norms = dict(zip(gradients, frobenius_norms(gradients.values()), strict=True))
                    if scales[1] is not None:
                        norms = {n: norm / scales[1].to(norm.device) for n, norm in norms.items()}
                    home = next(iter(norms.values())).device
                    total = torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms.values()]))
                    axes = {"metric": "gradient_norm", "variant": self.variant}
                    record.add(axes | {"part": "all"}, total)
                    for name in (n for n in self.places if n in norms):
                        record.add(axes | self._place(name), norms[name])
            if self.capture.names - self.stopped.reasons.keys():
                with self.stopped.guard(*self.capture.names):
                    for axes, value in self.capture.results(scales[0]):
                        record.add(axes, value)
            self._warn(self.capture.missing())
        else:
            self._warn({"gradients": "there are none: call step after backward and before zero_grad"})
        matrices = {n: trained[n].detach() for n in self.places if n in trained}
        if self._wants("weight_norm"):
            with self.stopped.guard("weight_norm"):
                for name, norm in zip(matrices, frobenius_norms(matrices.values()), strict=True):
                    record.add({"metric": "weight_norm", **self._place(name)}, norm)
        if self._wants("update_ratio"):
            with self.stopped.guard("update_ratio"):
                before = zip(matrices.items(), frobenius_norms(matrices.values()), strict=True)
                record.weights = {n: (w.clone(), norm) for (n, w), norm in before}

    def _wants(self, quantity: str) -> bool:
        """Return whether a quantity was asked for and has not failed."""
        return quantity in self.quantities and quantity not in self.stopped.reasons

    def add_to_record(self, metric: str, value: Any) -> None:
        """Add a number of the loop to the current step's record, if both exist."""
        if (record := self.open) and value is not None:
            self.stopped.attempt([metric], lambda: record.add({"metric": metric}, one_number(value)))

    @torch.no_grad()
    def _finish(self) -> None:
        """Complete the last record after its update, with the only synchronisation."""
        record, self.open = self.open, None
        if record is None:
            return
        if record.weights and "update_ratio" not in self.stopped.reasons:
            with self.stopped.guard("update_ratio"):
                now: dict[str, Tensor] = dict(self.model.named_parameters())
                alike = {n: w for n, (w, _) in record.weights.items() if n in now and now[n].shape == w.shape}
                for name in record.weights.keys() & now.keys() - alike.keys():
                    self._warn({f"update_ratio of {name}": f"its shape changed in step {record.step}"})
                change = list(alike.values())
                torch._foreach_sub_(change, [now[n].detach().to(w.device, w.dtype) for n, w in alike.items()])
                for name, moved in zip(alike, frobenius_norms(change), strict=True):
                    norm = record.weights[name][1]
                    ratio = torch.where(norm > 0, moved / norm, torch.nan)
                    record.add({"metric": "update_ratio", **self._place(name)}, ratio)
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

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        if not self.active:
            return
        self.folder.add(step, rows)
        for tracker in list(self.trackers):
            self.stopped.attempt([name := f"numbers in {type(tracker).__name__}"], tracker.add, step, rows)
            if name in self.stopped.reasons:
                self.trackers.remove(tracker)

    def _place(self, name: str) -> dict[str, Any]:
        part, layer = self.places[name]
        return {"part": part, "layer": layer}

    def _aim(self) -> dict[str, str]:
        """Set the capture points again if modules were added or replaced; returns unavailable quantities and reasons."""
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
        """Warn once about everything that is not recorded, stopped quantities and an ended recorder included."""
        every = self.stopped.reasons | dict(reasons or {}) | ({"steps": self.ended} if self.ended else {})
        fresh = {name: reason for name, reason in every.items() if name not in self.unavailable}
        if fresh and not self.helps:
            self.unavailable |= fresh
            if self.active:
                self.folder.describe(unavailable=self.unavailable)
            warn_caller(_warning(fresh), NotRecorded)

    def _info(self, seed: int) -> dict[str, Any]:
        """Return the contents of a recording's `run.json`: no recipe and no checkpoints, but the shape and quantities."""
        named: Any = self.model if has_named_hooks(self.model) else None
        size = sum(p.numel() for p in self.model.parameters())
        shape = {"class": type(self.model).__name__, "n_layers": len(blocks_of(self.model)), "parameters": size}
        return {
            "format": FORMAT, "architecture": named.architecture if named else type(self.model).__name__,
            "options": dict(named.options) if named else {}, "seed": seed,
            "model": dataclasses.asdict(named.config) if named else shape, "data": {"kind": "recorded"},
            "recorder": {"every": self.every, "quantities": list(self.quantities), "unavailable": self.unavailable}
            | ({"coverage": covered} if (covered := self.coverage) else {}),
            **written_now(),
        }  # fmt: skip

    @property
    def coverage(self) -> str:
        """Line on the recorded shares of parameters, layers and attention; empty for models of `build`."""
        if has_named_hooks(self.model):
            return str(self.model.coverage) if getattr(self.model, "foreign", None) is not None else ""
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        total, places = max(sum(sizes.values()), 1), matrix_places(self.model)
        share = sum(sizes[name] for name in places) / total if GRADIENT_NORM in self.quantities else 0.0
        layers = range(len(blocks_of(self.model)))
        points = [(p.alias, layer) for p, _, _ in self.capture.plan if (layer := p.axes.get("layer")) in layers]
        read = {layer for _, layer in points}
        attended = {layer for alias, layer in points if alias in STATISTICS}
        return (
            f"Coverage: gradient norms of matrices with {share:.1%} of {total:,} parameters; activations in {len(read)} of "
            f"{len(layers)} layers; attention of {len(attended)}."
        )


def _scales(scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of the gradients of activations and of parameters; `scaler.unscale_` removes the second."""
    scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
    if scale is None:
        return None, None
    unscaled = any(state["stage"].name == "UNSCALED" for state in scaler._per_optimizer_states.values())
    return scale, None if unscaled else scale


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile and DistributedDataParallel; raises for FSDP1's flat parameters."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod" if hasattr(model, "_orig_mod") else "module")
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise WorkbenchError("FullyShardedDataParallel stores no separate matrices; shard with fully_shard (FSDP2)")
    return model


def _warning(missing: dict[str, str]) -> str:
    return "not recorded: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items())


def _stop(capture: ActivationCapture, folder: RecordingFolder, trackers: list[Tracker]) -> None:
    capture.stop()
    folder.close()
    while trackers:
        tracker = trackers.pop()
        try:
            tracker.close()
        except Exception as error:  # of another library, or its server
            warn_caller(_warning({f"the end of {type(tracker).__name__}": first_line(error)}), NotRecorded)


def _end_in_fork() -> None:
    for recorder in list(_OPEN.values()):
        recorder._end(f"process {os.getpid()} was forked from the one that records", forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_fork)
