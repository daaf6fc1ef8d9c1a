"""SVFormer: all layers share the first layer's values, which halves the key-value cache.

U_n = A_n V_1 for layers n >= 2; those layers have no value projection.

Source: Zhou et al. (2024), Value Residual Learning, as in the authors' code (one anchor, the first layer).
Seam: which projections a layer owns, and values. Parameters: -(L - k) d D for k anchors.
Option `anchors`: layers (from 0) with values of their own; each later layer reads the latest anchor's.
Degenerate case: anchors = all layers is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Projection, Shortcut, Weight


class SVFormer(Shortcut):
    """Values projected at the anchors only."""

    prefix = "svformer"

    def __init__(self, config: ModelConfig, *, anchors: Sequence[int] = (0,)) -> None:
        super().__init__(config)
        self.anchors = tuple(anchors)
        if self.anchors[:1] != (0,) or list(self.anchors) != sorted(set(self.anchors) & set(range(config.n_layers))):
            layers = f"the layers 0..{config.n_layers - 1}"
            raise WorkbenchError(f"anchors={self.anchors}: must rise from 0 within {layers}, as (0,) or (0, 2)")

    def owns(self, projection: Projection, layer: int) -> bool:
        return projection != "v" or layer in self.anchors

    def sources(self, projection: Projection, layer: int) -> tuple[int, ...]:
        return (max(a for a in self.anchors if a <= layer),) if self.mixes(projection, layer) else ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        return not self.owns(projection, layer)

    def weights(self, projection: Projection, layer: int) -> Sequence[Weight]:
        return 1.0, 0.0
