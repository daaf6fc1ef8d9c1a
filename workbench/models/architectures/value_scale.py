"""V-scale: each value is shortened depending on its length, short values most.

V_n = v |v|^2 / (|v|^2 + C_{n,g}) for each key-value head g, where v is the layer's own value and C = c d d_head 0.02^2 e^theta_{n,g}.
At the start, with c = `scale_start` = 1, C is the mean squared length of a value under weights of standard deviation 0.02.

Source: arXiv 2603.17771, version 2 (2026): after W_V and before the attention, theta learned from 0. One C per key-value head with
grouped heads is our reading. With value residuals the scaled values are mixed.
Seam: `own_value`; `thetas.<layer>` [kv_head].
Parameters: L G for G key-value heads.
Cache: 2 L T D, the scaled values.
Degenerate case: c = 0, or C -> 0, is the vanilla decoder. With r = |v|^2 the map scales small changes across v by r / (r + C),
and along v by (r^2 + 3 C r) / (r + C)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import number_option
from workbench.models.shortcut import Shortcut

PUBLISHED_STD = 0.02  # of the weights in C
TINY = 1e-12  # smallest squared length, against division by 0


class ValueScale(Shortcut):
    """A learned soft threshold on the length of a head's value."""

    prefix = "value_scale"

    def __init__(self, config: ModelConfig, *, scale_start: float = 1.0) -> None:
        super().__init__(config)
        self.scale_start = number_option("scale_start", scale_start, minimum=0.0)
        self.start = self.scale_start * config.d_model * config.d_head * PUBLISHED_STD**2
        thetas = (torch.zeros(config.n_key_value_heads) for _ in range(config.n_layers))
        self.thetas = nn.ParameterList(map(nn.Parameter, thetas))

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        squared = v.square().sum(-1, keepdim=True)
        threshold = (self.start * self.thetas[layer].exp())[:, None].to(squared.dtype)
        return v * (squared / (squared + threshold).clamp_min(TINY))

    def coefficients(self) -> dict[str, list[float]]:
        return {"value_threshold": [self.start * float(theta.exp().mean()) for theta in self.thetas]}
