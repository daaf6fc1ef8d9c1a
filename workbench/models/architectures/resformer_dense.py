"""Dense ResFormer: each layer's values are a trained sum of its projected values and every earlier layer's values.

V_n = lambda_nn V_n^own + sum over i < n of lambda_ni V_i, for n >= 2.

Source: Zhou et al. (2025), Value Residual Learning, as reported by others; their figure has all weights 1 at the start.
Unconfirmed: whether V_i is the layer's own projection (`dense_source` = raw, the default) or already mixed (`mixed`).
Seam: `weights` of the values; `rows.<layer>` [layer + 1] are the coefficients, own last.
Parameters: L (L + 1) / 2 - 1.
Cache: 2 L T D.
Degenerate case: lambda_source = 0, lambda_own = 1 is the vanilla decoder; with the first source alone it is the learnable form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import choice_option, number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class DenseResFormer(Shortcut):
    """Value residual from every earlier layer."""

    prefix = "resformer_dense"

    def __init__(
        self,
        config: ModelConfig,
        *,
        lambda_source: float = 1.0,
        lambda_own: float = 1.0,
        dense_source: str = "raw",
        decay_lambda: bool = False,
    ) -> None:
        super().__init__(config)
        self.lambda_source = number_option("lambda_source", lambda_source)
        self.lambda_own = number_option("lambda_own", lambda_own)
        self.dense_source = choice_option("dense_source", dense_source, ("raw", "mixed"))
        self.decays = self.decay_lambda = bool(decay_lambda)
        self.reads = "own" if dense_source == "raw" else "effective"
        start = lambda n: torch.tensor([self.lambda_source] * n + [self.lambda_own])  # noqa: E731
        self.rows = nn.ParameterDict({str(n): nn.Parameter(start(n)) for n in range(1, config.n_layers)})

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return tuple(range(layer)) if tensor == "v" else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return self.rows[str(layer)].unbind()

    def coefficients(self) -> dict[str, list[float]]:
        """Return `lambda_<i>`: the weight of layer i's values at each layer, NaN for layers without one."""
        table = {f"lambda_{i}": [math.nan] * self.config.n_layers for i in range(self.config.n_layers)}
        for layer, row in self.rows.items():
            for i, value in enumerate(row.tolist()):
                table[f"lambda_{i}"][int(layer)] = value
        return table
