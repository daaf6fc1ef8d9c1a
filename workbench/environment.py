"""Environment variables that the workbench reads."""

from __future__ import annotations

import functools
import os
from pathlib import Path

RUNS = "WORKBENCH_RUNS"  # folder of runs, or its URL; ./runs unless set
CACHE = "WORKBENCH_CACHE"  # folder of the cache; `workbench` in `$XDG_CACHE_HOME` or `~/.cache` unless set
CACHE_GB = "WORKBENCH_CACHE_GB"  # gigabytes of weights and corpora in the cache
BUILDERS = "WORKBENCH_BUILDERS"  # builders (`package.module:function`) that may run, joined by commas
FOLDER = "WORKBENCH_FOLDER"  # folder that builders are imported from; the current one unless set
BROWSER = "WORKBENCH_BROWSER"  # path of the browser that draws pages
XDG_CACHE = "XDG_CACHE_HOME"
PLAYWRIGHT = "PLAYWRIGHT_BROWSERS_PATH"
WANDB_MODE, WANDB_PROJECT = "WANDB_MODE", "WANDB_PROJECT"
WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"  # set by `accelerate launch` and `torchrun`


def variable(name: str, default: str = "") -> str:
    """Return the value of an environment variable, or `default` if it is unset or empty."""
    return os.environ.get(name) or default


@functools.lru_cache(maxsize=8)
def cache_folder(cache: str | None = None, user_cache: str | None = None) -> Path:
    """Return the folder of the cache: `$WORKBENCH_CACHE`, else `workbench` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(cache or Path(user_cache or Path.home() / ".cache") / "workbench").resolve()


def mirrors_folder() -> Path:
    """Return the folder of the cache with the mirrors of URLs."""
    return cache_folder(os.environ.get(CACHE), os.environ.get(XDG_CACHE)) / "mirrors"
