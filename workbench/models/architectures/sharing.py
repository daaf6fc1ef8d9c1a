"""Cross-layer sharing (CLA): the layers of a group use the queries, keys or values of the group's first layer.

K_n = K_g, V_n = V_g, where g is the first layer of n's group. Layers other than g have no such projections; they reuse the cached
rotated keys and values.

Options: `group` = s layers, or `all` for one group; s need not divide L. `share`: kv, k, v or q. In combination with SVFormer use k,
since the values are the anchor's.

Source: Brandon et al. (2024), Reducing Transformer Key-Value Cache Size with Cross-Layer Attention (keys and values);
sharing of one tensor alone: ablations of Zhou et al. (2024), Value Residual Learning.
Seam: `shared_source`. A layer shares the tensors that its group's first layer attends with, mixed values included.
Parameters: -(L - ceil(L / s)) d D for each of keys and values shared, -(L - ceil(L / s)) d^2 for queries.
Cache: (L + ceil(L / s)) T D with shared keys or values, 2 ceil(L / s) T D with both, 2 L T D with queries.
Degenerate case: group = 1 is the vanilla decoder.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.options import choice_option, integer_option
from workbench.models.shortcut import Projection, Shortcut, Source


class Sharing(Shortcut):
    """Projections at the first layer of every group only."""

    prefix = "cla"

    def __init__(self, config: ModelConfig, *, share: str = "kv", group: int | str = 2) -> None:
        super().__init__(config)
        self.share = choice_option("share", share, ("kv", "k", "v", "q"))
        if group != "all":
            integer_option("group", group, range(1, config.n_layers + 1), "n_layers, or 'all'")
        self.group = group

    def shared_source(self, projection: Projection, layer: int) -> Source:
        if projection not in self.share:
            return layer
        return 0 if self.group == "all" else layer - layer % int(self.group)
