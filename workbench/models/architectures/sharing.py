"""Cross-layer sharing (CLA): layers in groups use the queries, keys or values of the group's first layer.

K_n = K_g, V_n = V_g with g the first layer of n's group of `group` layers (or `all`: one group); the others have no such
projections and reuse the cached keys, after the rotation, and values.

Source: Brandon et al. (2024), Reducing Transformer Key-Value Cache Size with Cross-Layer Attention (keys and values);
sharing of one tensor alone: ablations of Zhou et al. (2024), Value Residual Learning.
Seam: `shared_source`. What is shared is what the first layer of the group attends with, mixed values included. A group
need not divide L.
Options: `group` s, and `share`: kv, k, v or q (with SVFormer the values are the anchor's, so CLA shares keys alone there).
Parameters: -(L - ceil(L / s)) d D for each of keys and values shared, -(L - ceil(L / s)) d^2 for queries.
Cache: (L + ceil(L / s)) T D where keys or values are shared, 2 ceil(L / s) T D for both, 2 L T D for queries.
Degenerate case: group = 1 is the vanilla decoder.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Projection, Shortcut, Source, one_of


class Sharing(Shortcut):
    """Projections at the first layer of each group only."""

    prefix = "cla"

    def __init__(self, config: ModelConfig, *, share: str = "kv", group: int | str = 2) -> None:
        super().__init__(config)
        self.share = one_of("share", share, ("kv", "k", "v", "q"))
        if group != "all" and (
            isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= config.n_layers
        ):
            near = f"; nearest {min(max(group, 1), config.n_layers)}" if isinstance(group, int) else ""
            raise WorkbenchError(f"group={group!r}: 'all' or a number of layers 1..{config.n_layers} (n_layers){near}")
        self.group = group

    def shared_source(self, projection: Projection, layer: int) -> Source:
        if projection not in self.share:
            return layer
        return 0 if self.group == "all" else layer - layer % int(self.group)
