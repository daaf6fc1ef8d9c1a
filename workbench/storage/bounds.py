"""Keep the cache below its size limit: evict least recently used weights, never files that are being read or not uploaded."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from filelock import Timeout

from workbench.environment import CACHE_GB, variable
from workbench.errors import WorkbenchError
from workbench.storage.sync import Mirror, heavy, mirror_of, mirrors

GB = 20.0


def limit() -> float:
    """Bytes of weights and corpora that all mirrors may hold: `$WORKBENCH_CACHE_GB`, 20 unless set."""
    given = variable(CACHE_GB, str(GB))
    try:
        return 1e9 * float(given)
    except ValueError:
        raise WorkbenchError(f"{CACHE_GB}={given!r} is no number of gigabytes") from None


def weights_under(path: Path) -> list[Path]:
    """Return the weights and corpora under a path that are present."""
    mirror, files = mirror_of(path), [path] if path.is_file() else path.rglob("*")
    return [file for file in files if mirror and heavy(mirror.name(file)) and file.is_file()]


def used(path: Path) -> None:
    """Set the access time of files to now, and leave their modification time."""
    for file in weights_under(path):
        with contextlib.suppress(FileNotFoundError):  # without a lease another process may evict it
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def trim(keep: Path) -> None:
    """Evict weights and corpora, least recently used first, until the rest fits; never those under `keep`, changed or being read."""
    held = list[tuple[int, int, Mirror, str, str]]()
    for mirror in mirrors():
        for unit in mirror.units():
            with mirror.notes(unit) as notes:
                clean = [name for name in notes if heavy(name) and mirror.clean(name, notes)]
                stats = [(name, (mirror.root / name).stat()) for name in clean]
            held += [(stat.st_atime_ns, stat.st_size, mirror, unit, name) for name, stat in stats]
    over = sum(size for _, size, *_ in held) - limit()
    for _, size, mirror, unit, name in sorted(held, key=lambda one: one[0]):
        path = mirror.root / name
        if over <= 0:
            return
        if path.is_relative_to(keep):
            continue
        with contextlib.suppress(Timeout), mirror.notes(unit, patience=0) as notes:  # unless its run is being fetched
            if mirror.clean(name, notes) and not mirror.is_read(name):
                path.unlink()
                del notes[name]
                over -= size
