"""Interface of a reader of training logs, and the numbers of runs in a log.

A reader is one file of this folder with `READER = LogReader(...)`.
"""

from __future__ import annotations

import csv
import importlib
import math
import pkgutil
import re
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from workbench.checkpoints import training_logs as folder
from workbench.checkpoints.training_logs.quantity_names import (
    STEP_AVERAGE,
    SUMMARIES,
    SUMMARY_REASON,
    TRAIN_TIME,
    UNITS,
    plain_name,
    quantity,
)
from workbench.checkpoints.training_logs.units_and_counters import (
    Curve,
    drop_other_counters,
    drop_other_units,
    of_micro_batches,
    refuse_tokens,
)
from workbench.errors import BadData, WorkbenchError
from workbench.file_io import open_regular

HEAD = 1 << 14  # bytes by which a form is recognised
LARGEST = 2**53  # largest step that tables can hold
WIDE = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of UTF-16, which PowerShell writes."""
CUT_OFF = "the last line has no end and is shorter than the one before: it may be cut off"
EVALUATIONS = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
"""Words of a file's name, a column or a cell by which a plain `loss` is no training loss."""
NO_SETTING = re.compile(r"seed|dir|path|file|name|host|rank|device|version|time|date|\bid\b", re.IGNORECASE)
"""Hyperparameters in which seeds of one setting may differ."""
EPOCHS = {"epochs", "n_epochs", "num_epochs", "max_epochs", "num_train_epochs"}
"""Hyperparameters that are the number of epochs."""
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error, struct.error)
BACKWARDS = 100  # times that steps may go back in one run


@dataclass(frozen=True)
class LogReader:
    """Reader of one form of training logs.

    Args:
        name: Name of the form, for messages.
        recognises: Whether a file is of this form, from its path and its first bytes.
        read: Adds the numbers of a file.
        home: Returns the path that names the run or the runs of a file; files with one home are read together, in order of their names.
    """

    name: str
    recognises: Callable[[Path, bytes], bool]
    read: Callable[[Path, LogNumbers], None]
    home: Callable[[Path], Path] = lambda path: path


