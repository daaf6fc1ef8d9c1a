"""The tree of hook points of an observed decoder, with the names of our own models and without the foreign modules.

If a block has several attentions, they are `attn.0`, `attn.1` and so on, and `attn` shows their heads one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.models.hook_points import HookedModule, HookPoint, has_hooks
from workbench.observing.interception.sharded_weights import full_weight
from workbench.observing.recognition.attention_calls import TracedAttention
from workbench.observing.recognition.decoder_structure import LayerStructure, Part
from workbench.observing.recognition.routers import Router
from workbench.observing.recognition.value_paths import Mixture

OWN = "own_v"
"""Short name of the hook point `own.hook_v` of an attention."""


class HeadPoints(HookedModule):
    """The unembedding: the hook point of its input, and its matrix."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.add_hook_points("in")
        self.__dict__["owner"] = owner  # not registered: it belongs to the foreign decoder

    @property
    def weight(self) -> Tensor:
        """Weight [d_vocab, d_model], gathered if it is sharded or offloaded."""
        return full_weight(self.__dict__["owner"])


class AttentionPoints(HookedModule):
    """Hook points of one attention, or of all of a block together."""

    def __init__(self, attention: TracedAttention, located: set[str], more: tuple[str, ...] = ()) -> None:
        super().__init__()
        names = ["v"] if attention.is_read else []
        names += [name for name in ("q", "k", "latent", "z") if name in located]
        names += ["rot_q", "rot_k"] if attention.pattern_from_qk else []
        self.add_hook_points(*names, *attention.statistics, *attention.squares, *more)
        if OWN in located:
            self.own = _value_point()

    def hooked(self) -> dict[str, HookPoint]:
        """Return the hook points with hooks, by name."""
        modules: dict[str, Any] = self._modules
        points = {
            name.removeprefix("hook_"): point
            for name, point in modules.items()
            if name.startswith("hook_") and (point._forward_hooks or point._backward_hooks)
        }
        return points | ({OWN: self.own.hook_v} if "own" in self._modules and has_hooks(self.own.hook_v) else {})


class BlockPoints(HookedModule):
    """Hook points of one layer, and of the sources that are mixed into its values."""

    def __init__(self, layer: LayerStructure, mixture: Mixture) -> None:
        super().__init__()
        self.mixture, sources = mixture, mixture.sources
        streams = ("resid_pre", "resid_post") if layer.has_stream else ()
        self.add_hook_points(*streams, *(n for n in ("attn_out", "mlp_out") if getattr(layer, n) is not None))
        more = ("v_weights",) if mixture.by_token else ("v_mix",) if mixture.mixed and sources else ()
        located = set.intersection(*map(located_in_part, layer.parts)) if layer.parts else set[str]()
        located -= {"latent"} if len(layer.parts) > 1 else set()
        located |= {"z"} if layer.z is not None else set()
        self.attn = AttentionPoints(layer.attention, located, more)
        if len(layer.parts) > 1:
            for number, part in enumerate(layer.parts):
                self.attn.add_module(str(number), AttentionPoints(part.attention, located_in_part(part)))
        if isinstance(layer.router, Router):
            self.mlp = HookedModule()
            self.mlp.add_hook_points(*layer.router.sites)
        if sources:
            self.attn.source = nn.ModuleDict({str(j): _value_point() for j in sources})
        if mixture.table:
            self.attn.table = _value_point()

    def parts(self, n: int) -> list[AttentionPoints]:
        """Return the hook points of n attentions."""
        return [self.attn] if n == 1 else [self.attn._modules[str(i)] for i in range(n)]  # type: ignore[misc]

    @property
    def source_points(self) -> dict[int, HookPoint]:
        """Hook points of earlier layers' own values that are mixed into this layer's values."""
        return {j: self.attn.source[str(j)].hook_v for j in self.mixture.sources}

    @property
    def table_point(self) -> HookPoint | None:
        """Hook point of values that a table holds by token id, or None."""
        return self.attn.table.hook_v if self.mixture.table else None


def located_in_part(part: Part) -> set[str]:
    """Return the names of tensors that are located in an attention, values aside."""
    named = {"q": part.q, "k": part.k, OWN: part.v, "latent": part.latent}
    located = {name for name, place in named.items() if place is not None}
    return located if part.attention.is_combined else located | {"z"}


class DecoderPoints(NamedTuple):
    """All hook points: of blocks, token embedding and the unembedding's input; None for an end that was not found."""

    blocks: list[BlockPoints]
    embed: HookPoint | None
    head: HookPoint | None


def _value_point() -> HookedModule:
    module = HookedModule()
    module.add_hook_points("v")
    return module
