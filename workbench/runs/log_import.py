"""Import of training logs without weights as runs (`workbench import LOG... --name NAME`).

    logs/base/a.log  logs/base/b.log  logs/shared/a.log      settings `base` (seeds 0 and 1) and `shared` (seed 0)

A folder is a setting and a file is a seed; a table may name both in columns. Runs that name their seeds keep them. The runs of one
import are one experiment.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout

from workbench.checkpoints.paths import ENDINGS, RUN_FILE, is_directory
from workbench.checkpoints.training_logs.quantity_names import ESTIMATED, UNITS
from workbench.checkpoints.training_logs.reading import Curve, LogReader, read_log, reader_of
from workbench.console import Progress
from workbench.errors import BadData, UnknownName, WorkbenchError, refuse_unknown
from workbench.file_io import local, write_json
from workbench.models.architecture_names_and_colours import architecture as architecture_of
from workbench.runs.records import typed, write_parquet
from workbench.runs.run import FORMAT, LOG_FACTS, Run, place_of, written_now
from workbench.storage.mirror import push

ROWS = 500_000  # of one telemetry file
LOCK, NEW_S = "import.lock", 60.0
TOLD = 12  # reasons and files that a note lists
SHARED, PRINTED = 5, 5.1e-5  # losses that must be equal, and the rounding of four digits
SEED = re.compile(r"(?<![a-z])seed[\s_=-]*(\d+)", re.IGNORECASE)  # in a path or a name
RANK = re.compile(r"(rank[\s:=_.-]*)0*[1-9]\d*", re.IGNORECASE)  # of a distributed process, in a file's name
ADVICE = dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "compressed; unpack it")


@dataclass(frozen=True)
class ImportedLogs:
    """Imported runs, and notes on read and omitted numbers."""

    runs: tuple[Run, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _LogRun:
    """Curves of one run, the setting and the name that its log has, and the file."""

    setting: str
    name: str
    path: Path
    form: str
    curves: dict[str, Curve]
    seed: str  # empty if the log does not name it

    @property
    def last(self) -> int:
        return max(int(steps[-1]) for steps, _ in self.curves.values())


def is_log(path: str | Path) -> bool:
    """Return whether a path is a training log, or a folder with logs and no weights; no other path of `workbench import` is."""
    place = Path(path)
    if place.is_file():
        return place.suffix not in ENDINGS and reader_of(place) is not None
    if not place.is_dir() or is_directory(place) or (place / RUN_FILE).exists():
        return False
    weights = any(file.suffix in ENDINGS or file.name == RUN_FILE for file in _files(place))
    return not weights and any(reader_of(file) for file in _files(place))


def import_logs(
    paths: Sequence[str | Path], runs: Path, *, name: str | None = None, architecture: str | Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None, progress: Progress | None = None,
) -> ImportedLogs:  # fmt: skip
    """Import training logs as runs without weights, one run for each log. All runs appear, or none.

    Args:
        paths: Logs, or folders of logs.
        runs: Folder of runs.
        name: Name of the experiment, with which the runs' names begin; default the name of the only path.
        architecture: Architecture of all runs, or the architecture by setting or by the beginning of a run's name. Only runs that
            it names are imported then. Default: the setting's name.
        config: What is known of the trainings, of `LOG_FACTS`: {"parameters": 124e6, "tokens_per_step": 524288}. Claims do not
            test what is unknown.
        progress: Called with (done, total, description).

    Returns:
        The runs and the notes.

    Raises:
        BadData: A file cannot be read, or no file has a number of a step.
        UnknownName: There is no such architecture, setting, run or fact.
        WorkbenchError: A name is taken.
    """
    places = [local(path) for path in paths]
    if absent := [str(place) for place in places if not place.exists()]:
        raise BadData(f"{absent[0]}: no such file or folder")
    name = name or (places[0].stem if places[0].is_file() else places[0].resolve().name)
    facts = dict(config or {})
    for key, value in facts.items():
        refuse_unknown("fact of a training log", key, LOG_FACTS)
        if key != "data" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < np.inf):
            raise BadData(f"{key}={value!r}: must be a number of 0 or more")
    logs, notes = _read(places, progress)
    if isinstance(architecture, Mapping):
        logs, labels = _selected(logs, architecture, notes)
    else:
        labels = [_registered(architecture) if architecture else log.setting or name for log in logs]
    logs, labels = _distinct(logs, labels, notes)
    notes += _continuing(logs, labels)
    seeds = [int(float(log.seed)) if re.fullmatch(r"\d{1,9}(\.0)?", log.seed) else -1 for log in logs]
    if -1 in seeds or len({*zip(labels, seeds, strict=True)}) < len(
        seeds
    ):  # not all name one, or a setting has one twice
        seeds = [labels[:i].count(label) for i, label in enumerate(labels)]
    names = _run_names(name, labels, seeds)
    taken = [place for run in names if (place := place_of(runs, run)).exists()]
    if taken:
        raise WorkbenchError(f"{taken[0]} exists; choose another name with --name, or remove it")
    written = written_now()
    with all_appearing([place_of(runs, run) for run in names]) as folders:
        for i, (log, label, seed, folder) in enumerate(zip(logs, labels, seeds, folders, strict=True)):
            if progress:
                progress(i, len(logs), f"writing {names[i]}")
            _write_telemetry(folder, log, run=names[i], architecture=label, seed=seed)
            origin = {"from": str(log.path), "form": log.form, "setting": log.setting, "name": log.name}
            info = {
                "format": FORMAT, "architecture": label, "options": {}, "seed": seed, "data": {"kind": "log"},
                "log": {**origin, "experiment": name, "last": log.last, "known": facts}, **written,
            }  # fmt: skip
            write_json(folder / RUN_FILE, info)
    for run in names:
        push(place_of(runs, run))
    return ImportedLogs(tuple(Run.open(place_of(runs, run)) for run in names), tuple(notes))


def _registered(name: str) -> str:
    architecture_of(name)
    return name


def _files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder by name, without hidden ones; of links to folders, only those to the outside are followed."""
    above = (*above, folder.resolve())
    try:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise BadData(f"{folder} cannot be read: {error.strerror}") from error
    yield from (path for path in entries if not path.is_dir())
    for path in entries:
        if path.is_dir() and not (path.is_symlink() and any(path.resolve().is_relative_to(top) for top in above)):
            yield from _files(path, above)


