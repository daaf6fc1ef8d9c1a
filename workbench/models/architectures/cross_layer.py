"""Cross-layer attention: the queries of a layer see the keys and values of earlier layers in addition to its own.

U_n = softmax(Q_n [K_n; K_m]^T / sqrt(d_head)) [V_n; V_m]. All keys are rotated, and the causal mask applies to each half.

Options: `source` gives m: `previous` (m = n - 1), `first` (the first layer), a layer, or `all` (every earlier layer).

Source: Zhou et al. (2024), Value Residual Learning, the exact form that the value residual approximates: with K_m := K_n
it is A_n (V_n + V_m) / 2. The paper does not say which layer m it trained with.
Seam: `softmaxes`; the cost grows with the number of layers read. V_m are the values that layer m attends with.
Parameters: none.
Cache: 2 L T D; the source layers are cached anyway.
Degenerate case: L = 1. Also other layers' keys that no query sees, or other layers' keys and values equal to its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import UnknownName
from workbench.kernels.joint_and_null_softmax import Softmax
from workbench.models.options import integer_option
from workbench.models.shortcut import Projection, Reads, Shortcut, SoftmaxForm, Source, Weights


def earlier(source: int | str, layer: int) -> tuple[int, ...]:
    """Return the layers before `layer` that `source` names: `previous`, `first`, `all`, or a layer."""
    if layer == 0:
        return ()
    if isinstance(source, str):
        return {"previous": (layer - 1,), "first": (0,), "all": tuple(range(layer))}[source]
    return (source,) if source < layer else ()


def checked_source(option: str, source: int | str, config: ModelConfig) -> int | str:
    """Return a valid `source`; raise `UnknownName` or `WorkbenchError` with the choices."""
    if isinstance(source, str):
        if source not in ("previous", "first", "all"):
            raise UnknownName(option, source, ["previous", "first", "all", "a layer"])
        return source
    return integer_option(option, source, range(max(1, config.n_layers - 1)), "layers")  # no layer reads the last


class CrossLayer(Shortcut):
    """One softmax over the layer's own and earlier layers' keys."""

    prefix = "cross_layer"

    def __init__(self, config: ModelConfig, *, source: int | str = "previous") -> None:
        super().__init__(config)
        self.source = checked_source("source", source, config)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return earlier(self.source, layer) if tensor in ("rot_k", "v") else ()

    def attends(self, layer: int) -> SoftmaxForm:
        return "sets" if earlier(self.source, layer) else ""

    def idle(self, root: Callable[[Projection, int], Source]) -> bool:
        pairs = [(n, m) for n in range(self.config.n_layers) for m in earlier(self.source, n)]
        both: tuple[Projection, Projection] = ("k", "v")
        return bool(pairs) and all(root(t, n) == root(t, m) for t in both for n, m in pairs)

    def softmaxes(self, layer: int, q: Tensor, k: Tensor, read: Reads, weights: Weights) -> list[Softmax]:
        return [Softmax(1.0, q, [k, *read["rot_k"].values()])]
