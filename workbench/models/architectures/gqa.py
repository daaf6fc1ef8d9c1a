"""Grouped queries: several query heads read one key-value head.

Head h reads key-value head floor(h / s), s = `query_group`. Multi-query attention has one key-value head.

Source: Ainslie et al. (2023), GQA; Shazeer (2019), Fast Transformer Decoding (one head). GQA-g of Zhou et al. (2024) has g
query heads for each key-value head.
Seam: `reshaped`, the decoder's shape (`n_key_value_heads`).
Parameters: -2 L d (d - D), D = d / s.
Cache: 2 L T D, D = d / s: 1 / s of the decoder's bytes.
Degenerate case: query_group = 1 is the vanilla decoder.
"""

from __future__ import annotations

from typing import Any

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.options import integer_option
from workbench.models.shortcut import Shortcut


class GQA(Shortcut):
    """Fewer key-value heads than query heads."""

    prefix = "gqa"

    def __init__(self, config: ModelConfig, *, query_group: int | str = 2) -> None:
        super().__init__(config)
        self.query_group = query_group

    @classmethod
    def reshaped(cls, config: ModelConfig, **options: Any) -> ModelConfig:
        group, heads = options["query_group"], config.n_heads
        divisors = [s for s in range(1, heads + 1) if heads % s == 0]
        allowed = f"'all' or divisors of n_heads={heads}"
        group = heads if group == "all" else integer_option("query_group", group, divisors, allowed)
        if config.n_key_value_heads not in (heads, heads // group):
            raise WorkbenchError(
                f"query_group={group} means {heads // group} key-value heads, but the config has"
                f" n_key_value_heads={config.n_key_value_heads}: drop one of them"
            )
        return config.replace(n_key_value_heads=heads // group)
