"""SkipV1Former: in every later layer half of the heads use the first layer's values, and W_V projects only the other heads.

V_n = [V_n^own of the first heads; V_1 of the last `skip_heads` heads] for n >= 2; key-value heads if they are grouped.

Source: arXiv 2510.16807 (2025): half of the heads. Unconfirmed: which half. Heads are alike at the start; here it is the last ones.
Seam: `shared_source` of some heads (`own_heads`). V_1 is not detached.
Parameters: -(L - 1) d s d_head, s = `skip_heads` (half of the key-value heads).
Cache: (2 L D - (L - 1) s d_head) T; the first layer's values are cached once.
Degenerate case: skip_heads = 0 is the vanilla decoder, skip_heads = all key-value heads SVFormer. A model with one key-value head
shares it.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.options import integer_option
from workbench.models.shortcut import Projection, Shortcut, Source


class SkipV1(Shortcut):
    """The first layer's values for some heads."""

    prefix = "skip_v1"

    def __init__(self, config: ModelConfig, *, skip_heads: int | None = None) -> None:
        super().__init__(config)
        heads = config.n_key_value_heads
        skipped = max(1, heads // 2) if skip_heads is None else skip_heads
        self.skip_heads = integer_option("skip_heads", skipped, range(heads + 1), "key-value heads")

    def shared_source(self, projection: Projection, layer: int) -> Source:
        return 0 if projection == "v" and self.skip_heads else layer

    def own_heads(self, projection: Projection, layer: int) -> int:
        return self.config.n_key_value_heads - self.skip_heads if projection == "v" else 0
