"""Files that are either whole or absent: written aside, synced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import BadCheckpoint, WorkbenchError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on failure it vanishes.

    Raises `WorkbenchError` naming `path` where the disk refuses (full, quota, read-only).
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise WorkbenchError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a read-only folder has no such file
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `BadCheckpoint` naming it where it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, endless numbers, endless nesting
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def digest(*parts: object) -> str:
    """A short content address: the first 16 hex digits of the SHA-256 of the parts."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode()
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)  # apart: weights are large, and a concatenation would copy them
    return sha.hexdigest()[:16]
