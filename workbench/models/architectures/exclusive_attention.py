"""Exclusive self-attention: the head output's component along the token's own value is removed.

z_i = y_i - a (y_i . v_i / |v_i|^2) v_i for each head before W_O. y_i is the head's output and v_i the value that the head attends with
at the same token: mixed or shared if the layer does so, and the key-value head's if heads are grouped. a = 1, or with `gated`
a = tanh(alpha_{n,h}), one number per layer and head. |v_i|^2 is at least 1e-8.

Source: Exclusive Self Attention (2026), arXiv 2603.09078. The gated form is from the modded-nanogpt speed run (2026, pull
request 264), with alpha = 0 at the start.
Seam: `gate`; `alphas.<layer>` [head].
Parameters: none; L H with the gate.
Cache: 2 L T D.
Degenerate case: alpha = 0 is the vanilla decoder. The first position attends only to itself, so a = 1 gives 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Shortcut

LEAST = 1e-8  # of a squared norm


class ExclusiveAttention(Shortcut):
    """Removal of the component of a head output along the token's own value."""

    prefix = "exclusive_attention"

    def __init__(self, config: ModelConfig, *, gated: bool = False) -> None:
        super().__init__(config)
        self.gated = bool(gated)
        alphas = (torch.zeros(config.n_heads) for _ in range(config.n_layers * self.gated))
        self.alphas = nn.ParameterList(map(nn.Parameter, alphas))

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        own = v.repeat_interleave(z.shape[-2] // v.shape[-2], dim=-2)
        along = (z * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True).clamp_min(LEAST)
        if self.gated:
            along = along * self.alphas[layer].tanh()[:, None].to(along.dtype)
        return z - along * own

    def coefficients(self) -> dict[str, list[float]]:
        return {"taken_out": [float(alphas.tanh().mean()) for alphas in self.alphas]} if self.gated else {}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        return [{"gated": bool(shapes)}]
