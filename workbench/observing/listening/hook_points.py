"""The tree of hook points of an observed decoder, named as in our own models; no module of the foreign decoder stands in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from workbench.models.hook_points import HookedModule, HookPoint
from workbench.observing.recognition.structure import LayerStructure
from workbench.observing.recognition.value_paths import Mixture


class HeadPoints(HookedModule):
    """The head: the hook point of what it reads, and its matrix."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.add_hook_points("in")
        self.__dict__["owner"] = owner  # beside the registered modules: it stays the foreign decoder's

    @property
    def weight(self) -> Tensor:
        """[d_vocab, d_model]."""
        return self.__dict__["owner"].weight


class BlockPoints(HookedModule):
    """Hook points of one layer: of what was recognised in it, and of what is mixed into its values."""

    def __init__(self, layer: LayerStructure, mixture: Mixture) -> None:
        super().__init__()
        self.mixture, sources = mixture, mixture.sources
        self.attn = attn = HookedModule()
        streams = ("resid_pre", "resid_post") if layer.has_stream else ()
        self.add_hook_points(*streams, *(n for n in ("attn_out", "mlp_out") if getattr(layer, n) is not None))
        names = [*(("v", "z") if layer.is_read else ()), *(n for n in ("q", "k") if getattr(layer, n) is not None)]
        names += ["rot_q", "rot_k"] if layer.pattern_from_qk else []
        names += [*layer.statistics, *layer.squares]
        names += ["v_weights"] if mixture.by_token else ["v_mix"] if mixture.mixed and sources else []
        names += ["latent"] if layer.latent is not None else []
        attn.add_hook_points(*names)
        if layer.v is not None:
            attn.own = _value_point()
        if sources:
            attn.source = nn.ModuleDict({str(j): _value_point() for j in sources})
        if mixture.table:
            attn.table = _value_point()

    @property
    def own_point(self) -> HookPoint | None:
        """The hook point of the layer's own values, None where it projects none."""
        own = getattr(self.attn, "own", None)
        return None if own is None else own.hook_v

    @property
    def source_points(self) -> dict[int, HookPoint]:
        """The hook points of the earlier layers' own values that are mixed into this layer's."""
        return {j: self.attn.source[str(j)].hook_v for j in self.mixture.sources}

    @property
    def table_point(self) -> HookPoint | None:
        """The hook point of values looked up by token id, None where the layer reads none."""
        return self.attn.table.hook_v if self.mixture.table else None


class DecoderPoints(NamedTuple):
    """All hook points: of the blocks, of the token embedding and of what the head reads; None where that was not found."""

    blocks: list[BlockPoints]
    embed: HookPoint | None
    head: HookPoint | None


def _value_point() -> HookedModule:
    module = HookedModule()
    module.add_hook_points("v")
    return module
