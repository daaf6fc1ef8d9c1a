"""Gated attention: the attention output is multiplied elementwise by a sigmoid gate of the layer's input.

U_n = (A_n V_n) * sigmoid(X_n W_n^G) before W_O, for each head and element. X_n is the normalised input of the attention.

Source: Qiu et al. (2025), arXiv 2505.06708, the elementwise, head-specific form.
Seam: `gate`; `gates.<layer>` [d_model, d_model].
Parameters: L d^2.
Cache: 2 L T D.
Degenerate case: W^G = 0 halves every output: the vanilla decoder with W_O halved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Shortcut


class GatedAttention(Shortcut):
    """A sigmoid gate on each element of the attention output."""

    prefix = "gated_attention"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        shape = config.d_model, config.d_model
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(config.n_layers))

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return z * F.linear(x, self.gates[layer]).sigmoid().view_as(z)