def _read(places: Sequence[Path], progress: Progress | None) -> tuple[list[_LogRun], list[str]]:
    """Read all logs; the setting of a log is its folder below the common folder of all paths."""
    places = [Path(os.path.normpath(place.absolute())) for place in places]
    common = Path(os.path.commonpath([place if place.is_dir() else place.parent for place in places]))
    sources, unread, seen = dict[tuple[LogReader, Path], list[Path]](), list[str](), set[Path]()
    for file in (file for place in places for file in ([place] if place.is_file() else _files(place))):
        if (real := file.resolve()) in seen:
            continue
        seen.add(real)
        if RANK.search(file.name) and file.with_name(RANK.sub(r"\g<1>0", file.name)).exists():
            unread.append(f"{file.relative_to(common)} (another rank than 0)")
        elif reader := reader_of(file):
            sources.setdefault((reader, reader.home(file)), []).append(file)
        else:
            unread.append(f"{file.relative_to(common)} ({ADVICE.get(file.suffix, 'no known form')})")
    logs, notes = list[_LogRun](), list[str]()
    totals = dict[
        str, tuple[Counter[str], Counter[str]]
    ]()  # of many logs, by form: what was read and what was left out
    for i, ((reader, home), files) in enumerate(sorted(sources.items(), key=lambda item: item[0][1])):
        if progress:
            progress(i, len(sources), f"reading {files[0]}")
        used: Sequence[Path] = files
        if reader.name == "trainer_state.json":  # the state with most steps holds the history of the earlier ones
            step = re.compile(r"checkpoint-(\d+)$")
            used = [max(files, key=lambda file: int((step.search(file.parent.name) or [0, 2**62])[1]))]
        numbers = read_log(used, reader, home)
        runs = [(run, curves) for run, curves in numbers.courses() if curves]
        where = Path(os.path.relpath(home, common)).as_posix() if home != common else home.name
        if not runs:
            unread.append(f"{where} (no step with a known quantity: {_listed(numbers.skipped)})")
            continue
        folder = os.path.relpath(home.parent, common) if home != common else "."
        for (setting, run), curves in runs:
            own = "/".join(part for part in (folder if folder not in (".", "..") else "", setting) if part)
            seed = numbers.parameters.get((setting, run), {}).get("seed") or "/".join(
                dict.fromkeys(SEED.findall(f"{where}/{setting}/{run}"))
            )
            logs.append(_LogRun(own, run if setting else f"{home.name}{run}", home, reader.name, curves, seed))
        many = len(sources) > TOLD
        where, (counts, skipped) = f"{where} ({reader.name})", (Counter[str](), Counter[str]())
        if many:
            where = reader.name
            counts, skipped = totals.setdefault(where, (counts, skipped))
        counts.update(runs=len(runs), logs=1)
        for _, curves in runs:
            counts.update({metric: len(steps) for metric, (steps, _) in curves.items()})
        skipped.update(numbers.skipped)
        notes += numbers.notes if many else [*_read_and_left(where, counts, skipped), *numbers.notes]
        if len(used) < len(files):
            notes.append(f"{where}: {len(files) - len(used)} earlier states of the same training")
    if len(notes) > TOLD and totals:
        notes[TOLD:] = [f"and {len(notes) - TOLD} more notes of this kind"]
    for where, (counts, skipped) in totals.items():
        notes += _read_and_left(f"{counts['logs']:,} logs ({where})", counts, skipped)
    if unread:
        more = f" and {len(unread) - TOLD} more" if len(unread) > TOLD else ""
        notes.append(f"not read: {', '.join(unread[:TOLD])}{more}")
    if not logs:
        raise BadData(f"no training log at {', '.join(map(str, places))}; {notes[-1] if notes else 'nothing is there'}")
    return logs, notes


