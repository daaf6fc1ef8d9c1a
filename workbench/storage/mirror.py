"""Mirror of a remote folder in the cache, so that all other code reads and writes local files.

folder("s3://bucket/runs")            # the folder of runs
here("s3://bucket/runs/text-s0")      # one run, step or checkpoint
with reading(path) as path: ...       # with its weights, which are not evicted until the end
push(path)                            # upload local changes
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

FRESH_S = 15.0  # seconds before a path is checked again, or ten times the duration of a check
_fresh: dict[tuple[Path, bool], tuple[float, list[Path]]] = {}
"""When each path must be checked again, and the weights it had."""


def folder(path: str | Path) -> Path:
    """Return the local folder of a folder of runs: the mirror of a URL, or the path itself."""
    if not is_url(path):
        return unpacked(path)
    url = address(path)
    remote(url)  # raises for unknown kinds of storage
    root = sync.root_of(url)
    if not (root / NOTES / SOURCE).exists():
        write_json(root / NOTES / SOURCE, {"url": url})
    return root


def here(url: str) -> Path:
    """Fetch everything but the weights of a run, step, checkpoint or folder at a URL, and return its path in the cache.

    Raises `WorkbenchError` for a URL that cannot be read or is empty.
    """
    url = address(url)
    scheme, _, rest = url.partition("://")
    parent, _, name = rest.rpartition("/")
    above, _, run = parent.rpartition("/")
    beside = remote(f"{scheme}://{parent}") if parent else None
    if beside and above and beside.exists(RUN):  # in the mirror of the folder of its run
        place = folder(f"{scheme}://{above}") / run / name
    elif beside and any(beside.exists(f"{name}{end}") for end in (f"/{RUN}", f"/{STEP}", "")):  # ... or of a checkpoint
        place = folder(beside.url) / name
    else:
        place = folder(url)
    refresh(place)
    if not (any(child.name != NOTES for child in place.iterdir()) if place.is_dir() else remote(url).listed()):
        raise WorkbenchError(f"{url} does not exist, or nothing is in it")
    return place


def address_of(path: Path) -> str:
    """Return the URL of a path in a mirror, and any other path as text."""
    mirror = mirror_of(path)
    return str(origin(path)) if mirror is None else f"{mirror.url}/{mirror.name(path)}".rstrip("/")


def refresh(path: Path) -> None:
    """Fetch new small files of a run or mirror; does nothing for other paths and paths that were just checked."""
    mirror = mirror_of(path)
    if mirror is not None and not any(_is_fresh(place, False) for place in (path, *path.parents)):
        begin = time.monotonic()
        sync.pull(mirror, mirror.name(path), with_heavy=False)
        _fresh[path, False] = _fresh_until(begin), []


def reading(path: Path) -> Lease:
    """Fetch all files under a path of a mirror, and protect them from eviction until the lease ends."""
    lease = Lease(path)
    fetch_all(path)
    return lease


def fetch_all(path: Path) -> Path:
    """Fetch all files under a path of a mirror, and return it; without a lease, another process may evict them."""
    mirror = mirror_of(path)
    if mirror is not None:
        if not _is_fresh(path, True):
            begin = time.monotonic()
            if sync.pull(mirror, mirror.name(path), with_heavy=True):
                trim(path)
            _fresh[path, True] = _fresh_until(begin), weights_under(path)
        used(path)
    return path


def push(path: Path) -> None:
    """Upload local changes under a path of a mirror; does nothing for other paths.

    Readers elsewhere see only complete steps. Raises `OnlyHere` if the upload fails; the next call continues.
    """
    if (mirror := mirror_of(path)) is not None:
        sync.upload(mirror, mirror.name(path))


def forget() -> None:
    """Check all paths again, since other machines have written."""
    _fresh.clear()


def _is_fresh(path: Path, with_weights: bool) -> bool:
    until, weights = _fresh.get((path, with_weights), (0.0, []))
    return until > time.monotonic() and bool(weights or not with_weights) and all(file.is_file() for file in weights)


def _fresh_until(begin: float) -> float:
    """Time at which to repeat a check that began at `begin`."""
    return time.monotonic() + max(FRESH_S, 10 * (time.monotonic() - begin))
