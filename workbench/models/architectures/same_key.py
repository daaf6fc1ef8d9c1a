"""Same-key averaging: cross-layer attention in which the keys of all layers are replaced by the layer's own keys.

U_n = A_n (V_n^own + w sum over m of V_m^own) / (1 + w M) over the M earlier layers m that `source` names. This equals the
softmax over repeated keys with log w added to the copies' scores. With `all` and w = 1 it averages the values of all layers so far.

Source: Zhou et al. (2024), Value Residual Learning, the approximation of cross-layer attention from which ResFormer comes.
Seam: `weights` of the values.
Parameters: none.
Cache: 2 L T D.
Degenerate case: same_key_weight = 0, or L = 1, is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.architectures.cross_layer import checked_source, earlier
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class SameKey(Shortcut):
    """Fixed mean of own and earlier values."""

    prefix = "same_key"

    def __init__(self, config: ModelConfig, *, source: int | str = "all", same_key_weight: float = 1.0) -> None:
        super().__init__(config)
        self.source = checked_source("source", source, config)
        # log w is added to scores
        self.same_key_weight = number_option("same_key_weight", same_key_weight, minimum=0.0)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return earlier(self.source, layer) if tensor == "v" else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        count = len(earlier(self.source, layer))
        total = 1.0 + self.same_key_weight * count
        return *(self.same_key_weight / total for _ in range(count)), 1.0 / total
