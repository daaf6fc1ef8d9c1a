"""How a code base writes its checkpoints down: one file in `formats/` for each, known by standing there.

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
from workbench.checkpoints.state import Info, State, whole_number


@dataclass(frozen=True, kw_only=True)
class Format:
    """The form of one code base.

    Recognised is a dictionary that has all `keys` and not `without`, or what `beside(container, path)` says of a file by its
    neighbours: its step and settings, None where it is another's. `weights`, `step`, `config` and `code` are the keys of the
    state dict (where it is not among the usual ones), of its step, the model's settings and the training script's text.

    `tensors`: their tensor names in ours, `*` for a layer's number; names of a Llama need no entry. `constants`: tensors that are
    computed from the settings and not read. `rotates_neighbours`: the rotary embedding turns columns 2i and 2i + 1 of a head
    together, not i and i + d_head / 2. `settings`: their settings in `ModelConfig`'s words, beside the usual spellings. `module`:
    the module of another library, in evaluation mode, where that computes what our decoder does not; None where it does not either.
    """

    name: str
    keys: tuple[str, ...] = ()
    without: str = ""
    beside: Callable[[Any, Path], tuple[int | None, Mapping[str, Any] | None] | None] | None = None
    weights: str | None = None
    step: str = ""
    config: str = ""
    code: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    rotates_neighbours: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    module: Callable[[State, Any], Any] | None = None

    def recognise(self, container: Any, path: Path) -> Info | None:
        """The facts of a PyTorch file's contents; None where they are another code base's."""
        if self.beside is not None:
            facts = self.beside(container, path)
            return Info(format=self.name, path=path, step=facts[0], config=facts[1]) if facts else None
        if not (isinstance(container, dict) and set(self.keys) <= container.keys()) or self.without in container:
            return None
        config, code = container.get(self.config), container.get(self.code)
        return Info(
            format=self.name, path=path, step=whole_number(container.get(self.step)),
            config=config if isinstance(config, dict) else None, code=code if isinstance(code, str) else None,
        )  # fmt: skip

    def our_name(self, name: str) -> str:
        """A tensor's name in our words; as it is where the table lacks it."""
        for theirs, ours in self.tensors.items():
            if match := re.fullmatch(re.escape(theirs).replace(r"\*", r"(\d+)"), name):
                return ours.replace("*", "{}").format(*match.groups())
        return name


@cache
def formats() -> dict[str, Format]:
    """Every format by its name, in the order of the files' names; each recognises only its own files."""
    modules = (importlib.import_module(f"{folder.__name__}.{m.name}") for m in pkgutil.iter_modules(folder.__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules}
