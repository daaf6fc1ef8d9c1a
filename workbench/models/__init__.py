"""The decoder, its hook points, caches and generation, and one file per architecture; torch is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.models.architecture_names_and_colours import ARCHITECTURES, Architecture, architecture

if TYPE_CHECKING:
    from workbench.models.building import build, compose
    from workbench.models.transformer import Transformer

_HOMES = {"build": "building", "compose": "building", "Transformer": "transformer"}
__all__ = ["ARCHITECTURES", "Architecture", "Transformer", "architecture", "build", "compose"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
