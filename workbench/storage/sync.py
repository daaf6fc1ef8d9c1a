"""A folder of the cache and the one elsewhere that it stands for, made equal file by file.

What changed here and is not up yet is never overwritten or removed. Beside the files, `.remote/` notes of each what it was on both
sides when they were equal: its mark there, its size and time here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from workbench.errors import OnlyHere, WorkbenchError
from workbench.files import read_json, write_json
from workbench.storage.remote import Remote, remote

NOTES, SOURCE, CORPORA = ".remote", "source.json", ".corpora"
RUN, STEP = "run.json", "config.json"
HEAVY = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Mirror:
    """A folder of the cache and the URL it stands for."""

    root: Path
    url: str

    @property
    def remote(self) -> Remote:
        """What is there."""
        return remote(self.url)

    def name(self, path: Path) -> str:
        """A path's name on both sides, "" for the whole."""
        name = path.relative_to(self.root).as_posix()
        return "" if name == "." else name

    def state(self, name: str, mark: str | None) -> dict[str, Any]:
        """What is noted of a file as it is here now."""
        try:
            found = (self.root / name).stat()
        except OSError:
            return {}
        return {"mark": mark, "size": found.st_size, "changed": found.st_mtime_ns}

    def clean(self, name: str, notes: dict[str, Any]) -> bool:
        """Whether a file is here as it was when both sides were equal."""
        return name in notes and notes[name] == self.state(name, notes[name]["mark"])

    @contextlib.contextmanager
    def notes(self, unit: str, patience: float = -1) -> Iterator[dict[str, Any]]:
        """The notes of a run or of the corpora, kept at the end whatever happened; one process at a time."""
        place = self.root / NOTES / f"{unit}.json"
        with FileLock(place.with_suffix(".lock"), timeout=patience):
            notes: dict[str, Any] = read_json(place) if place.exists() else {}
            before = dict(notes)
            try:
                yield notes
            finally:
                if notes != before:
                    write_json(place, notes)

    def units(self) -> list[str]:
        """The runs that have notes, and the corpora."""
        return sorted(path.stem for path in (self.root / NOTES).glob("*.json") if path.name != SOURCE)


def cache() -> Path:
    """Where mirrors lie: `$WORKBENCH_CACHE`, else `workbench` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return _cache(os.environ.get("WORKBENCH_CACHE"), os.environ.get("XDG_CACHE_HOME"))


@functools.lru_cache(maxsize=8)
def _cache(ours: str | None, everybodys: str | None) -> Path:
    return Path(ours or Path(everybodys or Path.home() / ".cache") / "workbench").resolve() / "mirrors"


def mirrors() -> list[Mirror]:
    """All that are there."""
    return [Mirror(p.parents[1], str(read_json(p)["url"])) for p in sorted(cache().glob(f"*/{NOTES}/{SOURCE}"))]


def mirror_of(path: Path) -> Mirror | None:
    """The mirror that a path of this machine lies in."""
    root = cache()
    if not path.is_relative_to(root) or path == root:
        return None
    own = root / path.relative_to(root).parts[0]
    return Mirror(own, str(read_json(own / NOTES / SOURCE)["url"]))


def heavy(name: str) -> bool:
    """Whether a file is fetched only when it is read: weights, what a training resumes from, corpora."""
    return name.endswith(HEAVY) or name.startswith(f"{CORPORA}/")


def unit_of(name: str) -> str:
    """What a file's notes are with: its run, or the corpora."""
    return name.partition("/")[0]


def pull(mirror: Mirror, under: str, with_heavy: bool) -> bool:
    """Bring what is new there, small files or all, and let go of what is there no more; whether something came."""
    there = {name: mark for name, mark in mirror.remote.listed(under).items() if _kept(name)}
    brought = False
    for unit in sorted({*map(unit_of, there), *([unit_of(under)] if under else mirror.units())}):
        with mirror.notes(unit) as notes:
            for name in [name for name in notes if _within(name, under) and mirror.clean(name, notes)]:
                if there.get(name) != notes[name]["mark"]:
                    (mirror.root / name).unlink()
                    del notes[name]
            new = [
                name for name in there
                if unit_of(name) == unit and (with_heavy or not heavy(name)) and not (mirror.root / name).exists()
            ]  # fmt: skip
            if new:
                mirror.remote.fetch({name: mirror.root / name for name in new})
                notes |= {name: mirror.state(name, there[name]) for name in new}
                brought = True
    return brought


def push(mirror: Mirror, under: str) -> None:
    """Put up what changed here, in the order in which others may see it; see `mirror.push`."""
    with mirror.notes(unit_of(under)) as notes:
        changed = [name for name in _local(mirror, under) if not mirror.clean(name, notes)]
        written = any(_telemetry(name) for name in changed)
        gone = [n for n in notes if written and _telemetry(n) and _within(n, under) and not (mirror.root / n).exists()]
        try:
            for name in gone:  # parts that a resumed training wrote anew
                mirror.remote.remove(name)
                del notes[name]
            for name in sorted(changed, key=_order):
                before = mirror.state(name, None)
                notes[name] = before | {"mark": mirror.remote.store(mirror.root / name, name)}
        except WorkbenchError as error:
            raise OnlyHere(
                f"{error}; all of it is whole in {mirror.root / unit_of(under)}, and the same command goes on from there"
            ) from error


def _telemetry(name: str) -> bool:
    return "/telemetry/" in name


def _order(name: str) -> tuple[int, str]:
    """What describes a run first, then what it holds, then what makes a step or records of that, and what it resumes from."""
    path = PurePosixPath(name)
    if path.name == RUN or ".samples." in path.name or path.name.startswith("tokenizer"):
        return 0, name
    return (3 if "resume" in path.parts else 2 if path.name == STEP or "records" in path.parts else 1), name


def _local(mirror: Mirror, under: str) -> list[str]:
    place = mirror.root / under
    files = [place] if place.is_file() else place.rglob("*")
    return [name for file in files if file.is_file() and _kept(name := mirror.name(file))]


def _within(name: str, under: str) -> bool:
    return not under or name == under or name.startswith(f"{under}/")


def _kept(name: str) -> bool:
    """Whether a file is one for both sides: none that is hidden, but corpora."""
    parts = PurePosixPath(name).parts
    return not any(part.startswith(".") for part in (parts[1:] if parts[0] == CORPORA else parts))