@dataclass
class LogNumbers:
    """Numbers of a file by run and quantity, in the order of the file, and how often each reason left something out.

    A run is named by its setting and its own name in the file; both are empty in a file of one run. One run may have several files.
    """

    path: Path
    runs: dict[tuple[str, str], dict[str, tuple[array[int], array[int], array[float], array[float]]]] = field(
        default_factory=dict
    )
    """Order, steps, values and times of each quantity, by run."""
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    chronological: bool = True
    """Whether a step that goes back is a restart, even if no step is repeated; a table may be unsorted instead."""
    by_quantity: bool = False
    """Whether each quantity counts its steps by itself."""
    evaluation: bool = False
    """Whether the file's name says that its `loss` is one of an evaluation."""
    spelled: dict[tuple[tuple[str, str], str], str] = field(default_factory=dict)
    """Name in the log of each run's quantities."""
    count: int = 0
    newest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Last step of each run."""
    returned: set[tuple[str, str]] = field(default_factory=set)
    """Runs with a step that is smaller than the one before."""
    at: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """Epoch and step of the line before, by run."""
    parameters: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    """Hyperparameters of each run that a tracker has beside its numbers."""
    clock: dict[tuple[Path, str], float] = field(default_factory=dict)
    """Time of the last number of each folder and name, in the files before."""
    ended: set[tuple[str, str]] = field(default_factory=set)
    """Runs with the summary that transformers' Trainer writes at the end."""
    ahead: dict[tuple[str, str], set[float]] = field(default_factory=dict)
    """Up to two differences between epoch and step, by run."""

    def note_epoch(self, epoch: float, step: float, run: tuple[str, str] = ("", "")) -> None:
        """Note the epoch of a line; raises `BadData` if steps begin again in a later epoch."""
        if len(offsets := self.ahead.setdefault(run, set())) < 2:
            offsets.add(epoch - step)
        before = self.at.get(run, (0.0, 0.0))
        if epoch > before[0] and step < before[1]:
            raise BadData(
                f"{self.path}: the steps begin again in epoch {epoch:g}; give a log that counts steps over all epochs"
            )
        self.at[run] = epoch, step

    def forget_from(self, step: int, names: Container[str | None]) -> None:
        """Drop the numbers of these quantities from this step on, which a restarted writer declares void."""
        for curves in self.runs.values():
            for name, columns in ((name, columns) for name, columns in curves.items() if name in names):
                keep = [i for i, own in enumerate(columns[1]) if own < step]
                self.skipped[f"the run was restarted from step {step}"] += len(columns[1]) - len(keep)
                order, steps, values, times = columns
                curves[name] = (
                    array("q", [order[i] for i in keep]), array("q", [steps[i] for i in keep]),
                    array("d", [values[i] for i in keep]), array("d", [times[i] for i in keep]),
                )  # fmt: skip

    def add(
        self,
        step: float,
        name: str,
        value: float,
        *,
        run: tuple[str, str] = ("", ""),
        factor: float = 1.0,
        time: float = math.nan,
    ) -> None:
        """Add a number of a step; `name` is theirs, `factor` converts its unit. Raises `BadData` for a fractional step."""
        ours, own_factor, why = quantity(name)
        if plain_name(name) in SUMMARIES:
            self.ended.add(run)
        if plain_name(name) == "epoch" and len(offsets := self.ahead.setdefault(run, set())) < 2:
            offsets.add(value - step)
        if ours is None:
            self.skipped[why] += 1
            return
        if self.evaluation and plain_name(name) == "loss":
            self.skipped["loss in a file that is named after an evaluation; name it train_loss or val_loss"] += 1
            return
        if (first := self.spelled.setdefault((run, ours), name)) != name:
            self.skipped[f"{name} means the same as {first}"] += 1
            return
        if value < 0 and UNITS.get(ours) == "nats":
            self.skipped[f"{name} is negative, so it is no cross-entropy"] += 1
            return
        if not math.isfinite(step) or not 0 <= step <= LARGEST:
            self.skipped["the step is negative or no number"] += 1
            return
        if step != int(step):
            raise BadData(f"{self.path}: step {step:g} is no whole number, so it counts epochs or thousands, not steps")
        curves = self.runs.setdefault(run, {})
        if ours not in curves:
            curves[ours] = array("q"), array("q"), array("d"), array("d")
        order, steps, values, times = curves[ours]
        if step < self.newest.get(run, 0.0):
            self.returned.add(run)
        self.newest[run] = step
        order.append(self.count)
        steps.append(int(step))
        values.append(value * factor * own_factor)
        times.append(time)
        self.count += 1

    def courses(self) -> Iterator[tuple[tuple[str, str], dict[str, Curve]]]:
        """Yield each run and its curves; a restart replaces the steps it repeats, and a second start is another run."""
        for setting in dict.fromkeys(setting for setting, _ in self.runs):
            each = [self.parameters.get(key, {}) for key in self.runs if key[0] == setting]
            names = [n for n in dict.fromkeys(n for p in each for n in p) if not NO_SETTING.search(n)]
            if differ := [n for n in names if len({p.get(n) for p in each}) > 1]:
                self.notes.append(
                    f"{setting}: its {len(each)} runs differ in {', '.join(differ[:5])} but count as seeds; name runs with --architecture"
                )
        for (setting, run), columns in self.runs.items():
            filled = {name: tuple(np.asarray(column) for column in each) for name, each in columns.items() if each[0]}
            tables: dict[str, Sequence[np.ndarray]] = {n: t[:3] for n, t in filled.items()}
            times = {n: t[3] for n, t in filled.items()}
            if self.by_quantity and not any(steps.any() for _, steps, _ in tables.values()):
                why = "the run has step 0 only, as trackers store a number without a step; log it with a step"
                self.skipped[why] += sum(len(steps) for _, steps, _ in tables.values())
                continue
            if tables and not np.isnan(np.concatenate([*times.values()])).any():
                drop_other_counters(tables, times, self.skipped)
                spelled = self.spelled.get(((setting, run), "train_loss"))
                if (setting, run) in self.ended and spelled == "train_loss" and len(times[spelled]) == 1:
                    self.skipped[SUMMARY_REASON] += tables.pop(spelled, None) is not None
            counted = np.unique(np.concatenate([np.zeros(0, int), *(steps for _, steps, _ in tables.values())]))
            refuse_tokens(self.path, counted)
            if self._counts_epochs((setting, run), counted):
                self.skipped["the steps count epochs; log the optimiser step"] += len(counted)
                continue
            if (setting, run) not in self.returned:
                parts = [{name: (steps, values) for name, (_, steps, values) in tables.items()}]
            elif self.by_quantity:
                alone = [self._parts({name: table}, split=False)[0] for name, table in tables.items()]
                parts = [{name: curve for part in alone for name, curve in part.items()}]
            else:
                parts = self._parts(tables)
            if len(parts) > 1:
                self.notes.append(
                    f"{self.path.name}: {run or 'the file'} starts {len(parts)} times, so it is {len(parts)} runs"
                )
            for i, part in enumerate(parts):
                name = f"{run}#{i + 1}" if len(parts) > 1 else run
                yield (setting, name), self._finished(part, name or self.path.name, (setting, run) in self.ended)

    def _counts_epochs(self, run: tuple[str, str], steps: np.ndarray) -> bool:
        """Return whether three or more steps count epochs, by a column or by the number of epochs."""
        number = {text for name, text in self.parameters.get(run, {}).items() if name.lower() in EPOCHS}
        one_each = (
            str(len(steps)) in number and np.array_equal(steps, steps[0] + np.arange(len(steps))) and steps[0] < 2
        )
        return len(steps) > 2 and (one_each or self.ahead.get(run, set()) in ({0.0}, {1.0}))

    def _parts(self, tables: Mapping[str, Sequence[np.ndarray]], *, split: bool = True) -> list[dict[str, Curve]]:
        """Split the curves (order, steps, values) of a run at each start, and drop steps that a restart repeats."""
        order, steps = (np.concatenate([table[i] for table in tables.values()]) for i in (0, 1))
        order, steps = np.sort(order), steps[np.argsort(order)]
        back = np.flatnonzero(np.diff(steps) < 0) + 1
        if not self.chronological and all(len(np.unique(table[1])) == len(table[1]) for table in tables.values()):
            back = back[:0]  # a table that is not sorted by step: nothing is repeated
        if len(back) > BACKWARDS:
            raise BadData(f"{self.path}: the steps go back {len(back)} times; give a file in which they grow")
        gaps = np.diff(steps)
        usual = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0
        starts, dropped = [0], np.zeros(len(steps), bool)
        for i in map(int, back):
            begin = starts[-1]
            if split and steps[i] <= steps[begin] <= max(1.0, 2 * usual):
                starts.append(i)
                continue
            repeated = np.flatnonzero((steps[begin:i] >= steps[i]) & ~dropped[begin:i]) + begin
            dropped[repeated] = True
            self.skipped[f"the run went back to step {steps[i]} and repeated it"] += len(repeated)
        parts = []
        for low, high in zip(starts, [*starts[1:], len(steps)], strict=True):
            part = {}
            for name, (at, own, values) in tables.items():
                rank = np.searchsorted(order, at)
                inside = (rank >= low) & (rank < high) & ~dropped[rank]
                if inside.any():
                    part[name] = own[inside], values[inside]
            parts.append(part)
        return parts

    def _one_value_per_step(self, curves: dict[str, Curve], ended: bool) -> dict[str, Curve]:
        """Return the curves with the last value of each step, without evaluations after the training."""
        single = {}
        for name, (steps, values) in curves.items():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            if ended and name == "validation_loss":
                first = int(np.searchsorted(steps, steps[-1]))
                stop = first + (first + 1 < len(steps) or values[first] != values[:first].min(initial=np.inf))
                if stop < len(steps):
                    why = f"{name} after the end of the training, maybe of the best checkpoint"
                    self.skipped[why] += len(steps) - stop
                steps, values = steps[:stop], values[:stop]
            ends = np.append(steps[1:] != steps[:-1], True)
            other = ~ends[:-1] & (values[1:] != values[:-1]) & ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
            if 2 * len(np.unique(steps[:-1][other])) > ends.sum():
                self.skipped[f"{name} has several values at most of its steps"] += len(steps)
                continue
            if other.any():
                self.skipped[f"earlier values of {name} at a step with several"] += int(other.sum())
            single[name] = steps[ends], values[ends]
        return single

    def _finished(self, curves: dict[str, Curve], of: str, ended: bool) -> dict[str, Curve]:
        """Return the curves with one value for each step, and seconds per step in place of cumulative times."""
        single = self._one_value_per_step(curves, ended)
        if not self.chronological:  # a table has an empty cell, or NaN, where another loss was measured
            losses = [name for name in single if UNITS.get(name) in ("nats", "bits per byte")]
            known = np.concatenate([np.zeros(0), *(s[~np.isnan(v)] for s, v in (single[n] for n in losses))])
            for name in losses:
                steps, values = single[name]
                later = np.append(steps[~np.isnan(values)], -1).max()
                hole = np.isnan(values) & ((steps < later) | np.isin(steps, known))
                if hole.any():
                    self.skipped[f"{name} is NaN beside another loss or before a number"] += int(hole.sum())
                    single |= {name: (steps[~hole], values[~hole])}
                    single = {key: curve for key, curve in single.items() if len(curve[0])}
        longest = max((int(steps[-1]) for steps, _ in single.values()), default=0)
        for name, (steps, _) in list(single.items()) if self.by_quantity else ():
            if len(steps) > 1 and steps[0] <= 1 and (np.diff(steps) == 1).all() and 10 * steps[-1] < longest:
                self.skipped[f"{name} counts to {steps[-1]} and others to {longest:,}, so it may count epochs"] += len(
                    steps
                )
                del single[name]
        total, average = single.pop(TRAIN_TIME, None), single.pop(STEP_AVERAGE, None)
        if total is not None and average is not None and "seconds_per_step" not in single:
            pace = seconds_per_step(total, average)
            single |= {"seconds_per_step": pace} if len(pace[0]) else {}
        elif average is not None:
            self.skipped["step_avg is an average over many steps"] += len(average[0])
        drop_other_units(single, self.skipped)
        if why := of_micro_batches(single):
            self.notes.append(f"{of}: {why}")
        if broken := sum(int((~np.isfinite(values)).sum()) for _, values in single.values()):
            self.notes.append(f"{of}: {broken} values are NaN or infinite, and are stored as such")
        return single


