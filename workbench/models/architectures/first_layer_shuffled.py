"""Control: ResFormer's mix, but the first layer's values come from another sequence of the batch.

V_n[b] = lambda_other V_1[b - 1] + lambda_own V_n^own[b] for layers n >= 2 and sequence b of the batch, with V_1[-1] the last
sequence's: `torch.roll` by one along the batch, position by position. Values keep ResFormer's scale and distribution, and V_1 says
nothing about the sequence. An effect that ResFormer and this control share is not an effect of the path to the first layer.

Source: this project. A control for Zhou et al. (2024), Value Residual Learning, beside `values_scaled`.
Seam: `weights` of the values, with `arriving` for the permutation. `attn.source.0.hook_v` shows the other sequence's values. V_1 is not
detached. Every result depends on which sequences share a batch. A batch of one is refused, and so is a key-value cache.
Parameters: none.
Cache: none; decoding with `use_cache=False` needs two prompts or more.
Degenerate case: lambda_other = 0, lambda_own = 1 is the vanilla decoder; a batch of equal sequences is ResFormer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import BadData
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class FirstLayerShuffled(Shortcut):
    """The value residual with the values of the previous sequence in the batch."""

    prefix = "first_layer_shuffled"

    def __init__(self, config: ModelConfig, *, lambda_other: float = 0.5, lambda_own: float = 0.5) -> None:
        super().__init__(config)
        self.lambda_other = number_option("lambda_other", lambda_other)
        self.lambda_own = number_option("lambda_own", lambda_own)

    def prepare(self, tokens: Tensor) -> Memory:
        if len(tokens) < 2:
            raise BadData(
                "first_layer_shuffled takes the first layer's values from another sequence: give a batch of 2 or more"
            )
        return {}

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == "v" and layer > 0 else ()

    def arriving(self, source: Tensor) -> Tensor:
        return source.roll(1, 0)

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return self.lambda_other, self.lambda_own
