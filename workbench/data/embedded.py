"""The embedded text: the standard library of Python 3.11.7, in `data/corpus`, so that losses agree between machines."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from workbench.data.corpus import Corpus, load_corpus, within
from workbench.places import SHIPPED


def embedded(max_bytes: int | None = None) -> Corpus:
    """Return the embedded corpus, or a sample of at most `max_bytes`; raises `BadData` if it does not match its manifest."""
    corpus = _pinned(SHIPPED / "corpus")
    return corpus if max_bytes is None else within(corpus, max_bytes)


@lru_cache(maxsize=1)
def _pinned(folder: Path) -> Corpus:
    return load_corpus(folder)
