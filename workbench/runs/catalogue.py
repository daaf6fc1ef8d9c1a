"""Catalogue of a folder of runs, one entry per run, read without opening a checkpoint; only changed runs are read again.

Runs that changed within the second before they were read are read again too, since a second change may have the same time. A table that
is overwritten in place does not change its folder's time, so every call also looks at the tables of some runs, in rotation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from workbench.checkpoints.paths import RUN_FILE
from workbench.console import notebook_html
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.file_io import digest
from workbench.runs.records import metrics_of
from workbench.runs.run import MAX_WHOLE, SAME_NAME, Run, is_locked, is_run, is_study
from workbench.runs.sqlite_index import Index, IndexRow
from workbench.storage import mirror

KIND, VERSION = "catalogue", "9"
DAMAGE = (WorkbenchError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
SETTLED = 1_000_000_000  # nanoseconds after which a second change has another time
LOOKS = 1500  # tables whose times are read in each call, 5 ms
PLACES = ("", f"/{RUN_FILE}", "/telemetry", "/records")  # files and folders that change as a run grows


@dataclass(frozen=True)
class Entry:
    """Facts of a run, read without opening its checkpoints."""

    name: str
    path: str
    stamp: tuple[int, ...]  # when each of `PLACES` and the newest table changed, then a digest of run.json
    architecture: str
    options: dict[str, Any]
    series: str  # the architecture, with options where runs of one group differ in them
    seed: int
    kind: str  # of data: text, repeated, backcopy, tokens, recorded, ...
    group: str  # runs of one group share data, shape and recipe, and may be compared
    title: str  # of the group, in words
    steps: tuple[int, ...]  # with a complete checkpoint
    last: int  # the recipe's last step
    n_layers: int
    n_heads: int
    n_ctx: int
    measured: tuple[str, ...]  # names of the metrics that have records
    tokens: int = 0  # read in a training step; 0 if unknown
    observed: bool = False  # another library's model, or a module of the user's own
    shipped: bool = False  # a finished run that came with the project, mostly without weights
    seen: int = field(default=0, compare=False)  # when the entry was read, nanoseconds

    @property
    def settled(self) -> bool:
        """True if nothing had changed for a second when it was read, so that the next change has another time."""
        return self.seen - max(self.stamp[:-1]) > SETTLED

    @property
    def imported(self) -> bool:
        """True if it was trained elsewhere: its training data are unknown, so measuring it needs `data`."""
        return self.kind == "imported"

    def at_step(self, step: int) -> str:
        """Return `, step 300`; nothing for a single imported checkpoint whose step of training is unknown."""
        return "" if self.imported and self.steps == (0,) else f", step {step}"

    @property
    def numbers_only(self) -> str:
        """Description of a run without checkpoints; empty for other runs."""
        return {"recorded": "a recording", "log": "a training log"}.get(self.kind, "")

    @property
    def finished(self) -> bool:
        """True if it was trained to its recipe's last step."""
        complete = self.kind != "recorded" and self.last in self.steps
        return complete or self.imported or self.shipped or self.kind == "log"

    @property
    def being_written(self) -> bool:
        """True while a process trains or records it."""
        return is_locked(Path(self.path))


TUPLES = ("stamp", "steps", "measured")
TIMES = ("stamp", "seen")
WHOLE = (*TIMES, "steps", "seed", "last", "n_layers", "n_heads", "n_ctx", "tokens")


