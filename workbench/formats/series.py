"""A series of checkpoints of one training: a folder, a glob, or a pattern with a `step` group.

series("out/")                                       # checkpoint-500/, step_000500/, ckpt_500.pt, …
series("out/model_*.pt")
series(r"out/run(?P<step>[0-9]+)k/weights\\.pt")      # a regular expression over the paths from its first plain folder on
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import BadCheckpoint
from workbench.formats.huggingface import is_directory
from workbench.formats.state import step_in_name

ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
OTHERS = re.compile(r"optim|optimizer|scheduler|rng_state|scaler|training_args", re.I)
SPECIAL = re.compile(r"[()\[\]{}^$+*?|\\]")


def is_pattern(text: str) -> bool:
    """Whether a text means several paths: a glob, or a regular expression with a `step` group."""
    return "(?P<step>" in text or (glob.has_magic(text) and not os.path.lexists(text))


def series(where: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of each checkpoint, by step; raises `BadCheckpoint` for none, for one without a step, and for two of one step."""
    text = str(where)
    if "(?P<step>" in text:
        found = _matching(text)
    elif is_pattern(text):
        found = _named(Path(name) for name in glob.glob(text))  # noqa: PTH207 - absolute patterns too
    elif (folder := Path(where)).is_dir():
        found = [(s, p) for p in folder.iterdir() if (s := step_in_name(p)) is not None and is_checkpoint(p)]
    else:
        raise BadCheckpoint(f"{where} is no folder, no glob and no pattern with a (?P<step>...) group")
    if not found:
        raise BadCheckpoint(f"{where}: no checkpoint there names its step; {_instead(Path(where))}")
    found.sort()
    for (a, first), (b, second) in itertools.pairwise(found):
        if a == b:
            raise BadCheckpoint(
                f"{where}: {first} and {second} are both step {a}; give a pattern that finds one of them"
            )
    return found


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like weights by its name: a Hugging Face directory, or a file of a known ending."""
    if path.is_dir():
        return is_directory(path)
    return path.suffix in ENDINGS and not OTHERS.search(path.name)


def _instead(folder: Path) -> str:
    """What to give instead of a folder that is no series."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if runs := [p.name for p in inside if (p / "run.json").is_file()]:
        return f"it holds runs: give one of them, as {folder / runs[0]}"
    if files := [p.name for p in inside if is_checkpoint(p)]:
        return f"give one of them, as {folder / files[0]}, or a pattern with a (?P<step>...) group"
    return "give a glob, or a pattern with a (?P<step>...) group"


def _named(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    found = []
    for path in (p for p in paths if is_checkpoint(p)):
        step = step_in_name(path)
        step = step_in_name(path.parent) if step is None else step  # step_500/model.pt
        if step is None:
            raise BadCheckpoint(f"{path} does not name its step; give a pattern with a (?P<step>...) group")
        found.append((step, path))
    return found


def _matching(text: str) -> list[tuple[int, Path]]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadCheckpoint(f"{text!r} is no regular expression: {error}") from error
    plain = text[: SPECIAL.search(text).start()].rpartition("/")[0]  # type: ignore[union-attr]  # the group is special
    root = Path(plain or ("/" if text.startswith("/") else "."))
    found = []
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if match := pattern.fullmatch(path.as_posix()):
                if not (match["step"] or "").isdecimal():
                    raise BadCheckpoint(f"{path}: the step {match['step']!r} is no whole number")
                found.append((int(match["step"]), path))
    return found
