"""Files that are either whole or absent: written aside, synced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on failure it vanishes.

    Raises `WorkbenchError` naming `path` where the disk refuses (full, quota, read-only).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise WorkbenchError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def digest(*parts: object) -> str:
    """A short content address: the first 16 hex digits of the SHA-256 of the parts."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:16]
