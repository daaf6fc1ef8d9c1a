"""Control: every later layer's own values times a constant, without any path to the first layer.

V_n = value_factor V_n^own for n >= 2. With 0.5 it has ResFormer's own coefficient, and its scale of values, without the first
layer's values: what both share is no effect of the path.

Source: this project, the control of Zhou et al. (2024), Value Residual Learning, whose coefficients (0.5, 0.5) also halve a
layer's own values.
Seam: the values' weights, without sources.
Parameters: none.
Cache: 2 L T D, the scaled values.
Degenerate case: value_factor = 1 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.shortcut import Memory, Projection, Shortcut, Weight, number


class ValuesScaled(Shortcut):
    """Own values times a constant in all layers but the first."""

    prefix = "values_scaled"

    def __init__(self, config: ModelConfig, *, value_factor: float = 0.5) -> None:
        super().__init__(config)
        self.value_factor = number("value_factor", value_factor)

    def mixes(self, projection: Projection, layer: int) -> bool:
        return projection == "v" and layer > 0

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return (self.value_factor,)
