"""The embedded text: the standard library of one Python, pinned in `data/corpus`, so that losses agree between machines.

`workbench.data.corpus.library` built it; that of the reader's own Python has other documents under each version.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

from workbench.data.corpus import Corpus, library, load, within

SHIPPED = Path(__file__).parents[2] / "data"
"""What the project ships beside its code; see `data/README.md`."""


def embedded(max_bytes: int | None = None) -> Corpus:
    """The pinned corpus or, with `max_bytes`, a sample of it: at most that much text, at most half of it in each domain.

    Where the package was installed without it, the running Python's library, with a warning. Raises `BadData` where it is not
    what its manifest says.
    """
    if not (SHIPPED / "corpus").is_dir():
        warnings.warn("no data/corpus beside this installation: taken is this Python's standard library", stacklevel=2)
        return library() if max_bytes is None else library(max_bytes)
    corpus = _pinned(SHIPPED / "corpus")
    return corpus if max_bytes is None else within(corpus, max_bytes)


@lru_cache(maxsize=1)
def _pinned(folder: Path) -> Corpus:
    return load(folder)
