"""ResFormer: every later layer's values are mixed with the first layer's.

V_n = lambda_v1 V_1 + lambda_own V_n^own for layers n >= 2; layer 1 is standard; U_n = A_n V_n.

Source: Zhou, Wu, Jiang, Obeid, Lan (2024), Value Residual Learning, identity form (0.5, 0.5), as in the authors' code.
Seam: values, before the head split and the cache write; V_1 is not detached, so W_1^V hears from every layer.
Parameters: none. Degenerate case: lambda_v1 = 0, lambda_own = 1 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.config import ModelConfig
from workbench.models.shortcut import Projection, Shortcut, Weight


class ResFormer(Shortcut):
    """Fixed-coefficient value residual from the first layer."""

    prefix = "resformer"

    def __init__(self, config: ModelConfig, *, lambda_v1: float = 0.5, lambda_own: float = 0.5) -> None:
        super().__init__(config)
        self.lambda_v1, self.lambda_own = float(lambda_v1), float(lambda_own)

    def sources(self, projection: Projection, layer: int) -> tuple[int, ...]:
        return (0,) if self.mixes(projection, layer) else ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        return projection == "v" and layer > 0

    def weights(self, projection: Projection, layer: int) -> Sequence[Weight]:
        return self.lambda_v1, self.lambda_own
