"""Files under a URL through fsspec, each fetched and stored completely or not at all; any failure is a `WorkbenchError`."""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, refuse_unknown
from workbench.file_io import URL, digest
from workbench.places import install

WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf")
"""Backends that store objects atomically; elsewhere a file is stored under another name, then renamed."""
SUMS = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "xet_hash", "blob_id", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip
"""Fields of a listing that change with a file, the most reliable first."""
NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_PARTS = re.compile(r"(?P<scheme>[^:]+):/{1,2}(?P<rest>.*)")


def is_url(path: str | Path) -> bool:
    """Return whether a text, or a `Path` made from it, is a URL."""
    return URL.match(str(path)) is not None


def address(path: str | Path) -> str:
    """Return a URL without a trailing slash; raises `WorkbenchError` for chained kinds such as `filecache::s3://`."""
    match = _PARTS.fullmatch(str(path))
    if match is None:
        raise WorkbenchError(f"{path}: one kind of storage, without another's cache before it")
    root = "/" if match["scheme"] in ("file", "local") else ""
    return f"{match['scheme']}://{root}{match['rest'].strip('/')}"


@functools.lru_cache(maxsize=64)
def remote(url: str) -> Remote:
    """Return the files under a URL; raises `WorkbenchError` for an unknown scheme."""
    import fsspec

    scheme = url.partition("://")[0]
    refuse_unknown("kind of storage", scheme, fsspec.available_protocols())
    with saying("open", url, NEEDS.get(scheme, "")):
        files, root = fsspec.core.url_to_fs(url)

    def ignore_ended(loop: Any, context: Mapping[str, Any]) -> None:
        """Ignore tasks that ended with their connection, since their request raises the error."""
        if context["message"] != "Task exception was never retrieved":
            loop.default_exception_handler(context)

    if (loop := getattr(files, "loop", None)) is not None:
        loop.set_exception_handler(ignore_ended)
    return Remote(url, files, root, scheme in WHOLE)


@contextlib.contextmanager
def saying(what: str, where: str, needs: str = "") -> Iterator[None]:
    """Turn any error of a backend into a `WorkbenchError` of one sentence."""
    try:
        yield
    except WorkbenchError:
        raise
    except ImportError as error:
        cure = f"it needs {needs}: {install('remote')}" if needs else str(error)
        raise WorkbenchError(f"cannot {what} {where}: {cure}") from error
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        known: dict[type[Exception], str] = {PermissionError: "no permission", FileNotFoundError: "not there"}
        kind = known.get(type(error), type(error).__name__)
        raise WorkbenchError(f"cannot {what} {where}: {kind}: {text}") from error


class Remote:
    """Files under a URL, named by their paths below it."""

    def __init__(self, url: str, files: Any, root: str, atomic: bool) -> None:
        self.url, self.system, self.root, self.atomic = url, files, root.rstrip("/"), atomic

    def __getitem__(self, name: str) -> str:
        return posixpath.join(self.root, name) if name else self.root

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        with saying("read", f"{self.url}/{name}"):
            return bool(self.system.isfile(self[name]))

    def listed(self, under: str = "") -> dict[str, str]:
        """Return every file and its mark, which changes with its contents and is empty for pipes and devices."""
        self.system.invalidate_cache()
        with saying("read", f"{self.url}/{under}".rstrip("/")):
            files: Mapping[str, Any] = self.system.find(self[under], detail=True)
        return {
            name.removeprefix(self.root).lstrip("/"): "" if info.get("type") == "other" else _mark(info)
            for name, info in files.items()
        }

    def fetch(self, wanted: Mapping[str, Path]) -> None:
        """Fetch files to their paths, each completely or not at all."""
        parts = {name: path.with_name(f".{uuid.uuid4().hex[:12]}.part") for name, path in wanted.items()}
        where = f"{self.url}/{next(iter(wanted))}" if len(wanted) == 1 else self.url
        try:
            with saying("read", where):
                for part in parts.values():
                    part.parent.mkdir(parents=True, exist_ok=True)
                self.system.get([self[name] for name in parts], [str(part) for part in parts.values()])
                for name, part in parts.items():
                    part.replace(wanted[name])
        finally:
            for part in parts.values():
                with contextlib.suppress(OSError):
                    part.rmdir() if part.is_dir() else part.unlink(missing_ok=True)

    def store(self, path: Path, name: str) -> str:
        """Upload a file completely or not at all, and return its mark."""
        folder = posixpath.dirname(self[name])
        target = self[name] if self.atomic else posixpath.join(folder, f".{uuid.uuid4().hex[:12]}.part")
        with saying("write", f"{self.url}/{name}"):
            if not self.atomic:
                self.system.makedirs(folder, exist_ok=True)
            self.system.put_file(str(path), target)
            info = self.system.info(target)
            if info["size"] != path.stat().st_size:
                raise OSError(f"{info['size']} of {path.stat().st_size} bytes arrived")
            if not self.atomic:
                self.system.mv(target, self[name])
            return _mark(self.system.info(self[name]))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with saying("remove", f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self[name])


def _mark(info: Mapping[str, Any]) -> str:
    return digest(info.get("size"), next((str(info[key]) for key in SUMS if info.get(key)), ""))
