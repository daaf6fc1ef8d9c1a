"""DenseFormer: each block reads a learned weighted average of all earlier block outputs.

Y_i = sum over j <= i of alpha_ij X_j, X_0 the embedding, X_i = Block_i(Y_{i-1}); the final norm reads Y_L.

Source: Pagliardini, Mohtashami, Fleuret, Jaggi (NeurIPS 2024), DenseFormer. As in their package: after block i (from 0)
an average stands where (i + 1) mod period = 0, over the outputs whose index has the residue (i + 1) mod dilation,
the block's own weight last; elsewhere the output passes unchanged but is kept. The weights are unconstrained.
Seam: stream; `dwa.alphas.<block>.weight` [1, sources] start with own weight 1 and the others 0. Weight decay on them:
`decay_alpha` (off; in the published experiments they decay).
Parameters: the sum of floor((i + 1) / dilation) + 1 over the blocks i with (i + 1) mod period = 0; 1x1: L (L + 3) / 2.
Cache: 2 L T D; the averages need the new token's outputs only.
Degenerate case: the start is the vanilla decoder exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Memory, Shortcut, Weight


class DenseFormer(Shortcut):
    """Depth-weighted averages after the blocks."""

    prefix = "dwa"

    def __init__(self, config: ModelConfig, *, dilation: int = 1, period: int = 1, decay_alpha: bool = False) -> None:
        super().__init__(config)
        blocks = config.n_layers  # from a dilation of blocks + 1 on, each block would average itself alone
        if not 1 <= dilation <= blocks + 1 or not 1 <= period <= blocks:
            raise WorkbenchError(
                f"dilation={dilation}, period={period}: dilation from 1 to {blocks + 1}, period from 1 to n_layers={blocks};"
                f" nearest dilation={min(max(dilation, 1), blocks + 1)}, period={min(max(period, 1), blocks)}"
            )
        self.dilation, self.period = dilation, period
        self.decays = self.decay_alpha = bool(decay_alpha)
        self.alphas: Any = nn.ModuleDict()
        for layer in range(period - 1, config.n_layers, period):
            alpha = nn.Linear(len(self.averaged(layer)), 1, bias=False)
            with torch.no_grad():
                alpha.weight.zero_()[0, -1] = 1.0
            self.alphas[str(layer)] = alpha

    def averaged(self, layer: int) -> range:
        """Indices into the history (0 = embedding) that the average after `layer` reads."""
        return range((layer + 1) % self.dilation, layer + 2, self.dilation)

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        layer, inside = divmod(sublayer - 2, 2)
        return tuple(2 * j for j in self.averaged(layer)) if not inside and str(layer) in self.alphas else ()

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        return self.alphas[str(sublayer // 2 - 1)].weight[0]

    def coefficients(self) -> dict[str, list[float]]:
        """`alpha_<j>`: weight of history entry j after each block, NaN where it is not averaged."""
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
