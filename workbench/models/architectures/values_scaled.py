"""Control: the own values of every later layer are multiplied by a constant; nothing of the first layer is added.

V_n = value_factor V_n^own for n >= 2. With 0.5 it has ResFormer's own coefficient and its scale of values, but not the first
layer's values. An effect that ResFormer and this control share is not an effect of the path to the first layer.

Source: this project. A control for Zhou et al. (2024), Value Residual Learning, whose coefficients (0.5, 0.5) also halve a
layer's own values.
Seam: `weights` of the values, without sources.
Parameters: none.
Cache: 2 L T D, the scaled values.
Degenerate case: value_factor = 1 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Weight


class ValuesScaled(Shortcut):
    """Own values times a constant in all layers but the first."""

    prefix = "values_scaled"

    def __init__(self, config: ModelConfig, *, value_factor: float = 0.5) -> None:
        super().__init__(config)
        self.value_factor = number_option("value_factor", value_factor)

    def mixes(self, projection: Projection, layer: int) -> bool:
        return projection == "v" and layer > 0

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return (self.value_factor,)
