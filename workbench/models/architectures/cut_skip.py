"""Control: the first block has no skip connection, so only the first layer's values still carry the token.

`cut` = attn: H' = attention(H_0). `cut` = mlp: H_1 = MLP(H') with the skip around attention. `cut` = both: neither skip.

Source: Zhou et al. (2025), Value Residual Learning, as reported by others: without the first layer's hidden skip, values of the second
layer must begin to help. Unconfirmed: which of the two skips was cut.
Seam: `skip`.
Parameters: none.
Cache: 2 L T D.
Degenerate case: cut = none is the vanilla decoder.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.options import choice_option
from workbench.models.shortcut import Shortcut, Skip

CUT: dict[str, tuple[int, ...]] = {"attn": (0,), "mlp": (1,), "both": (0, 1), "none": ()}


class CutSkip(Shortcut):
    """Removal of the first block's skip connections."""

    prefix = "cut_skip"

    def __init__(self, config: ModelConfig, *, cut: str = "both") -> None:
        super().__init__(config)
        self.cut = choice_option("cut", cut, tuple(CUT))

    def skip(self, sublayer: int) -> Skip:
        return "" if sublayer in CUT[self.cut] else "stream"
