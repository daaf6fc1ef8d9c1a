"""The files under a URL, through fsspec: listed, fetched and stored one by one, each whole or not at all.

What fails is a `WorkbenchError` in one sentence, whichever library it came from.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import UnknownName, WorkbenchError
from workbench.files import URL, digest
from workbench.places import install

WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf")
"""Backends on which an object that is put appears whole or not at all; elsewhere it is put aside, then renamed."""
SUMS = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "xet_hash", "blob_id", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip
"""What tells that a file has changed, the surest first."""
NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_PARTS = re.compile(r"(?P<scheme>[^:]+):/{1,2}(?P<rest>.*)")


def is_url(path: str | Path) -> bool:
    """Whether a text, or the `Path` that was made of one, is a URL."""
    return URL.match(str(path)) is not None


def address(path: str | Path) -> str:
    """The URL as it was written, without a slash at its end; raises `WorkbenchError` for one of several kinds, `filecache::s3://`."""
    found = _PARTS.fullmatch(str(path))
    if found is None:
        raise WorkbenchError(f"{path}: one kind of storage, without another's cache before it")
    root = "/" if found["scheme"] in ("file", "local") else ""
    return f"{found['scheme']}://{root}{found['rest'].strip('/')}"


@functools.lru_cache(maxsize=64)
def remote(url: str) -> Remote:
    """What is under a URL; raises `WorkbenchError` for a scheme that nothing here speaks."""
    import fsspec

    scheme = url.partition("://")[0]
    if scheme not in fsspec.available_protocols():
        raise UnknownName("kind of storage", scheme, fsspec.available_protocols())
    with saying("open", url, NEEDS.get(scheme, "")):
        files, root = fsspec.core.url_to_fs(url)
    if (loop := getattr(files, "loop", None)) is not None:
        loop.set_exception_handler(_left_behind)
    return Remote(url, files, root, scheme in WHOLE)


def _left_behind(loop: Any, context: Mapping[str, Any]) -> None:
    """Tasks that ended with their connection; the request that began them raises what is said."""
    if context["message"] != "Task exception was never retrieved":
        loop.default_exception_handler(context)


@contextlib.contextmanager
def saying(what: str, where: str, needs: str = "") -> Iterator[None]:
    """One sentence of whatever fails: every backend has errors of its own, and few of them are of one kind."""
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
    """The files under a URL, by their paths from there on."""

    def __init__(self, url: str, files: Any, root: str, whole: bool) -> None:
        self.url, self.system, self.root, self.whole = url, files, root.rstrip("/"), whole

    def __getitem__(self, name: str) -> str:
        return posixpath.join(self.root, name) if name else self.root

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with saying("read", f"{self.url}/{name}"):
            return bool(self.system.isfile(self[name]))

    def listed(self, under: str = "") -> dict[str, str]:
        """Every file and its mark, which changes with its contents; "" for pipes and devices, which are not read.

        Raises `WorkbenchError` where nothing can be listed.
        """
        self.system.invalidate_cache()
        with saying("read", f"{self.url}/{under}".rstrip("/")):
            found: Mapping[str, Any] = self.system.find(self[under], detail=True)
        return {
            name.removeprefix(self.root).lstrip("/"): "" if info.get("type") == "other" else _mark(info)
            for name, info in found.items()
        }

    def fetch(self, wanted: Mapping[str, Path]) -> None:
        """Bring files here, each under its path, whole or not at all."""
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
        """Put a file there, whole or not at all, and return its mark."""
        folder = posixpath.dirname(self[name])
        target = self[name] if self.whole else posixpath.join(folder, f".{uuid.uuid4().hex[:12]}.part")
        with saying("write", f"{self.url}/{name}"):
            if not self.whole:
                self.system.makedirs(folder, exist_ok=True)
            self.system.put_file(str(path), target)
            info = self.system.info(target)
            if info["size"] != path.stat().st_size:
                raise OSError(f"{info['size']} of {path.stat().st_size} bytes arrived")
            if not self.whole:
                self.system.mv(target, self[name])
            return _mark(self.system.info(self[name]))

    def remove(self, name: str) -> None:
        """Remove a file, where it is still there."""
        with saying("remove", f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self[name])


def _mark(info: Mapping[str, Any]) -> str:
    return digest(info.get("size"), next((str(info[key]) for key in SUMS if info.get(key)), ""))
