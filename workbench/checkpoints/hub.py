"""Models of the Hub in this machine's cache, by name, as `EleutherAI/pythia-70m@step1000`; only `download` uses the network.

The Hub's client is imported where it is used: most commands open local files, and it loads slowly.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from workbench.environment import RUNS, variable
from workbench.errors import BadCheckpoint, suggest
from workbench.places import SHIPPED

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

BESIDE = ("*.json", "*.model", "*.txt")  # a model's configuration and its tokenizer
NAME = re.compile(r"(?P<repo>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w.*?/-]+))?")
MAIN = "main"
_switch, _offline = threading.Lock(), list[dict[str, bool]]()
"""Settings of the libraries before each open `offline`, in order."""


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Refuse requests to the Hub while other libraries read local files, which may name files to fetch."""
    with _switch:
        _offline.append({name: module.HF_HUB_OFFLINE for name, module in _settings().items()})
        for module in _settings().values():
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _switch:
            before = _offline[0]
            _offline.pop()
            for name, module in _settings().items() if not _offline else ():
                module.HF_HUB_OFFLINE = before.get(name, before[constants.__name__])


def _settings() -> dict[str, Any]:
    """Return the modules with the offline setting; `datasets` copies it at import."""
    return {name: sys.modules[name] for name in (constants.__name__, "datasets.config") if name in sys.modules}


def split(name: str) -> tuple[str, str] | None:
    """Return repository and revision (`main` unless given) of a Hub name; None for other text."""
    found = NAME.fullmatch(name)
    return (found["repo"], found["revision"] or MAIN) if found and ".." not in name else None


def snapshot(name: str) -> Path | None:
    """Return the folder of a name in the cache; None if it is absent or no such name."""
    named = split(name)
    if named is None or any(sign in named[1] for sign in "*?"):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named[0], revision=named[1], local_files_only=True))
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)  # files that no model needs were left out when it was fetched
        return Path(partial) if partial else None
    except HFValidationError:
        return None


def folder_of(name: str) -> Path:
    """Return the folder of a name in the cache; raises `BadCheckpoint` with the nearest paths and names if it is not there."""
    if (folder := snapshot(name)) is not None:
        return folder
    place = Path(name)
    reason = f"{place} does not exist"
    if place.parent != Path() and place.parent.is_dir():
        near = sorted(p.name for p in place.parent.iterdir())
        reason += f"; {suggest(place.name, near)}" if near else f", and {place.parent} is empty"
    elif split(name) is not None:
        folders = (SHIPPED / "models", Path(variable(RUNS, "runs")))
        known = [p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_dir()]
        near_names = suggest(name, known + names()).rstrip("?")
        reason += f" and is not in this machine's Hub cache; {near_names}? `--download` fetches a name of the Hub"
    raise BadCheckpoint(reason)


def short_name(name: str) -> str | None:
    """Return the last part of a name, without its revision; None if the text is no such name, or a path that exists."""
    named = None if os.path.lexists(name) else split(name)
    return named[0].rpartition("/")[2] if named else None


def revisions(name: str) -> dict[str, Path]:
    """Return the folders of revisions that match `NAME@PATTERN` in the cache, by revision."""
    named = split(name)
    if named is None:
        return {}
    return {
        ref: Path(revision.snapshot_path)
        for repo in _cached() if repo.repo_id == named[0] and repo.repo_type == "model"
        for revision in repo.revisions for ref in revision.refs if fnmatch.fnmatchcase(ref, named[1])
    }  # fmt: skip


def download(name: str) -> list[Path]:
    """Download `NAME`, `NAME@REVISION` or the revisions of `NAME@PATTERN` into the cache; raises `BadCheckpoint` if it fails."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if (named := split(name)) is None:
        raise BadCheckpoint(f"{name} is no name of the Hub, as gpt2 or EleutherAI/pythia-70m@step1000")
    repo, revision, api = *named, HfApi()
    try:
        wanted = [revision]
        if any(sign in revision for sign in "*?"):
            refs = api.list_repo_refs(repo)
            there = [ref.name for ref in (*refs.branches, *refs.tags)]
            if not (wanted := fnmatch.filter(there, revision)):
                raise BadCheckpoint(f"{repo} has no revision {revision}; {suggest(revision, there)}")
        folders = []
        for ref in wanted:
            files = api.list_repo_files(repo, revision=ref)
            weights = next((end for end in ("*.safetensors", "*.bin") if fnmatch.filter(files, end)), "*.safetensors")
            folders.append(Path(snapshot_download(repo, revision=ref, allow_patterns=[*BESIDE, weights])))
        return folders
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise BadCheckpoint(f"{name} cannot be fetched: {type(error).__name__}: {first}") from error


def names() -> list[str]:
    """Return the models in the cache, as `NAME` or `NAME@REVISION`."""
    refs = {
        (repo.repo_id, ref) for repo in _cached() if repo.repo_type == "model" for r in repo.revisions for ref in r.refs
    }
    return sorted(repo if ref == MAIN else f"{repo}@{ref}" for repo, ref in refs)


def _cached() -> Iterable[CachedRepoInfo]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return frozenset()
