"""Mirror of a remote folder in the cache, so that all other code reads and writes local files.

folder("s3://bucket/runs")            # the folder of runs
here("s3://bucket/runs/text-s0")      # one run, step or checkpoint
with reading(path) as path: ...       # with its weights, which are not evicted until the end
push(path)                            # upload local changes

Files that changed here and are not uploaded yet are never overwritten or removed. `.remote/` keeps, for each file, the state in which
both sides were equal: its mark at the URL, its size and modification time here. Its file names cannot collide:

    url                 the URL of the mirror
    RUN.json, RUN.lock  the notes of a run, of a file beside the runs, or of the corpora
    leases/             locks of what processes read, see `Lease`
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from workbench.environment import CACHE_GB, mirrors_folder, variable
from workbench.errors import BadCheckpoint, LeftOut, OnlyHere, WorkbenchError, warn_caller
from workbench.file_io import digest, read_json, write_json
from workbench.storage.packed import RUN, origin, unpacked
from workbench.storage.remote import Remote, address, is_url, remote

NOTES, SOURCE, LEASES, CORPORA, STEP = ".remote", "url", "leases", ".corpora", "config.json"
HEAVY = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
LONGEST_NAME, LONGEST_PATH, DEEPEST = 255, 4000, 100  # bytes of a name and a path on common disks; nested folders
LONGEST_UNIT = 200  # bytes of a run's name in the name of its notes
GB = 20.0
FRESH_S = 15.0  # seconds before a path is checked again, or ten times the duration of a check
_fresh: dict[tuple[Path, bool], tuple[float, list[Path]]] = {}
"""When each path must be checked again, and the weights it had."""


def folder(path: str | Path) -> Path:
    """Return the local folder of a folder of runs: the mirror of a URL, or the path itself."""
    if not is_url(path):
        return unpacked(path)
    url = address(path)
    remote(url)  # raises for unknown kinds of storage
    root = root_of(url)
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
        pull(mirror, mirror.name(path), with_heavy=False)
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
            if pull(mirror, mirror.name(path), with_heavy=True):
                trim(path)
            _fresh[path, True] = _fresh_until(begin), weights_under(path)
        used(path)
    return path


def push(path: Path) -> None:
    """Upload local changes under a path of a mirror; does nothing for other paths.

    Readers elsewhere see only complete steps. Raises `OnlyHere` if the upload fails; the next call continues.
    """
    if (mirror := mirror_of(path)) is not None:
        upload(mirror, mirror.name(path))


def forget() -> None:
    """Check all paths again, since other machines have written."""
    _fresh.clear()


def _is_fresh(path: Path, with_weights: bool) -> bool:
    until, weights = _fresh.get((path, with_weights), (0.0, []))
    return until > time.monotonic() and bool(weights or not with_weights) and all(file.is_file() for file in weights)


def _fresh_until(begin: float) -> float:
    """Time at which to repeat a check that began at `begin`."""
    return time.monotonic() + max(FRESH_S, 10 * (time.monotonic() - begin))


@dataclass(frozen=True)
class Mirror:
    """A folder of the cache and the URL that it mirrors."""

    root: Path
    url: str

    @property
    def remote(self) -> Remote:
        """The files at the URL."""
        return remote(self.url)

    def name(self, path: Path) -> str:
        """A path's name on both sides, "" for the whole."""
        name = path.relative_to(self.root).as_posix()
        return "" if name == "." else name

    def state(self, name: str, mark: str | None) -> dict[str, Any]:
        """Return the note of a file in its present state here; empty if it is absent."""
        try:
            stat = (self.root / name).stat()
        except OSError:
            return {}
        return {"mark": mark, "size": stat.st_size, "changed": stat.st_mtime_ns}

    def clean(self, name: str, notes: dict[str, Any]) -> bool:
        """Return whether a file is unchanged here since both sides were equal."""
        return name in notes and notes[name] == self.state(name, notes[name]["mark"])

    @contextlib.contextmanager
    def notes(self, unit: str, patience: float = -1) -> Iterator[dict[str, Any]]:
        """Yield the notes of a run or of the corpora under a lock, and write them at the end, also after errors."""
        place = self.root / NOTES / f"{unit if len(os.fsencode(unit)) <= LONGEST_UNIT else digest(unit)}.json"
        with FileLock(place.with_suffix(".lock"), timeout=patience):
            stored = read_json(place) if place.exists() else {}
            notes = {name: note for name, note in stored.items() if isinstance(note, dict) and "mark" in note}
            before = dict(notes)
            try:
                yield notes
            finally:
                if notes != before:
                    write_json(place, notes)

    def units(self) -> list[str]:
        """The runs that have notes, and the corpora."""
        return sorted(path.stem for path in (self.root / NOTES).glob("*.json"))

    def is_read(self, name: str) -> bool:
        """Return whether a process holds a lease on a file or on a folder above it."""
        for path in (name, *map(str, PurePosixPath(name).parents)):
            try:
                with self.lease("" if path == "." else path).open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                return True
        return False

    def lease(self, name: str) -> Path:
        """Return the lock file of leases on a file or folder of this name."""
        return self.root / NOTES / LEASES / digest(name)


