"""Paths, shipped names and URLs as files of this machine: a public function resolves its argument once, into a `Location`."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import BadCheckpoint
from workbench.places import SHIPPED
from workbench.storage import mirror
from workbench.storage.mirror import Mirror, mirror_of
from workbench.storage.packed import RUN, unpacked
from workbench.storage.remote import is_url


@dataclass(frozen=True)
class Location:
    """A path of this machine. `mirror` is the copy of a URL's folder that the path lies in, None for all other paths."""

    given: str
    path: Path
    mirror: Mirror | None = None

    @property
    def is_run(self) -> bool:
        """True for a run folder."""
        return (self.path / RUN).exists()

    def with_weights(self) -> Location:
        """Fetch the weights below a URL, except the weights of a run, which are fetched step by step."""
        if is_url(self.given) and not self.is_run and not (self.path.parent / RUN).exists():
            mirror.fetch_all(self.path)
        return self


def locate(given: str | Path | Location) -> Location:
    """Resolve a path, the name of something that ships, or a URL, of which all but the weights is fetched."""
    if isinstance(given, Location):
        return given
    if is_url(given):
        path = mirror.here(str(given))
        return Location(str(given), path, mirror_of(path))
    try:
        path = Path(shipped(given))
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            count = len(str(given))
            raise BadCheckpoint(f"{str(given)[:60]}... has {count} characters, too many for a path") from error
        path = Path(given)
    except ValueError as error:
        raise BadCheckpoint(f"{str(given)[:60]!r} is no path: {error}") from error
    path = unpacked(path)
    copy = mirror_of(path)
    if copy is not None:
        mirror.refresh(path)
    return Location(str(given), path, copy)


def shipped(name: str | Path) -> str | Path:
    """Return the folder that ships under a name (`models-resformer-s0`, `sinks`, `evidence`); other paths unchanged."""
    text = str(name)
    if text in ("", ".", "..") or Path(text).name != text or os.path.lexists(text):
        return name
    folders = (SHIPPED, SHIPPED / "models", SHIPPED / "evidence", *(SHIPPED / "evidence").glob("*/"))
    return next((folder / text for folder in folders if (folder / text).is_dir()), name)
