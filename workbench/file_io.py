"""Atomic writing of files (to a temporary file, then renamed), and reading of regular files up to a size limit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from workbench.errors import BadCheckpoint, WorkbenchError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_TEXT = 1 << 27  # bytes of a file of settings; the largest tokenizers take a fourth of it
MAX_TABLE = 1 << 31  # bytes of a table of records
MARK, SUM = b"\0workbench sum\0", 16  # marks a file's checksum; bytes of the checksum
MAX_CORPUS = 64_000_000  # bytes of all files of a user's text, which are held in memory
URL = re.compile(r"[A-Za-z][\w+.-]+(::\w+)*:/")  # a `Path` makes one slash of two; a drive is one letter


def local(path: str | Path) -> Path:
    """Return a path of this machine; raises `WorkbenchError` for a URL, which `Path` would turn into a folder `s3:`."""
    if URL.match(str(path)):
        cure = "a path of this machine is needed, a folder of that name by its full path"
        raise WorkbenchError(f"{path} is a URL; here {cure}")
    return Path(path)


def writable(path: Path) -> Path:
    """Return a path that may be written; raises `WorkbenchError` for URLs, devices, pipes and sockets."""
    try:
        if local(path).exists() and not (path.is_file() or path.is_dir()):
            raise WorkbenchError(f"cannot write {path}: it is there already and neither file nor folder")
    except OSError as error:
        raise WorkbenchError(f"cannot write {path}: {error.strerror or error}") from error
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` on success; raises `WorkbenchError` if the disk refuses."""
    part = writable(path).with_name(f".{uuid.uuid4().hex[:12]}.part")
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


@contextlib.contextmanager
def open_regular(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file to read; raises `OSError` for pipes and devices, and for files above `limit` bytes."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"its {status.st_size} bytes are more than {limit}", str(path))
        yield file


def read_bytes(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes; raises `OSError` as `open_regular` does."""
    with open_regular(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # room is made for as many as are asked for


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file; raises `OSError` and `UnicodeDecodeError`."""
    return read_bytes(path).decode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises `BadCheckpoint` if it is missing or damaged."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, endless numbers, endless nesting
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def digest(*parts: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of the parts."""
    return digest_of(parts)


def digest_of(parts: Iterable[object]) -> str:
    """Return the same for an iterator of parts; bytes may be memory views."""
    sha = hashlib.sha256()
    for part in parts:
        data = part
        if not isinstance(data, bytes | memoryview):
            data = json.dumps(data, sort_keys=True, default=str).encode()
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)  # apart: weights are large, and a concatenation would copy them
    return sha.hexdigest()[:16]


def write_table(table: pa.Table, path: Path, **how: Any) -> None:
    """Write an Arrow table atomically; `how` goes to pyarrow's `write_table`.

    Parquet has checksums of pages, but not of headers and the footer, and Arrow ends the process on some damaged footers. A
    checksum of all other bytes is inserted before the footer, where other readers skip it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = pa.BufferOutputStream()
    pq.write_table(table, written, write_page_checksum=True, **how)
    data = written.getvalue().to_pybytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    with replacing(path) as part:
        part.write_bytes(data[:footer] + MARK + table_sum(data) + data[footer:])


def table_sum(data: bytes) -> bytes:
    """Return the checksum of a file's bytes, `SUM` bytes long."""
    return hashlib.blake2b(data, digest_size=SUM).digest()


def table_bytes(path: Path) -> bytes:
    """Read a table's file; raises `OSError` if it is too large or its checksum fails.

    A file without a checksum is accepted: other programs and old versions write none.
    """
    data = read_bytes(path, MAX_TABLE)
    if (at := data.rfind(MARK)) >= 0:
        rest = at + len(MARK) + SUM
        if table_sum(data[:at] + data[rest:]) != data[at + len(MARK) : rest]:
            raise OSError("its bytes are not those that were written; copy it again")
    return data
