"""Checkpoint formats of other code bases: one file in `formats/` for each; a file in that folder is registered.

FORMAT = Format(
    name="mine", keys=("weights", "iteration"), weights="weights", step="iteration", config="shape",
    tensors={"token_table": "embed.weight", "layer.*.mix.query": "blocks.*.attn.q_proj.weight", ...},
    settings={"width": "d_model", ...},
)
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from workbench.checkpoints import formats as folder
from workbench.checkpoints.checkpoint_facts import Info, State, whole_number
from workbench.checkpoints.stored_tensors import Stored


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one code base writes its checkpoints."""

    name: str
    keys: tuple[str, ...] = ()  # a file with all these keys and not `without` is of this format
    without: str = ""
    beside: Callable[[Any, Path], tuple[int | None, Mapping[str, Any] | None] | None] | None = None
    """Instead of keys: step and settings from a file's contents and its neighbours, None for files of other formats."""
    weights: str | None = None  # key of the state dict, if it is not one of the usual keys
    step: str = ""  # key of the step
    config: str = ""  # key of the model's settings
    code: str = ""  # key of the training script's text
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Their tensor names -> ours, with `*` for a layer's number; Llama's names need no entry."""
    constants: tuple[str, ...] = ()  # tensors that are computed from the settings
    rotates_neighbours: bool = False  # rotary embedding of columns 2i and 2i + 1 of a head, not of i and i + d_head / 2
    settings: Mapping[str, str] = field(default_factory=dict)  # their settings -> ours, beside the usual spellings
    module: Callable[[State, Any], Any] | None = None
    """The module of another library that computes what our decoder does not, in evaluation mode; None if there is none."""
    read: Callable[[Path], tuple[dict[str, Stored], Mapping[str, Any]] | None] | None = None
    """For files that PyTorch did not write: tensors and settings, None for files of other formats."""
    tokenizer: Callable[[Path, int], Any] | None = None
    """The tokenizer in a file of the code base's own beside the weights, given the vocabulary's size; None without one."""

    def recognise(self, container: Any, path: Path) -> Info | None:
        """Return the facts of a PyTorch file's contents; None if another code base wrote it."""
        if self.beside is not None:
            facts = self.beside(container, path)
            return Info(format=self.name, path=path, step=facts[0], config=facts[1]) if facts else None
        is_ours = bool(self.keys) and isinstance(container, dict) and set(self.keys) <= container.keys()
        if not is_ours or self.without in container:
            return None
        config, code = container.get(self.config), container.get(self.code)
        return Info(
            format=self.name, path=path, step=whole_number(container.get(self.step)),
            config=config if isinstance(config, dict) else None, code=code if isinstance(code, str) else None,
        )  # fmt: skip

    def our_name(self, name: str) -> str:
        """Return our name of a tensor, or its own name if the table lacks it."""
        for theirs, ours in self.tensors.items():
            if match := re.fullmatch(re.escape(theirs).replace(r"\*", r"(\d+)"), name):
                return ours.replace("*", "{}").format(*match.groups())
        return name


@cache
def formats() -> dict[str, Format]:
    """Return every format by its name, in the order of the file names."""
    modules = (importlib.import_module(f"{folder.__name__}.{m.name}") for m in pkgutil.iter_modules(folder.__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules}
