"""A folder of the cache that stands for one elsewhere, so that everything else reads and writes files of this machine.

folder("s3://bucket/runs")            # the folder of runs
here("s3://bucket/runs/text-s0")      # one run, step or checkpoint
with reading(path) as path: ...       # with its weights, which are fetched only where they are read, and stay meanwhile
push(path)                            # what changed here, up
"""

from __future__ import annotations

import time
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.storage import sync
from workbench.storage.bounds import trim, used, weights_under
from workbench.storage.packed import origin, unpacked
from workbench.storage.remote import address, is_url, remote
from workbench.storage.sync import NOTES, RUN, SOURCE, STEP, Lease, mirror_of

FRESH_S = 15.0  # for which what was looked at is not looked at again, or ten times as long as looking took
_fresh: dict[tuple[Path, bool], tuple[float, list[Path]]] = {}
"""Until when a path counts as looked at, and the weights that were there."""


def folder(path: str | Path) -> Path:
    """The folder on this machine of a folder of runs: the mirror of a URL, any other path as it is."""
    if not is_url(path):
        return unpacked(path)
    url = address(path)
    remote(url)  # refuses what nothing here speaks
    root = sync.root_of(url)
    if not (root / NOTES / SOURCE).exists():
        write_json(root / NOTES / SOURCE, {"url": url})
    return root


def here(url: str) -> Path:
    """Fetch all but the weights of a run, a step, a checkpoint or a folder of runs at a URL, and return its path in the cache.

    Raises `WorkbenchError` for a URL that cannot be read, or where nothing is.
    """
    url = address(url)
    place = _placed(url)
    refresh(place)
    if not (any(child.name != NOTES for child in place.iterdir()) if place.is_dir() else remote(url).listed()):
        raise WorkbenchError(f"{url} does not exist, or nothing is in it")
    return place


def _placed(url: str) -> Path:
    """Where what a URL means lies here: in the mirror of the folder that its run or its checkpoint is in, or in its own."""
    scheme, _, rest = url.partition("://")
    parent, _, name = rest.rpartition("/")
    above, _, run = parent.rpartition("/")
    if not parent:
        return folder(url)
    beside = remote(f"{scheme}://{parent}")
    if above and beside.exists(RUN):
        return folder(f"{scheme}://{above}") / run / name
    if any(beside.exists(f"{name}{end}") for end in (f"/{RUN}", f"/{STEP}", "")):
        return folder(beside.url) / name
    return folder(url)


def address_of(path: Path) -> str:
    """The URL of a path in a mirror, any other path as text."""
    mirror = mirror_of(path)
    return str(origin(path)) if mirror is None else f"{mirror.url}/{mirror.name(path)}".rstrip("/")


def refresh(path: Path) -> None:
    """Bring what is small and new of a run, or of all runs of a mirror; nothing for other paths and what was just looked at."""
    mirror = mirror_of(path)
    if mirror is not None and not any(_is_fresh(place, False) for place in (path, *path.parents)):
        begin = time.monotonic()
        sync.pull(mirror, mirror.name(path), with_heavy=False)
        _note(path, False, begin)


def reading(path: Path) -> Lease:
    """Fetch all files under a path of a mirror, and protect them from eviction until the lease ends; other paths are left as they are."""
    lease = Lease(path)
    fill(path)
    return lease


def fill(path: Path) -> Path:
    """Fetch all files under a path of a mirror, and return it; without a lease, another process may evict them."""
    mirror = mirror_of(path)
    if mirror is not None:
        if not _is_fresh(path, True):
            begin = time.monotonic()
            if sync.pull(mirror, mirror.name(path), with_heavy=True):
                trim(path)
            _note(path, True, begin)
        used(path)
    return path


def push(path: Path) -> None:
    """Put up what changed here under a path of a mirror; nothing for other paths.

    Files come in the order in which others may see them: a step's `config.json`, which makes it one, after its weights. Raises
    `OnlyHere` where that fails; what is here stays, and the next call goes on.
    """
    if (mirror := mirror_of(path)) is not None:
        sync.push(mirror, mirror.name(path))


def forget() -> None:
    """Look again at everything: other machines have written."""
    _fresh.clear()


def _is_fresh(path: Path, whole: bool) -> bool:
    until, weights = _fresh.get((path, whole), (0.0, []))
    return until > time.monotonic() and bool(weights or not whole) and all(file.is_file() for file in weights)


def _note(path: Path, whole: bool, begin: float) -> None:
    now = time.monotonic()
    _fresh[path, whole] = now + max(FRESH_S, 10 * (now - begin)), weights_under(path) if whole else []