@dataclass
class Catalogue:
    """The runs of a folder by name, and the errors of folders that look like runs but cannot be read."""

    folder: str
    entries: tuple[Entry, ...]
    problems: dict[str, str]
    others: dict[str, int] = field(default_factory=dict)  # other folders, and when they last changed, nanoseconds
    turn: int = field(default=0, compare=False)  # index of the run whose tables are looked at next

    @cached_property
    def by_path(self) -> dict[str, Entry]:
        return {e.path: e for e in self.entries}

    @cached_property
    def groups(self) -> dict[str, list[Entry]]:
        """The runs by experiment."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.group, []).append(entry)
        return groups

    @cached_property
    def stamp(self) -> int:
        """A number that changes whenever a run changes."""
        return hash(tuple((e.path, e.series, e.stamp) for e in self.entries))

    def _repr_html_(self) -> str:
        columns = {"run": "name", "model": "series", "seed": "seed", "experiment": "title", "steps": "last"}
        lines = [[f"<td>{escape(str(getattr(e, name)))}</td>" for name in columns.values()] for e in self.entries]
        rows = "".join(f"<tr>{''.join(cells)}</tr>" for cells in [[f"<th>{name}</th>" for name in columns], *lines])
        facts = {"folder": self.folder, "runs": len(self.entries), **self.problems}
        return notebook_html("runs", facts, f"<table>{rows}</table>")

    def entry(self, name: str) -> Entry:
        """Return the run of this name; raises `UnknownName` with the nearest names."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownName("run", name, [e.name for e in self.entries])


def catalogue(folder: str | Path, known: Catalogue | None = None) -> Catalogue:
    """Return the runs under a folder; unchanged ones come from `known`, returned itself if nothing changed, or the index."""
    root = mirror.folder(folder).resolve()
    mirror.refresh(root)
    if (old := known) is None or old.folder != str(root):
        stored = []
        for part in Index(root).read(KIND, ("",)):
            place = Path(part.run)
            with contextlib.suppress(*DAMAGE):
                values = json.loads(part.value) | {"name": place.name, "path": str(root / place)}
                inside = 0 < len(place.parts) < 3 and ".." not in part.run and not place.is_absolute()
                if part.state == VERSION and inside:
                    stored.append(_sound(Entry(**values | {k: tuple(values[k]) for k in TUPLES})))
        old = Catalogue(str(root), tuple(sorted(stored, key=lambda e: Path(e.path).parts)), {})
    entries, problems = [], {}
    try:
        folders, others = _folders(str(root), old.by_path, old.others)
    except OSError as error:
        return Catalogue(str(root), (), {root.name: f"the folder of runs cannot be read: {error.strerror or error}"})
    rewritten, left = set[str](), LOOKS  # with a table that was overwritten in place, of those whose turn it is
    for _ in old.entries:
        if left > 0:
            entry = old.entries[old.turn % len(old.entries)]
            newest, many = _tables(entry.path)
            old.turn, left = old.turn + 1, left - many - 1
            rewritten |= {entry.path} if newest != entry.stamp[len(PLACES)] else set()
    named = dict[str, str]()
    for path in folders:
        if (same := named.setdefault(Path(path).name, path)) != path:
            problems[_shown(path.removeprefix(f"{root}/"))] = _shown(SAME_NAME.format(same))
            continue
        before = old.by_path.get(path)
        if before and before.settled and before.stamp[: len(PLACES)] == _stamp(path) and path not in rewritten:
            entries.append(before)
            continue
        if before and not is_run(Path(path)):
            continue
        try:
            seen, stamp, run = time.time_ns(), (*_stamp(path), _tables(path)[0]), Run.open(Path(path))
            content = int(digest(run.info)[:12], 16)
            entries.append(_sound(dataclasses.replace(_entry(run, (*stamp, content)), seen=seen)))
        except WorkbenchError as error:
            problems[_shown(Path(path).name)] = _shown(error)
        except DAMAGE as error:
            problems[_shown(Path(path).name)] = _shown(f"run.json is incomplete: {type(error).__name__} {error}")
    if len(entries) == len(old.entries) and all(a is b for a, b in zip(entries, old.entries, strict=True)):
        old.problems, old.others = problems, others
        return old
    result = Catalogue(str(root), tuple(named_series(entries)), problems, others, old.turn)
    if root.is_dir():
        values = {e.path.removeprefix(f"{root}/"): json.dumps(dataclasses.asdict(e)).encode() for e in result.entries}
        Index(root).write(KIND, None, [IndexRow(KIND, "", run, VERSION, value) for run, value in values.items()])
    return result


