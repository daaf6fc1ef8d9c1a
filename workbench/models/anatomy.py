"""How a model's stream and logits are made of parts: what `decompose` asks of a model, and the run that it is told of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models.hooked import HookedModel, cut
from workbench.names import position_axis

By = Literal["layer", "head", "value_path"]
BIAS = "bias"
"""Label of what no part of the stream brings: what the final norm and the head add by themselves."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of the sum for the coarsest type on the way, in units of the largest sum of the parts' magnitudes."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What follows the last stream in one run: logits = W_U (gain * (x - mean x) / divisor + shift) + bias."""

    centred: bool
    """Whether the norm takes the mean over d_model away."""
    divisor: Tensor
    """Frozen, [batch, pos, 1]."""
    gain: Tensor
    """[d_model]."""
    head: Tensor
    """W_U, [d_vocab, d_model]."""
    shift: Tensor | None = None
    """[d_model]; None where the norm adds nothing."""
    bias: Tensor | None = None
    """[d_vocab]; None where the head adds nothing."""

    def normed(self, x: Tensor) -> Tensor:
        """The norm of x [..., batch, pos, d_model] before its gain, linear in x."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.divisor

    @property
    def constant(self) -> Tensor | None:
        """What norm and head add to the logits whatever they read, [d_vocab]; None where that is nothing."""
        if self.shift is None:
            return self.bias
        return self.head @ self.shift if self.bias is None else self.head @ self.shift + self.bias


class Anatomy(ABC):
    """The parts of a model's stream, and what its end makes of them."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    @property
    def inner_dtypes(self) -> tuple[torch.dtype, ...]:
        """Types that tensors are rounded to between hook points, where these are coarser than the activations'."""
        return ()

    @abstractmethod
    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Hook points that a decomposition of stream `layer`, or of what follows the last one (`frozen`), reads."""

    @abstractmethod
    def parts(self, read: Reader, by: str, layer: int) -> list[tuple[str, Tensor]]:
        """(label, [batch, pos, d_model]) of all that sums to a stream."""

    @abstractmethod
    def ending(self, read: Reader) -> Ending:
        """What follows the last stream."""

    @abstractmethod
    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Logits of every position (None of a model without a head) and the named activations of a run on tokens or text."""


@dataclass
class Reader:
    """Activations of one run as they are needed: with a batch, float32 or better."""

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
        """[batch, ...] of every position."""
        tensor = self.tensors[name].to(self.wide)
        return tensor if self.batched or position_axis(name) is None else tensor[None]

    def cut(self, name: str) -> Tensor:
        """[batch, pos, ...] of the positions to keep."""
        return self.kept(self(name))

    def kept(self, tensor: Tensor) -> Tensor:
        """[batch, pos, ...] cut to them."""
        return tensor if self.pos is None else cut(tensor, self.pos, axis=1)
