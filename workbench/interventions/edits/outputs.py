"""`remove` and `head`: what an attention or an MLP adds to the stream is left out, or what some of its heads contribute.

remove:layer=4,part=mlp
head:layer=1,head=0/2,how=mean
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.interventions.edits.base import Edit, Inputs, mean_over_positions, one_of
from workbench.interventions.edits.text import Numbers
from workbench.models.hooked import HookedModel


@dataclass(frozen=True, kw_only=True)
class Remove(Edit):
    """An attention, an MLP or both add nothing to the stream."""

    kind = "remove"
    presets: ClassVar[Mapping[str, str]] = {"part=attention": "remove an attention", "part=mlp": "remove an MLP"}
    part: str = one_of("both", "attention", "mlp")

    def what(self, model: HookedModel) -> str:
        return "attention or MLP output"

    def points(self, model: HookedModel, layer: int) -> list[str]:
        outputs = {"attention": "hook_attn_out", "mlp": "hook_mlp_out"}
        return [f"blocks.{layer}.{hook}" for part, hook in outputs.items() if self.part in (part, "both")]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        return torch.zeros_like(tensor)


@dataclass(frozen=True, kw_only=True)
class Head(Edit):
    """The output of query heads, before W_O, becomes zero or its mean over the positions of the prompt."""

    kind = "head"
    presets: ClassVar[Mapping[str, str]] = {
        "how=mean": "replace a head's output by its mean",
        "": "silence a head (zero)",
    }
    head: Numbers = ()
    how: str = one_of("zero", "mean")

    @property
    def target(self) -> str:
        return "z"

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        return torch.zeros_like(tensor) if self.how == "zero" else mean_over_positions(tensor)