def _stamp(path: str) -> tuple[int, ...]:
    """Return when each of a run's `PLACES` last changed, nanoseconds."""
    return tuple(_changed(path + place) for place in PLACES)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - a path made of it takes as long again
    except (OSError, ValueError):
        return 0


def _tables(path: str) -> tuple[int, int]:
    """Return when a run's tables were last written, nanoseconds, and their number."""
    newest = many = 0
    for place in PLACES[2:]:
        with contextlib.suppress(OSError), os.scandir(path + place) as files:
            for file in files:
                newest, many = max(newest, file.stat().st_mtime_ns), many + 1
    return newest, many


def _folders(root: str, known: Mapping[str, Entry], before: dict[str, int]) -> tuple[list[str], dict[str, int]]:
    """Return folders that look like runs, also inside studies, in order; and other folders with their times."""
    runs, others = list[str](), dict[str, int]()
    if not Path(root).is_dir():
        return runs, others
    with os.scandir(root) as listed:
        folders = [e for e in listed if not e.name.startswith(".") and e.is_dir()]
    for one in sorted(folders, key=lambda e: e.name):
        if one.path in known:
            runs.append(one.path)
        elif changed := _changed(one.path):
            path = Path(one.path)
            if before.get(one.name) != changed and is_run(path):
                runs.append(one.path)
            elif is_study(path):
                runs += _folders(one.path, known, {})[0]
            elif time.time_ns() - changed > SETTLED:
                others[one.name] = changed
    return runs, others


def _sound(entry: Entry) -> Entry:
    """Return the entry if pages can show it; raises `BadData` naming a field of the wrong type."""
    for key, value in vars(entry).items():
        kind = {"options": dict, "observed": bool, "shipped": bool}.get(key) or (int if key in WHOLE else str)
        parts = value if key in TUPLES else (value,)
        wide = key not in TIMES and any(isinstance(part, int) and abs(part) > MAX_WHOLE for part in parts)
        if wide or not all(isinstance(part, kind) for part in parts):
            raise BadData(f"{key} of run {entry.name} cannot be used: {str(value)[:80]}")
    # raises for text that is not Unicode, endless nesting
    json.dumps(dataclasses.asdict(entry), ensure_ascii=False).encode()
    return entry


