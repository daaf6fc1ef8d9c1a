"""ResFormer: every later layer mixes its values with the first layer's values, with fixed coefficients (the value residual).

V_n = lambda_v1 V_1 + lambda_own V_n^own, U_n = A_n V_n. The layers up to the source layer are standard.

Options: `layers` are the layers that mix: a list, all, late or last_third. `source_layer` replaces the first layer. `detach_source` stops
the gradient at V_1, which is a different model that some re-implementations train.

Source: Zhou, Wu, Jiang, Obeid, Lan (2024), Value Residual Learning. The identity form (0.5, 0.5) is that of the authors' code. The constant
form (2, 1) is the best of their sweep. The sparse form has lambda 5 in the last three layers of eight (Zhou et al. 2025, as reported by
others). The own coefficient of these layers is unconfirmed; here it is 1.
Seam: `weights` of the values, before the cache write; V_1 is not detached, so every layer trains W_1^V.
Parameters: none.
Cache: 2 L T D; each layer caches its mixed values, and V_1 is the first layer's entry.
Degenerate case: lambda_v1 = 0, lambda_own = 1 is the vanilla decoder; layers = [] too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.options import integer_option, layers_option, number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class ResFormer(Shortcut):
    """The value residual with fixed coefficients; `Attention.project` computes the sum."""

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
        self.lambda_v1, self.lambda_own = number_option("lambda_v1", lambda_v1), number_option("lambda_own", lambda_own)
        self.source_layer = integer_option("source_layer", source_layer, range(max(1, config.n_layers - 1)), "layers")
        self.layers = layers_option("layers", layers, range(self.source_layer + 1, config.n_layers))
        self.detaches = self.detach_source = bool(detach_source)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (self.source_layer,) if tensor == "v" and layer in self.layers else ()  # V_1

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return self.lambda_v1, self.lambda_own  # of V_1 and of V_n^own