class Lease:
    """A lock on a path of the cache: no process evicts its files while it lives, or until its `with` block ends."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, None
        if (mirror := mirror_of(path)) is not None:
            place = mirror.lease(mirror.name(path))
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("a+b")  # NFS needs both to lock it
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    __del__ = __exit__


def root_of(url: str) -> Path:
    """Return the folder of the cache that mirrors a URL."""
    scheme, _, rest = url.partition("://")
    return mirrors_folder() / f"{scheme}-{PurePosixPath(rest).name[:40]}-{digest(url)}"


def mirrors() -> list[Mirror]:
    """Return all mirrors of the cache."""
    return [_opened(place.parents[1]) for place in sorted(mirrors_folder().glob(f"*/{NOTES}/{SOURCE}"))]


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror that a path of this machine lies in; None for a path outside of the cache."""
    root = mirrors_folder()
    return None if not path.is_relative_to(root) or path == root else _opened(root / path.relative_to(root).parts[0])


def _opened(root: Path) -> Mirror:
    """Return the mirror in a folder of the cache; raises `BadCheckpoint` if its URL is not the one that the folder was made for."""
    place = root / NOTES / SOURCE
    url = str(read_json(place).get("url"))
    if root_of(url) != root:
        cure = f"which is not the URL that {root} was made for; remove that folder"
        raise BadCheckpoint(f"{place} names {url[:200]!r}, {cure}")
    return Mirror(root, url)


def heavy(name: str) -> bool:
    """Return whether a file is fetched only to be read: weights, resume points and corpora."""
    return name.endswith(HEAVY) or name.startswith(f"{CORPORA}/")


def unit_of(name: str) -> str:
    """Return the run of a file, or `.corpora`; its notes are stored under this name."""
    return name.partition("/")[0]


def pull(mirror: Mirror, under: str, with_heavy: bool) -> bool:
    """Fetch new files from the URL, remove files that are gone there, and return whether a file was fetched.

    Files that this disk cannot hold are left out with a warning, and so are unreadable ones outside of a single run.
    """
    there, left_out = usable_files(mirror, mirror.remote.listed(under))
    fetched = False
    for unit in sorted({*map(unit_of, there), *([unit_of(under)] if under else mirror.units())}):
        with mirror.notes(unit) as notes:
            for name in [name for name in notes if _within(name, under) and mirror.clean(name, notes)]:
                if there.get(name) != notes[name]["mark"]:
                    (mirror.root / name).unlink()
                    folder = (mirror.root / name).parent
                    with contextlib.suppress(OSError):  # emptied folders go, since a file may have the name now
                        while folder != mirror.root:
                            folder.rmdir()
                            folder = folder.parent
                    del notes[name]
            new = [
                name for name in there
                if unit_of(name) == unit and (with_heavy or not heavy(name)) and not (mirror.root / name).is_file()
            ]  # fmt: skip
            if new:
                failed = _fetch(mirror, under, new)
                if failed and (under or with_heavy):
                    raise next(iter(failed.values()))
                left_out |= {name: str(error) for name, error in failed.items()}
                notes |= {name: mirror.state(name, there[name]) for name in new if name not in failed}
                fetched |= len(failed) < len(new)
    if left_out:
        reasons = "; ".join(f"{name[:120]!r} ({reason})" for name, reason in list(left_out.items())[:5])
        warn_caller(f"{mirror.url}: {len(left_out)} files are left out: {reasons}", LeftOut)
    return fetched


