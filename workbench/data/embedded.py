"""The embedded text: the standard library of one Python, pinned in `data/corpus`, so that losses agree between machines.

`workbench.data.corpus.library` built it; that of the reader's own Python has other documents under each version.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from workbench.data.corpus import Corpus, load, within
from workbench.places import SHIPPED


def embedded(max_bytes: int | None = None) -> Corpus:
    """The pinned corpus or, with `max_bytes`, a sample of it: at most that much text, at most half of it in each domain.

    Raises `BadData` where it is not what its manifest says.
    """
    corpus = _pinned(SHIPPED / "corpus")
    return corpus if max_bytes is None else within(corpus, max_bytes)


@lru_cache(maxsize=1)
def _pinned(folder: Path) -> Corpus:
    return load(folder)
