"""The cache's bounded size: what was used longest ago goes first, and nothing that is not up."""

from __future__ import annotations

import os
import time
from pathlib import Path

from filelock import Timeout

from workbench.errors import WorkbenchError
from workbench.storage.sync import Mirror, heavy, mirrors

SETTING, GB = "WORKBENCH_CACHE_GB", 20.0


def limit() -> float:
    """Bytes of weights and corpora that all mirrors may hold: `$WORKBENCH_CACHE_GB`, 20 unless set."""
    given = os.environ.get(SETTING) or GB
    try:
        return 1e9 * float(given)
    except ValueError:
        raise WorkbenchError(f"{SETTING}={given!r} is no number of gigabytes") from None


def used(path: Path) -> None:
    """Note that these files are used now; when they were written stays as it is."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if heavy(file.name) and file.is_file():
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def trim(keep: Path) -> None:
    """Let go of weights and corpora, those used longest ago first, until the rest fits; of what is under `keep`, nothing."""
    held = list[tuple[int, int, Mirror, str, str]]()
    for mirror in mirrors():
        for unit in mirror.units():
            with mirror.notes(unit) as notes:
                clean = [name for name in notes if heavy(name) and mirror.clean(name, notes)]
            stats = ((name, (mirror.root / name).stat()) for name in clean)
            held += [(found.st_atime_ns, found.st_size, mirror, unit, name) for name, found in stats]
    over = sum(size for _, size, *_ in held) - limit()
    for _, size, mirror, unit, name in sorted(held, key=lambda one: one[0]):
        path = mirror.root / name
        if over <= 0:
            return
        if not path.is_relative_to(keep) and _let_go(mirror, unit, name):
            over -= size


def _let_go(mirror: Mirror, unit: str, name: str) -> bool:
    """Whether a file could go: not one that changed meanwhile, and none of a run that another process is fetching."""
    try:
        with mirror.notes(unit, patience=0) as notes:
            if mirror.clean(name, notes):
                (mirror.root / name).unlink()
                del notes[name]
                return True
    except Timeout:
        pass
    return False