def usable_files(mirror: Mirror, listed: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the marks of files that this disk can hold, and the reasons why it cannot hold the others, by name."""
    visible = {name: mark for name, mark in listed.items() if _is_synchronised(name)}
    folders = {str(parent) for name in visible for parent in PurePosixPath(name).parents}
    reasons = dict[str, str]()
    for name, mark in visible.items():
        parts = [len(part.encode("utf-8", "surrogatepass")) for part in (str(mirror.root), *name.split("/"))]
        if not mark:
            reasons[name] = "it is no regular file"
        elif name.encode(errors="replace").decode() != name:
            reasons[name] = "its name is no UTF-8"
        elif "\0" in name or PurePosixPath(name).as_posix() != name:
            reasons[name] = "its name is no path of this disk"
        elif max(parts[1:]) > LONGEST_NAME or sum(parts) + len(parts) > LONGEST_PATH or len(parts) > DEEPEST:
            reasons[name] = "its name is too long for this disk"
        elif name in folders:
            reasons[name] = "a folder has the same name"
    return {name: mark for name, mark in visible.items() if name not in reasons}, reasons


def _fetch(mirror: Mirror, under: str, names: list[str]) -> dict[str, WorkbenchError]:
    """Fetch files, and return the errors of failed ones; raises `WorkbenchError` if the URL cannot be listed any more."""
    try:
        mirror.remote.fetch({name: mirror.root / name for name in names})
    except WorkbenchError:
        mirror.remote.listed(under)  # raises if the connection is the reason
    else:
        return {}
    failed = dict[str, WorkbenchError]()
    for name in names:
        try:
            mirror.remote.fetch({name: mirror.root / name})
        except WorkbenchError as error:
            failed[name] = error
    return failed


def upload(mirror: Mirror, under: str) -> None:
    """Upload local changes in an order that never shows incomplete steps; see `push`."""

    def order(name: str) -> tuple[int, str]:
        """Descriptions, contents, files that complete a step or records, resume points."""
        path = PurePosixPath(name)
        if path.name == RUN or ".samples." in path.name or path.name.startswith("tokenizer"):
            return 0, name
        return (3 if "resume" in path.parts else 2 if path.name == STEP or "records" in path.parts else 1), name

    place = mirror.root / under
    files = [place] if place.is_file() else place.rglob("*")
    local = [name for file in files if file.is_file() and _is_synchronised(name := mirror.name(file))]
    with mirror.notes(unit_of(under)) as notes:
        changed = [name for name in local if not mirror.clean(name, notes)]
        written = any(_telemetry(name) for name in changed)
        gone = [n for n in notes if written and _telemetry(n) and _within(n, under) and not (mirror.root / n).exists()]
        try:
            for name in gone:  # parts that a resumed training wrote anew
                mirror.remote.remove(name)
                del notes[name]
            for name in sorted(changed, key=order):
                before = mirror.state(name, None)
                notes[name] = before | {"mark": mirror.remote.store(mirror.root / name, name)}
        except WorkbenchError as error:
            raise OnlyHere(
                f"{error}; everything is complete in {mirror.root / unit_of(under)}, and the same command continues from there"
            ) from error


def _telemetry(name: str) -> bool:
    return "/telemetry/" in name


def _within(name: str, under: str) -> bool:
    return not under or name == under or name.startswith(f"{under}/")


def _is_synchronised(name: str) -> bool:
    """Return whether a file is synchronised: hidden files are not, except corpora."""
    parts = PurePosixPath(name).parts
    return not any(part.startswith(".") for part in (parts[1:] if parts[0] == CORPORA else parts))


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
