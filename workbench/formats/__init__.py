"""Other people's checkpoints: one short file for each form they come in. Nothing in them is ever run.

tensors, info = workbench.formats.read_state("ckpt.pt")   # for module.load_state_dict(tensors)
workbench.series("out/")                                  # [(500, Path("out/checkpoint-500")), …]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import BadCheckpoint, suggest
from workbench.formats import denseformer, huggingface, lightning, modded_nanogpt, nanochat, nanogpt, plain
from workbench.formats.pickled import unpickle
from workbench.formats.series import series
from workbench.formats.state import Info, State

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "Info", "State", "open_state", "read_state", "series"]

FAMILIES = (nanogpt, modded_nanogpt, lightning, denseformer, nanochat)
"""What recognises a PyTorch file as its own, the most particular first; `plain` takes the rest."""


def open_state(path: str | Path) -> State:
    """Names, shapes and facts of one checkpoint, its weights unread; raises `BadCheckpoint` with the cause."""
    path = Path(path)
    if path.is_dir():
        if not huggingface.is_directory(path):
            huggingface.refuse_shards(path)
            raise BadCheckpoint(f"{path} is no checkpoint: it has no {huggingface.CONFIG} and no weights")
        return huggingface.read(path)
    if not path.exists():
        near = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise BadCheckpoint(f"{path} does not exist; {suggest(path.name, near)}")
    if path.name in (huggingface.WEIGHTS, huggingface.PICKLED) and (path.parent / huggingface.CONFIG).exists():
        return huggingface.read(path.parent)
    if path.suffix == ".safetensors":
        return plain.read_safetensors(path)
    container = unpickle(path)
    found = (family.read(container, path) for family in FAMILIES)
    return next((state for state in found if state is not None), None) or plain.read(container, path)


def read_state(path: str | Path) -> tuple[dict[str, torch.Tensor], Info]:
    """The tensors of anyone's checkpoint, prefixes stripped, and the facts beside them (`Info`).

    For `module.load_state_dict(tensors)` of the module they were trained in. Raises `BadCheckpoint` for missing, damaged
    or unsafe files and for NaN or Inf.
    """
    state = open_state(path)
    state.check()
    return dict(state.read()), state.info
