"""DenseFormer: each block reads a learned weighted average of all earlier block outputs.

Y_i = sum over j <= i of alpha_ij X_j, with X_0 the embedding and X_i = Block_i(Y_{i-1}); the final norm reads Y_L.

Options: block i (counted from 0) is followed by an average if (i + 1) mod `period` = 0. It averages the outputs whose index has the
residue (i + 1) mod `dilation`, the block's own output last. Other outputs pass unchanged and stay available to later averages.
`decay_alpha` applies weight decay to the weights (off here; on in the published experiments).

Source: Pagliardini, Mohtashami, Fleuret, Jaggi (NeurIPS 2024), DenseFormer, and their package. The weights are unconstrained.
Seam: stream; `dwa.alphas.<block>.weight` [1, sources] start with own weight 1 and the others 0.
Parameters: the sum of floor((i + 1) / dilation) + 1 over the blocks i with (i + 1) mod period = 0; 1x1: L (L + 3) / 2.
Cache: 2 L T D; the averages need only the new token's outputs.
Degenerate case: the start is the vanilla decoder exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import integer_option
from workbench.models.shortcut import Memory, Shortcut, Weight


class DenseFormer(Shortcut):
    """Depth-weighted averages after the blocks."""

    prefix = "dwa"

    def __init__(self, config: ModelConfig, *, dilation: int = 1, period: int = 1, decay_alpha: bool = False) -> None:
        super().__init__(config)
        # with a larger dilation each block would average itself alone
        self.dilation = integer_option("dilation", dilation, range(1, config.n_layers + 2), "n_layers + 1")
        self.period = integer_option("period", period, range(1, config.n_layers + 1), "n_layers")
        self.decays = self.decay_alpha = bool(decay_alpha)
        self.alphas: Any = nn.ModuleDict()
        for layer in range(period - 1, config.n_layers, period):
            alpha = nn.Linear(len(self.averaged(layer)), 1, bias=False)
            with torch.no_grad():
                alpha.weight.zero_()[0, -1] = 1.0
            self.alphas[str(layer)] = alpha

    def averaged(self, layer: int) -> range:
        """Return the indices of the outputs (0 = embedding) that the average after `layer` reads."""
        return range((layer + 1) % self.dilation, layer + 2, self.dilation)

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        layer, inside = divmod(sublayer - 2, 2)
        return tuple(2 * j for j in self.averaged(layer)) if not inside and str(layer) in self.alphas else ()

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        return self.alphas[str(sublayer // 2 - 1)].weight[0]

    def coefficients(self) -> dict[str, list[float]]:
        """Return `alpha_<j>`: the weight of output j after each block, NaN for blocks that do not average it."""
        rows = {f"alpha_{j}": [float("nan")] * self.config.n_layers for j in range(self.config.n_layers + 1)}
        for name, alpha in self.alphas.items():
            for index, value in zip(self.averaged(int(name)), alpha.weight[0].tolist(), strict=True):
                rows[f"alpha_{index}"][int(name)] = value
        return rows

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        layers = [int(m[1]) for name in shapes if (m := re.fullmatch(r"alphas\.(\d+)\.weight", name))]
        period = min(layers, default=config.n_layers) + 1
        if period > config.n_layers:
            return []
        fits = []
        for dilation in range(1, config.n_layers + 2):
            tensors = cls(config, dilation=dilation, period=period).named_parameters()
            if {name: list(t.shape) for name, t in tensors} == {name: list(s) for name, s in shapes.items()}:
                fits.append({"dilation": dilation, "period": period})
        return fits
