"""Control: earlier layers' values are added to the attention output at the token's own position, not through the attention pattern.

U_n = A_n V_n^own + identity_scale * mean over m of V_m^own, over the earlier layers m that `identity_source` names.

Source: Zhou et al. (2024), Value Residual Learning, the control that approximates cross-layer attention badly.
Seam: `output`, before W_O. With grouped heads the values are repeated to the query heads.
Parameters: none.
Cache: 2 L T D; the mean needs only the new token's values.
Degenerate case: identity_scale = 0, or L = 1, is the vanilla decoder.
"""

from __future__ import annotations

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.architectures.cross_layer import checked_source, earlier
from workbench.models.options import number_option
from workbench.models.shortcut import Path, Shortcut, Source, Tensors, Weights, mix


class IdentityMap(Shortcut):
    """Mean of earlier values added to the attention output."""

    prefix = "identity_map"

    def __init__(self, config: ModelConfig, *, identity_source: int | str = "all", identity_scale: float = 1.0) -> None:
        super().__init__(config)
        self.identity_source = checked_source("identity_source", identity_source, config)
        self.identity_scale = number_option("identity_scale", identity_scale)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return earlier(self.identity_source, layer) if tensor == "v" else ()

    def constants(self, path: Path, layer: int) -> dict[str, float]:
        return {"earlier": self.identity_scale} if path == "output" and earlier(self.identity_source, layer) else {}

    def output(self, layer: int, z: Tensor, v: Tensor, sources: Tensors, weights: Weights) -> Tensor:
        chosen = earlier(self.identity_source, layer)
        if not chosen:
            return z
        total = sources[chosen[0]]
        for j in chosen[1:]:
            total = total + sources[j]
        if (repeat := z.shape[-2] // total.shape[-2]) > 1:
            total = total.repeat_interleave(repeat, dim=-2)
        return mix([1.0, weights["earlier"] / len(chosen)], [z, total])
