"""Control: the first block without its skip connection, so that the first layer's values are all that is left of the token.

`cut` = attn: H' = attention(H_0); mlp: H_1 = MLP(H'), H' with its skip; both: neither skip.

Source: Zhou et al. (2025), Value Residual Learning, as reported by others: with the first layer's hidden skip cut, values
of the second layer must begin to help; which of its two skips was cut is not said.
Seam: the skip connections.
Parameters: none.
Cache: 2 L T D.
Degenerate case: cut = none is the vanilla decoder.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.shortcut import Shortcut, Skip, one_of

CUT: dict[str, tuple[int, ...]] = {"attn": (0,), "mlp": (1,), "both": (0, 1), "none": ()}


class CutSkip(Shortcut):
    """The first block without its skip."""

    prefix = "cut_skip"

    def __init__(self, config: ModelConfig, *, cut: str = "both") -> None:
        super().__init__(config)
        self.cut = one_of("cut", cut, tuple(CUT))

    def skip(self, sublayer: int) -> Skip:
        return "" if sublayer in CUT[self.cut] else "stream"
