"""The embedded text: the standard library of one Python, pinned in `data/corpus`, so that losses agree between machines.

`workbench.data.corpus.library` built it; that of the reader's own Python has other documents under each version.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from workbench.data.corpus import Corpus, load, within
from workbench.errors import BadData

SHIPPED = Path(__file__).parents[2] / "data"
"""What the project ships beside its code; see `data/README.md`."""


def embedded(max_bytes: int | None = None) -> Corpus:
    """The pinned corpus or, with `max_bytes`, a sample of it: at most that much text, at most half of it in each domain.

    Raises `BadData` where it is not there, or not what its manifest says.
    """
    corpus = _pinned(SHIPPED / "corpus")
    return corpus if max_bytes is None else within(corpus, max_bytes)


@lru_cache(maxsize=1)
def _pinned(folder: Path) -> Corpus:
    if not folder.is_dir():
        raise BadData(
            f"{folder} is missing: take the whole repository, or name a text (--text; library: is your Python's)"
        )
    return load(folder)
