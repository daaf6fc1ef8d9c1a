"""What a checkpoint of anyone's comes to: named tensors, and the facts beside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import BadCheckpoint, suggest
from workbench.formats.pickled import check_sums
from workbench.formats.stored import CHUNK, Stored

if TYPE_CHECKING:
    import torch

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # name parts a wrapper puts anywhere
LEADING = ("module", "model")  # name parts that count as a prefix where every tensor has them
EMBEDDINGS = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Info:
    """Facts of a checkpoint: `format`, `step` and `config` where it says them, prefixes `stripped` from tensor names.

    `code` is a training script's text, for reading only. `beside`: what else the file holds.
    """

    format: str
    path: Path
    step: int | None = None
    stripped: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    code: str | None = None
    beside: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @cached_property
    def sha256(self) -> dict[str, str]:
        """SHA-256 of each file that weights were read from, by file name."""
        return {path.name: _sha256(path) for path in self.files}

    @property
    def provenance(self) -> dict[str, Any]:
        """What a model keeps of where it came from, as JSON values."""
        return {
            "path": str(self.path), "format": self.format, "step": self.step, "stripped": list(self.stripped),
            "sha256": self.sha256,
        }  # fmt: skip

    def told(self) -> str:
        """The facts in a sentence."""
        step = "" if self.step is None else f" of step {self.step}"
        config = f"; its configuration: {dict(self.config)}" if self.config else ""
        beside = f"; beside the weights: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.path} is a {self.format} checkpoint{step}{config}{beside}"


@dataclass(frozen=True)
class State:
    """Tensors by name, unread, and the facts beside them."""

    tensors: dict[str, Stored]
    info: Info

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each tensor."""
        return {name: list(stored.shape) for name, stored in self.tensors.items()}

    def read(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), one after the other; names that share a tensor in the file share it here."""
        seen: dict[Any, torch.Tensor] = {}
        for name, stored in self.tensors.items():
            place = stored.place
            if place not in seen:
                seen[place] = stored.read(name, dtype)
            yield name, seen[place]

    def check(self) -> None:
        """Hold checksums, where the format has them, against the bytes of the tensors."""
        for path in self.info.files:
            mine = [t for t in self.tensors.values() if t.path == path and t.held is None]
            if mine and path.suffix != ".safetensors":
                check_sums(path, mine)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        sha = hashlib.sha256()
        while block := file.read(CHUNK):
            sha.update(block)
    return sha.hexdigest()


# ---- from a container to a state -------------------------------------------------------------------------------------


def state_of(found: Any, info: Info) -> State:
    """The state of a dictionary of tensors: wrappers' prefixes stripped, anything that is no tensor refused by name."""
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{info.path} holds no state dict but {_told(found)}")
    odd = {k: v for k, v in found.items() if not (isinstance(k, str) and isinstance(v, Stored))}
    odd = {k: v for k, v in odd.items() if not str(k).endswith("_extra_state")}
    if odd:
        key, value = next(iter(odd.items()))
        raise BadCheckpoint(f"{info.path}: {key!r} among the weights is no tensor but {_told(value)}")
    tensors, stripped = strip({k: v for k, v in found.items() if isinstance(v, Stored)}, info.path)
    files = tuple(sorted({t.path for t in tensors.values()}))
    return State(tensors, replace(info, stripped=stripped, files=files))


def strip(tensors: Mapping[str, Stored], path: Path) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Names without what DDP, FSDP, torch.compile and Lightning put before them, and what was taken, in order."""
    names, taken = {name: name for name in tensors}, []
    for part in WRAPPERS:
        if any(part in name.split(".") for name in names.values()):
            names = {k: ".".join(p for p in name.split(".") if p != part) for k, name in names.items()}
            taken.append(f"{part}.")
    while (shared := _shared(list(names.values()))) is not None:
        names = {k: name.removeprefix(f"{shared}.") for k, name in names.items()}
        taken.append(f"{shared}.")
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        both = [k for k, name in names.items() if name == twice]
        raise BadCheckpoint(f"{path} holds {twice} more than once: as {' and '.join(both)}; save one of them")
    return {names[k]: tensor for k, tensor in tensors.items()}, tuple(taken)


def _shared(names: list[str]) -> str | None:
    """A prefix that all names have and that is a wrapper's, not the model's own `model.`."""
    for part in LEADING if names else ():
        if all(name.startswith(f"{part}.") for name in names) and EMBEDDINGS not in names:
            return part
    return None


def weights_in(container: Any, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The state dict inside nested containers, and the other keys met on the way; raises `BadCheckpoint` for none."""
    beside: list[str] = []
    here = container
    for _ in range(4):
        if not isinstance(here, dict):
            break
        if {"state", "param_groups"} <= here.keys():
            raise BadCheckpoint(f"{path} is an optimizer's state; open the file of the weights beside it")
        if here and sum(isinstance(v, Stored) for v in here.values()) > len(here) / 2:
            return here, tuple(beside)
        key = next((k for k in CONTAINERS if isinstance(here.get(k), dict)), None)
        if key is None:
            break
        beside += [str(k) for k in here if k != key]
        here = here[key]
    if not isinstance(here, dict):
        raise BadCheckpoint(f"{path} holds no state dict but {_told(here)}")
    keys = [str(k) for k in here]
    raise BadCheckpoint(
        f"{path} holds no state dict under {', '.join(CONTAINERS)}; it has {', '.join(keys[:12]) or 'nothing'}: "
        f"{suggest('model', keys)}"
    )


CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "weights")


def number(value: Any) -> int | None:
    """A whole number of steps, None for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if whole else None


STEP = re.compile(r"(?:step|iter|itr|checkpoint|ckpt|model|epoch=\d+-step)[-_=]?(\d+)(?!.*\d)", re.I)


def step_in_name(path: Path) -> int | None:
    """The step a file or folder names itself by (`step_000500`, `checkpoint-500`, `ckpt_500.pt`), None where it does not."""
    name = path.name if path.is_dir() else path.stem
    match = STEP.search(name)
    return int(match[1]) if match else None


def _told(value: Any) -> str:
    if isinstance(value, Stored):
        return f"one tensor {list(value.shape)}"
    return f"an empty {type(value).__name__}" if value in ({}, [], "") else f"a {type(value).__name__}"
