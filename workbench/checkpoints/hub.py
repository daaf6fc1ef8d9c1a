"""Names of the Hugging Face Hub, as far as this machine's cache holds them: `gpt2`, `EleutherAI/pythia-70m@step1000`.

Nothing is downloaded here; `hf download NAME --revision REVISION` fills the cache.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import CachedRepoInfo, CacheNotFound, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

NAME = re.compile(r"(?P<repo>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w.*?/-]+))?")
MAIN = "main"


def split(name: str) -> tuple[str, str] | None:
    """Repository and revision (`main` unless given) of what can be a name of the Hub; None for what cannot."""
    found = NAME.fullmatch(name)
    return (found["repo"], found["revision"] or MAIN) if found else None


def snapshot(name: str) -> Path | None:
    """The folder of a name in the cache; None where it is no name, or not there."""
    named = split(name)
    if named is None or any(sign in named[1] for sign in "*?"):
        return None
    try:
        return Path(snapshot_download(named[0], revision=named[1], local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def revisions(name: str) -> dict[str, Path]:
    """Revisions of `NAME@PATTERN` in the cache, by name; empty where there are none."""
    named = split(name)
    if named is None:
        return {}
    return {
        ref: Path(revision.snapshot_path)
        for repo in _cached() if repo.repo_id == named[0] and repo.repo_type == "model"
        for revision in repo.revisions for ref in revision.refs if fnmatch.fnmatchcase(ref, named[1])
    }  # fmt: skip


def names() -> list[str]:
    """Models of the cache, each revision but `main` by name."""
    refs = {
        (repo.repo_id, ref) for repo in _cached() if repo.repo_type == "model" for r in repo.revisions for ref in r.refs
    }
    return sorted(repo if ref == MAIN else f"{repo}@{ref}" for repo, ref in refs)


def _cached() -> Iterable[CachedRepoInfo]:
    try:
        return scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return frozenset()