def _distinct(logs: Sequence[_LogRun], labels: Sequence[str], notes: list[str]) -> tuple[list[_LogRun], list[str]]:
    """Leave out a log whose losses equal those of another log in its setting to four digits: one training."""
    distinct, known = dict[int, str](), dict[tuple[str, bytes], list[tuple[str, np.ndarray]]]()
    of_setting = dict[tuple[str, str], list[tuple[Path, Curve]]]()
    repeated = dict[str, list[str]](own=[], other=[])
    for i, (log, label) in enumerate(zip(logs, labels, strict=True)):
        same = set[str]()
        for metric, (steps, values) in log.curves.items():
            if UNITS[metric] == "nats" and len(steps) >= SHARED:
                others = known.setdefault((metric, steps.tobytes()), [])
                same |= {
                    theirs for theirs, each in others if np.allclose(values, each, rtol=0, atol=PRINTED, equal_nan=True)
                }
                others.append((label, values))
                files = of_setting.setdefault((metric, label), [])
                same |= {label for path, curve in files if path != log.path and _one_training(curve, (steps, values))}
                files.append((log.path, (steps, values)))
        if same:
            name = f"{log.path.name}: {log.name}" if log.name != log.path.name else log.name
            repeated["own" if label in same else "other"].append(name)
        if label not in same:
            distinct[i] = label
    for which, words in {
        "own": "left out, with the losses of another log of their setting",
        "other": "imported, with the losses of a log of another setting",
    }.items():
        if names := repeated[which]:
            more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
            notes.append(f"{words}: {', '.join(names[:TOLD])}{more}")
    return [logs[i] for i in distinct], list(distinct.values())


def _one_training(curve: Curve, other: Curve) -> bool:
    """Return whether the losses of two files are equal to four digits at their common steps, of which there are five or more."""
    (coarse, values), (fine, finer) = sorted((curve, other), key=lambda each: len(each[0]))
    at = min(int(np.searchsorted(fine, coarse[SHARED - 1])), len(fine) - 1)
    if fine[at] != coarse[SHARED - 1] or abs(finer[at] - values[SHARED - 1]) > PRINTED:
        return False
    _, left, right = np.intersect1d(coarse, fine, assume_unique=True, return_indices=True)
    return len(left) >= SHARED and np.allclose(values[left], finer[right], rtol=0, atol=PRINTED, equal_nan=True)


def _continuing(logs: Sequence[_LogRun], labels: Sequence[str]) -> list[str]:
    """Return notes on logs that count as seeds: one continues another of its setting, or learning rates differ."""
    ends, notes = [[f([s[at] for s, _ in log.curves.values()]) for f, at in ((min, 0), (max, -1))] for log in logs], []
    for label in dict.fromkeys(labels):
        curves = [log.curves.get("learning_rate") for log, own in zip(logs, labels, strict=True) if own == label]
        highest = sorted(float(np.max(curve[1])) for curve in curves if curve)
        if highest and highest[-1] > 1.01 * highest[0]:
            between = f"learning rates of its runs reach {highest[0]:g} to {highest[-1]:g}"
            notes.append(f"{label}: {between} but count as seeds; name runs with --architecture")
    for log, label, (first, last) in zip(logs, labels, ends, strict=True):
        for other, theirs, (begin, end) in zip(logs, labels, ends, strict=True):
            if label == theirs and begin < first and end < last:
                where = "inside" if first <= end else "after the end of"
                notes.append(
                    f"{log.name} begins at step {first:,}, {where} {other.name}; if it continues that run, join the files, "
                    "else they count as two seeds"
                )
    return notes[:TOLD]


