"""Control: the embedding is added again to the input of every later block.

H'_{n-1} = lambda_h1 H_0 + lambda_h_own H_{n-1} is the input of block n >= 2, skip connection included. With `once` it is that of block 2
alone. Then every later input has 1 + lambda_h1 times the embedding, so this only makes the embedding larger. An effect that both share
is not one of the path to later blocks.

Source: Zhou et al. (2025), Value Residual Learning, ablation over residual targets, as reported by others. Unconfirmed: the
coefficients, here (1, 1). `once` is this project's control. Queries, keys and values all change.
Seam: stream (after every block but the last).
Parameters: none.
Cache: 2 L T D.
Degenerate case: lambda_h1 = 0, lambda_h_own = 1 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Shortcut, Weight


class HiddenResidual(Shortcut):
    """Fixed-coefficient residual of the embedding."""

    prefix = "residual_hidden"

    def __init__(
        self, config: ModelConfig, *, lambda_h1: float = 1.0, lambda_h_own: float = 1.0, once: bool = False
    ) -> None:
        super().__init__(config)
        self.lambda_h1 = number_option("lambda_h1", lambda_h1)
        self.lambda_h_own = number_option("lambda_h_own", lambda_h_own)
        self.once = bool(once)

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        last = 2 if self.once else 2 * self.config.n_layers - 1
        return (0, sublayer) if sublayer % 2 == 0 and sublayer <= last else ()

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        return self.lambda_h1, self.lambda_h_own
