"""Training corpora, stored in the folder of runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from workbench.files import digest, read_json, write_json
from workbench.runs.run import CORPORA
from workbench.storage.mirror import push, reading


@functools.lru_cache(maxsize=2)
def shared_text(runs: Path, name: str = "", **settings: Any) -> Any:
    """Return a corpus and its tokenizer, built once per folder of runs; `settings` go to `prepare`, `name` names its file."""
    from filelock import FileLock

    from workbench.data.sources import open_data, prepare

    root = runs / CORPORA
    root.mkdir(parents=True, exist_ok=True)
    pointer = root / f"{name or digest('text', settings)}.json"
    with reading(root):
        with FileLock(root / ".lock"):
            if not pointer.exists():
                write_json(pointer, prepare(root=root, **settings).describe())
                push(root)
        return open_data(read_json(pointer), root)
