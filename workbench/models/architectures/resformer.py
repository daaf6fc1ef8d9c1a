"""ResFormer: every later layer's values are mixed with the first layer's, with fixed coefficients.

V_n = lambda_v1 V_1 + lambda_own V_n^own for the layers n after the source; the others are standard; U_n = A_n V_n.

Source: Zhou, Wu, Jiang, Obeid, Lan (2024), Value Residual Learning: identity form (0.5, 0.5), as in the authors' code;
constant form (2, 1), the best of their sweep; sparse form, lambda 5 on the last three layers of eight (Zhou et al. 2025,
as reported by others; the own coefficient of these layers, 1, is our reading).
Seam: values, before the head split and the cache write; V_1 is not detached, so every layer trains W_1^V.
Options: `layers` that mix (a list, all, late, last_third), `source_layer` instead of the first (it and the layers before it are standard),
`detach_source` (a different model, as some re-implementations have it).
Parameters: none.
Cache: 2 L T D; each layer stores its mixed values, V_1 is the first layer's own entry.
Degenerate case: lambda_v1 = 0, lambda_own = 1 is the vanilla decoder; layers = [] too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight, chosen_layers, number, one_layer


class ResFormer(Shortcut):
    """Fixed-coefficient value residual."""

    prefix = "resformer"

    def __init__(
        self,
        config: ModelConfig,
        *,
        lambda_v1: float = 0.5,
        lambda_own: float = 0.5,
        layers: str | Sequence[int] = "all",
        source_layer: int = 0,
        detach_source: bool = False,
    ) -> None:
        super().__init__(config)
        self.lambda_v1, self.lambda_own = number("lambda_v1", lambda_v1), number("lambda_own", lambda_own)
        self.source_layer = one_layer("source_layer", source_layer, range(max(1, config.n_layers - 1)))
        self.layers = chosen_layers("layers", layers, range(self.source_layer + 1, config.n_layers))
        self.detaches = self.detach_source = bool(detach_source)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (self.source_layer,) if tensor == "v" and layer in self.layers else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return self.lambda_v1, self.lambda_own
