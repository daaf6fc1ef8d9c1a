"""Controls: ResFormer's mix on the queries or the keys instead of the values.

Q_n = lambda_q1 Q_1 + lambda_q_own Q_n^own, or K_n = lambda_k1 K_1 + lambda_k_own K_n^own, for layers n >= 2, before the
rotation (which is linear, so the order makes no difference).

Source: Zhou et al. (2024), Value Residual Learning, ablation over residual targets. The paper does not give the coefficients;
the defaults are the value residual's (0.5, 0.5).
Seam: `weights` of the queries or keys.
Parameters: none.
Cache: 2 L T D, with the mixed keys.
Degenerate case: coefficients (0, 1) are the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class _Residual(Shortcut):
    target: ClassVar[Projection]

    def __init__(self, config: ModelConfig, **pair: float) -> None:
        super().__init__(config)
        self.pair = tuple(number_option(name, value) for name, value in pair.items())

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == self.target and layer > 0 else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return self.pair


class QueryResidual(_Residual):
    """Fixed-coefficient query residual from the first layer."""

    prefix, target = "residual_q", "q"

    def __init__(self, config: ModelConfig, *, lambda_q1: float = 0.5, lambda_q_own: float = 0.5) -> None:
        super().__init__(config, lambda_q1=lambda_q1, lambda_q_own=lambda_q_own)
        self.lambda_q1, self.lambda_q_own = self.pair


class KeyResidual(_Residual):
    """Fixed-coefficient key residual from the first layer."""

    prefix, target = "residual_k", "k"

    def __init__(self, config: ModelConfig, *, lambda_k1: float = 0.5, lambda_k_own: float = 0.5) -> None:
        super().__init__(config, lambda_k1=lambda_k1, lambda_k_own=lambda_k_own)
        self.lambda_k1, self.lambda_k_own = self.pair
