"""Contents of a checkpoint: tensors by name, unread, and facts such as format, step and settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoints.safe_unpickling import check_sums
from workbench.checkpoints.stored_tensors import Stored

Device = str | torch.device | None
Dtype = torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class Info:
    """Facts of a checkpoint, such as the prefixes `stripped` from tensor names and the other keys of the file, `beside`."""

    format: str
    path: Path
    step: int | None = None
    stripped: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    code: str | None = None
    beside: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    base: Path | None = None

    @cached_property
    def sha256(self) -> dict[str, str]:
        """SHA-256 of the files of weights, by file name."""
        sums = {}
        for path in self.files:
            with path.open("rb", buffering=0) as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return sums

    @property
    def provenance(self) -> dict[str, Any]:
        """Origin of the model, as JSON values for `model.source`."""
        return {
            "path": str(self.path), "format": self.format, "step": self.step, "stripped": list(self.stripped),
            "sha256": self.sha256,
        }  # fmt: skip

    def sentence(self) -> str:
        """Return the facts in a sentence."""
        step = "" if self.step is None else f" of step {self.step}"
        config = f"; its configuration: {dict(self.config)}" if self.config else ""
        beside = f"; beside the weights: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.path} is a {self.format} checkpoint{step}{config}{beside}"


@dataclass(frozen=True)
class State:
    """Tensors of a checkpoint by name, unread, and its facts."""

    tensors: dict[str, Stored]
    info: Info
    lease: object = None  # protects the files in the cache from eviction while the state lives

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the tensors by name."""
        return {name: list(stored.shape) for name, stored in self.tensors.items()}

    def read(self, dtype: Dtype = None, device: Device = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor); names that share a tensor in the file share it here."""
        seen: dict[Any, torch.Tensor] = {}
        for name, stored in self.tensors.items():
            place = stored.place
            if place not in seen:
                seen[place] = stored.read(name, dtype).to(device)
            yield name, seen[place]

    def check(self) -> None:
        """Compare checksums, if the format has them, with the bytes of the tensors."""
        for path in self.info.files:
            inside = [t for t in self.tensors.values() if t.path == path and t.held is None]
            if inside and path.suffix != ".safetensors":
                check_sums(path, inside)


def whole_number(value: Any) -> int | None:
    """Return a number of steps, None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
