"""SVFormer: all layers use the first layer's values, which halves the key-value cache.

U_n = A_n V_1 for layers n >= 2, which have no value projection.

Options: `anchors` are the layers (from 0) with values of their own; each later layer uses the latest anchor's values.
`refresh_every` = r sets the anchors to 0, r, 2r, ... `shared_layers` are the layers that use the first layer's values; `last_third` is a
comparison of Bank of Values (2026, arXiv 2606.02780).

Source: Zhou et al. (2024), Value Residual Learning, and the authors' code (one anchor, the first layer). Their code
writes the shared values to every layer's cache; here they are cached once.
Seam: `shared_source`.
Parameters: -(L - k) d D for k layers with values of their own.
Cache: (L + k) T D, which is (L + k) / (2 L) of the decoder's bytes.
Degenerate case: anchors = all layers, or shared_layers = [], is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.options import integer_option, layers_option
from workbench.models.shortcut import Projection, Shortcut, Source


class SVFormer(Shortcut):
    """Values projected at the anchors only."""

    prefix = "svformer"

    def __init__(
        self,
        config: ModelConfig,
        *,
        anchors: Sequence[int] | None = None,
        refresh_every: int | None = None,
        shared_layers: str | Sequence[int] = "all",
    ) -> None:
        super().__init__(config)
        depth, last = config.n_layers, config.n_layers - 1
        if refresh_every is not None:
            integer_option("refresh_every", refresh_every, range(1, depth + 1), "n_layers")
        every = tuple(range(0, depth, refresh_every or depth))
        self.anchors = every if anchors is None else tuple(anchors)
        self.refresh_every = refresh_every
        if self.anchors[:1] != (0,) or list(self.anchors) != sorted(set(self.anchors) & set(range(last + 1))):
            near = tuple(sorted({0, *(min(max(a, 0), last) for a in self.anchors)}))
            needed = f"must rise from 0 within the layers 0..{last}; nearest {near}"
            raise WorkbenchError(f"anchors={self.anchors}: {needed}")
        if refresh_every is not None and self.anchors != every:
            other = f"refresh_every={refresh_every}, which means {every}; give one"
            raise WorkbenchError(f"anchors={self.anchors} contradict {other}")
        self.shared_layers = layers_option("shared_layers", shared_layers, range(1, depth))
        if self.shared_layers != tuple(range(1, depth)) and self.anchors != (0,):
            both = f"shared_layers={shared_layers!r} use the first layer's values, anchors={self.anchors} others' too"
            raise WorkbenchError(f"{both}; give one")

    def shared_source(self, projection: Projection, layer: int) -> Source:
        if projection != "v" or layer not in self.shared_layers:
            return layer
        return max(a for a in self.anchors if a <= layer)