def _read_and_left(where: str, counts: Mapping[str, int], skipped: Counter[str]) -> list[str]:
    """Return a note on read numbers, and one on omitted numbers."""
    read = ", ".join(f"{counts[metric]:,} {metric.replace('_', ' ')}" for metric in UNITS if counts.get(metric))
    notes = [f"{where}: {counts['runs']:,} run{'s' * (counts['runs'] > 1)}, {read}"]
    return notes + ([f"{where}: left out: {_listed(skipped)}"] if skipped else [])


def _listed(skipped: Counter[str]) -> str:
    reasons = [f"{reason} ({n:,})" for reason, n in skipped.most_common(TOLD)]
    return "; ".join(reasons + (["other reasons"] if len(skipped) > TOLD else [])) or "it has no line of numbers"


def _selected(logs: Sequence[_LogRun], wanted: Mapping[str, str], notes: list[str]) -> tuple[list[_LogRun], list[str]]:
    labels = dict[int, str]()
    for key, value in wanted.items():
        label = _registered(value)
        hits = [i for i, log in enumerate(logs) if key in (log.setting, log.name)]
        hits = hits or [i for i, log in enumerate(logs) if log.name.startswith(key) or log.setting.endswith(f"/{key}")]
        if not hits:
            raise UnknownName("setting or run", key, {text for log in logs for text in (log.setting, log.name) if text})
        if twice := [i for i in hits if labels.get(i, label) != label]:
            raise BadData(f"{logs[twice[0]].name} is named twice, as {labels[twice[0]]} and as {label}")
        labels |= dict.fromkeys(hits, label)
    if left := len(logs) - len(labels):
        notes.append(f"left out: {left:,} runs that --architecture does not name")
    return [logs[i] for i in sorted(labels)], [labels[i] for i in sorted(labels)]


def _run_names(name: str, labels: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return a folder name for each run; settings whose names differ only in signs get a number."""
    slugs, known = dict[str, str](), set[str]()
    for label in dict.fromkeys(labels):
        slug = re.sub(r"[^\w.+-]+", "-", label).strip("-.") or "setting"
        free = next(
            s for n in range(1, len(labels) + 2) if (s := slug if n == 1 else f"{slug}-{n}").lower() not in known
        )
        known.add(free.lower())
        slugs[label] = free
    if len(slugs) == 1:
        return [name] if len(labels) == 1 else [f"{name}-s{seed}" for seed in seeds]
    return [f"{name}-{slugs[label]}-s{seed}" for label, seed in zip(labels, seeds, strict=True)]


def _write_telemetry(folder: Path, log: _LogRun, **common: Any) -> None:
    """Write the curves of a run as rows with these columns in common."""
    bounds, begin = np.sort(np.concatenate([steps for steps, _ in log.curves.values()])), 0
    while begin < len(bounds):  # a step is never cut in two
        first, last = bounds[begin], bounds[min(begin + ROWS, len(bounds)) - 1]
        begin = int(np.searchsorted(bounds, last, side="right"))
        parts = []
        for metric, (steps, values) in log.curves.items():
            low, high = np.searchsorted(steps, (first, last + 1))
            axes = {
                "metric": "train_loss" if metric == ESTIMATED else metric, "unit": UNITS[metric],
                "variant": "estimate" if metric == ESTIMATED else None,
                "part": "all" if metric == "total_gradient_norm" else None,
                "data": "validation" if metric == "validation_loss" else None,
            }  # fmt: skip
            parts.append(pd.DataFrame({"step": steps[low:high], "value": values[low:high]} | axes | common))
        table = typed(pd.concat(parts, ignore_index=True).sort_values("step", kind="stable"))
        write_parquet(table, folder / "telemetry" / f"{first:06d}-{last + 1:06d}.parquet")


@contextmanager
def all_appearing(places: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield hidden folders that become `places` on success, all or none. Remove the folders of imports that were killed."""
    part = places[0].with_name(f".{uuid.uuid4().hex[:12]}.part")
    moved = list[tuple[Path, Path]]()
    try:
        part.mkdir(parents=True)
        with FileLock(part / LOCK):
            for lock in part.parent.glob(f".*.part/{LOCK}"):
                if time.time() - lock.stat().st_mtime < NEW_S:
                    continue
                with suppress(Timeout), FileLock(lock, timeout=0):  # else another import writes
                    shutil.rmtree(lock.parent, ignore_errors=True)
            folders = [part / place.name for place in places]
            for folder in folders:
                folder.mkdir()
            yield folders
        for folder, place in zip(folders, places, strict=True):
            if place.exists():
                raise WorkbenchError(f"{place} exists; choose another name with --name, or remove it")
            folder.rename(place)
            moved.append((folder, place))
    except BaseException as error:
        for folder, place in moved:
            place.rename(folder)
        if isinstance(error, OSError):
            raise WorkbenchError(f"cannot write {places[0].parent}: {error.strerror or error}") from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