def _shown(text: object) -> str:
    """Return text that can be sent to a page; file names need not be Unicode."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _entry(run: Run, stamp: tuple[int, ...]) -> Entry:
    common: dict[str, Any] = {
        "name": run.name, "path": str(run.path), "stamp": stamp, "architecture": run.architecture, "seed": run.seed,
        "options": run.options, "measured": metrics_of(run.path),
    }  # fmt: skip
    if run.recorded:  # each recording is its own series, since nothing shows that two are alike
        return Entry(
            **common, series=run.name, kind="recorded", group="recorded", title="recorded in other loops", steps=(), last=0,
            n_layers=int(run.info["model"]["n_layers"]), n_heads=0, n_ctx=0,
        )  # fmt: skip
    if run.logged:
        log, known = run.info["log"], run.info["log"]["known"]
        return Entry(
            **common, series=run.architecture, kind="log", group=f"log-{log['experiment']}", title=f"training logs {log['experiment']}",
            steps=(), last=int(log["last"]), n_layers=int(known.get("n_layers", 0)), n_heads=0, n_ctx=0,
            tokens=int(known.get("tokens_per_step", 0)),
        )  # fmt: skip
    model, train, data = run.model, run.train, run.info["data"]
    rounded = [run.precision] * ("machine" in run.info and run.precision != "float32")
    kind = str(data["kind"])
    tasks = {
        "repeated": "random tokens, written twice", "backcopy": "random tokens where some marks repeat the token before them",
        "tokens": "token ids from files", "imported": "imported checkpoints, data unknown",
    }  # fmt: skip
    task = tasks.get(kind) or f"text ({', '.join(map(str, data.get('domains', ())))})"
    return Entry(
        **common, series=run.architecture, kind=kind, steps=tuple(run.steps), last=train.steps,
        group=f"{kind}-{model.n_layers}x{model.d_model}-{digest(run.info['model'], run.info['train'], data, *rounded)[:4]}",
        title=f"{task}: {model.n_layers} layers of width {model.d_model}"
        + ("" if kind == "imported" and train.steps < 2 else f", {train.steps} step{'s' * (train.steps != 1)}"),
        n_layers=model.n_layers, n_heads=model.n_heads, n_ctx=model.n_ctx, tokens=0 if kind == "imported" else train.batch * train.T,
        observed=run.observed, shipped=run.shipped,
    )  # fmt: skip


def named_series(entries: list[Entry]) -> Iterable[Entry]:
    """Name each series by the options in which runs of its group and architecture differ, without commas, as links need."""

    def in_short(value: Any) -> str:
        if not isinstance(value, list):
            return str(value)
        numbered = len(value) > 2 and all(isinstance(one, int) for one in value)
        neighbours = numbered and value == list(range(value[0], value[0] + len(value)))
        return f"{value[0]}-{value[-1]}" if neighbours else "+".join(map(str, value))

    kin: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        kin.setdefault((entry.group, entry.architecture), []).append(entry)
    for entry in entries:
        if entry.numbers_only:
            yield entry
            continue
        options, alike = entry.options, kin[entry.group, entry.architecture]
        differing = sorted(k for k in options if any(other.options.get(k) != options[k] for other in alike))
        suffix = "".join(f" {k}={in_short(options[k])}" for k in differing)
        if entry.imported and sum(other.seed == entry.seed for other in alike) == len(alike):
            suffix += f" · {entry.name}"  # runs of one seed are models of their own
        yield dataclasses.replace(entry, series=entry.architecture + suffix)


WORDS = {
    "lr": "rate {}", "n_layers": "{} layers", "d_model": "width {}", "n_heads": "{} heads", "d_mlp": "MLP of {}", "steps": "{} steps",
    "batch": "batch {}", "T": "T {}", "vocabulary": "vocabulary {}", "triggers": "{} triggers", "bos": "start token {}",
    "shortest": "distances from {}", "n_ctx": "context of {}", "n_key_value_heads": "{} key-value heads", "d_vocab": "vocabulary {}",
    "warmup": "{} warm-up steps", "hash": "data {}",
}  # fmt: skip
"""Settings in which experiments may differ, in words; other settings are shown by name."""
STORED = ("save_every", "validate_every", "log_every", "checkpoints", "domains", "kind")
"""Settings that only choose how much is stored, and what other words already tell."""
RARELY = ("n_key_value_heads", "d_vocab", "hash", "warmup")
"""Settings that mostly follow from others; they are shown if nothing else tells experiments apart."""


def differing_settings(groups: Mapping[str, Sequence[Entry]]) -> dict[str, str]:
    """Return how each experiment differs from most others on the same kind of data, as `8 layers, rate 0.002`."""
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for group, runs in groups.items():
        info = Run.open(runs[0].path).info
        parts = (info.get(what) or {} for what in ("data", "model", "train"))
        flat = {key: value for part in parts for key, value in part.items() if key not in STORED}
        flat |= {"precision": Run.open(runs[0].path).precision} if info.get("train") else {}
        settings.setdefault(runs[0].kind, {})[group] = flat

    def unusual(own: dict[str, Any], alike: list[dict[str, Any]]) -> str:
        values = {key: [other.get(key) for other in alike] for key in {**WORDS, **own}}
        parts = []
        for key, all_ in values.items():
            if (value := own.get(key)) != max(all_, key=all_.count):
                parts.append(WORDS.get(key, f"{key.replace('_', ' ')} {{}}").format("none" if value is None else value))
        return ", ".join(parts)

    told = dict[str, str]()
    for alike in settings.values():
        plain = {group: {k: v for k, v in flat.items() if k not in RARELY} for group, flat in alike.items()}
        first = {group: unusual(own, [*plain.values()]) for group, own in plain.items()}
        for group, text in first.items():
            same = [alike[other] for other in alike if first[other] == text]
            told[group] = ", ".join(filter(None, (text, unusual(alike[group], same))))
    return told