def seconds_per_step(total: Curve, average: Curve) -> Curve:
    """Return the mean seconds per step since the entry before, from a cumulative time and its average over the counted steps.

    The time divided by the average is the number of counted steps. If this number does not grow with the step, the clock was set
    back, and the interval is left out. modded-nanogpt does not count its first ten steps.
    """
    steps, left, right = np.intersect1d(total[0], average[0], return_indices=True)
    times, means = total[1][left], average[1][right]
    with np.errstate(divide="ignore", invalid="ignore"):
        uncounted = steps - times / means
    apart, spent = np.diff(steps), np.diff(times)
    sound = (np.abs(np.diff(uncounted)) < 1) & (spent > 0)
    return steps[1:][sound], (spent / np.maximum(apart, 1))[sound]


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file by its first bytes; raises `OSError` for pipes and devices."""
    with open_regular(path) as file:
        return "utf-16" if file.read(2) in WIDE else "utf-8-sig"


def of_evaluation(path: Path) -> bool:
    """Return whether a file or its folder is named after an evaluation, as `val.csv` and `eval/log.txt`."""
    return not EVALUATIONS.isdisjoint([*re.split("[^a-z]+", path.stem.lower()), path.parent.name.lower()])


@cache
def log_readers() -> tuple[LogReader, ...]:
    """Return the readers. `table` and `text` are at the end because they recognise a file by its first line and accept any text."""
    modules = (importlib.import_module(f"{folder.__name__}.{m.name}") for m in pkgutil.iter_modules(folder.__path__))
    readers = [module.READER for module in modules if hasattr(module, "READER")]
    last = ("table", "text")
    return tuple(sorted(readers, key=lambda reader: last.index(reader.name) if reader.name in last else -1))


def reader_of(path: Path) -> LogReader | None:
    """Return the reader that recognises a file by its name and first bytes; None for other files and unreadable ones."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD)
    except OSError:
        return None
    return next((reader for reader in log_readers() if reader.recognises(path, head)), None)


def read_log(files: Sequence[Path], reader: LogReader, home: Path | None = None) -> LogNumbers:
    """Read the numbers of the files with one home, in order; raises `BadData` naming the file and the fault."""
    numbers = LogNumbers(home or files[0])
    for path in files:
        try:
            reader.read(path, numbers)
        except WorkbenchError:
            raise
        except DAMAGED as error:
            raise BadData(f"{path} cannot be read as {reader.name}: {type(error).__name__}: {error}") from error
    return numbers
