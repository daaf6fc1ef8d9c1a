"""The interface through which `decompose` splits a model's stream and logits into parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models.hooked import HookedModel, slice_positions
from workbench.names import position_axis

By = Literal["layer", "head", "value_path"]
BIAS = "bias"
"""Label of the constant that the final norm and the head add to the logits."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error of the sum by the coarsest type of the run, relative to the largest sum of the parts' magnitudes."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The final norm and the head in one run: logits = W_U (gain * (x - mean x) / divisor + shift) + bias."""

    centred: bool
    """Whether the norm subtracts the mean over d_model."""
    divisor: Tensor
    """Frozen, [batch, pos, 1]."""
    gain: Tensor
    """[d_model]."""
    head: Tensor
    """W_U, [d_vocab, d_model]."""
    shift: Tensor | None = None
    """[d_model]; None for a norm without a shift."""
    bias: Tensor | None = None
    """[d_vocab]; None for a head without a bias."""

    def normed(self, x: Tensor) -> Tensor:
        """Return x [..., batch, pos, d_model] normed but before the gain; linear in x."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.divisor

    @property
    def constant(self) -> Tensor | None:
        """The constant part of the logits [d_vocab], None without one."""
        if self.shift is None:
            return self.bias
        return self.head @ self.shift if self.bias is None else self.head @ self.shift + self.bias


class Anatomy(ABC):
    """The parts of a model's stream and its final norm and head."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    @property
    def inner_dtypes(self) -> tuple[torch.dtype, ...]:
        """Types coarser than the activations' to which tensors are rounded between hook points."""
        return ()

    @abstractmethod
    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Return the hook points for a decomposition of stream `layer`; with `frozen` also those of the final norm."""

    @abstractmethod
    def parts(self, read: Reader, by: str, layer: int) -> list[tuple[str, Tensor]]:
        """Return (label, [batch, pos, d_model]) of all parts of a stream."""

    @abstractmethod
    def ending(self, read: Reader) -> Ending:
        """Return the final norm and the head."""

    @abstractmethod
    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Run tokens or text; return the logits of every position (None without a head) and the named activations."""


@dataclass
class Reader:
    """Reads activations of one run with a batch axis, in float32 or better."""

    anatomy: Anatomy
    given: Any
    by: str
    layer: int
    frozen: bool
    pos: Any
    batched: bool = True
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None  # of every position, where the run was made here
    coarsest: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        model, names = self.anatomy.model, self.anatomy.needed(self.by, self.layer, self.frozen)
        if hasattr(self.given, "cache_dict"):  # an ActivationCache
            if self.given.model is not None and self.given.model is not model:
                raise BadData("this cache belongs to another model")
            self.tensors, self.batched = self.given.cache_dict, self.given.has_batch_dim
        else:
            with torch.no_grad():
                self.logits, self.tensors = self.anatomy.run(self.given, names)
        if missing := [n for n in names if n not in self.tensors]:
            raise BadData(f"the cache lacks {', '.join(missing[:4])}: give the tokens, or a cache of the whole run")
        dtypes = [self.tensors[n].dtype for n in names] + [model.embed.weight.dtype]
        self.coarsest = max(dtypes, key=lambda dtype: TOLERANCE[dtype])
        self.wide = torch.float64 if self.coarsest == torch.float64 else torch.float32
        self.coarsest = max((self.coarsest, *self.anatomy.inner_dtypes), key=lambda dtype: TOLERANCE[dtype])

    def __call__(self, name: str) -> Tensor:
        """Return an activation [batch, ...] at every position."""
        tensor = self.tensors[name].to(self.wide)
        return tensor if self.batched or position_axis(name) is None else tensor[None]

    def cut(self, name: str) -> Tensor:
        """Return an activation [batch, pos, ...] at the selected positions."""
        return self.at_positions(self(name))

    def at_positions(self, tensor: Tensor) -> Tensor:
        """Return [batch, pos, ...] at the selected positions."""
        return tensor if self.pos is None else slice_positions(tensor, self.pos, axis=1)
