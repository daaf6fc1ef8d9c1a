"""Data for training and measuring: text as documents and tokens, synthetic tasks, tokenizers and data sources."""

from __future__ import annotations

from typing import Any

__all__ = ["BackcopyData", "Data", "RepeatedData", "Sample", "TextData", "open_data", "prepare"]


def __getattr__(name: str) -> Any:  # the sources need torch, the corpus and the tasks do not
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from workbench.data import data_sources

    return getattr(data_sources, name)
