"""Control: the residual of ResFormer on the keys instead of the values.

K_n = lambda_k1 K_1 + lambda_k_own K_n^own for layers n >= 2, before the head split and the rotation.

Source: Zhou et al. (2024), Value Residual Learning, ablation over residual targets; the published weights are not
stated, the defaults are those of the value residual (0.5, 0.5).
Seam: keys. Parameters: none. Degenerate case: lambda_k1 = 0, lambda_k_own = 1 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.config import ModelConfig
from workbench.models.shortcut import Projection, Shortcut, Weight


class KeyResidual(Shortcut):
    """Fixed-coefficient key residual from the first layer."""

    prefix = "residual_k"

    def __init__(self, config: ModelConfig, *, lambda_k1: float = 0.5, lambda_k_own: float = 0.5) -> None:
        super().__init__(config)
        self.lambda_k1, self.lambda_k_own = float(lambda_k1), float(lambda_k_own)

    def sources(self, projection: Projection, layer: int) -> tuple[int, ...]:
        return (0,) if self.mixes(projection, layer) else ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        return projection == "k" and layer > 0

    def weights(self, projection: Projection, layer: int) -> Sequence[Weight]:
        return self.lambda_k1, self.lambda_k_own
