"""The tree of hook points of an observed decoder, named as in our own models; no module of the foreign decoder stands in it.

Of several attentions in a block each has its own, `attn.0`, `attn.1` and so on; `attn` shows their heads one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.models.hook_points import HookedModule, HookPoint, is_hooked
from workbench.observing.interception.weights import whole
from workbench.observing.recognition.attention_calls import TracedAttention
from workbench.observing.recognition.structure import LayerStructure, Part
from workbench.observing.recognition.value_paths import Mixture

OWN = "own_v"
"""Name of the hook point `own.hook_v` of an attention among its others."""


class HeadPoints(HookedModule):
    """The head: the hook point of what it reads, and its matrix."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.add_hook_points("in")
        self.__dict__["owner"] = owner  # beside the registered modules: it stays the foreign decoder's

    @property
    def weight(self) -> Tensor:
        """[d_vocab, d_model], as a whole wherever it is kept."""
        return whole(self.__dict__["owner"])


class AttentionPoints(HookedModule):
    """Hook points of one attention, or of all of a block together."""

    def __init__(self, attention: TracedAttention, found: set[str], more: tuple[str, ...] = ()) -> None:
        super().__init__()
        names = ["v"] if attention.is_read else []
        names += [name for name in ("q", "k", "latent", "z") if name in found]
        names += ["rot_q", "rot_k"] if attention.pattern_from_qk else []
        self.add_hook_points(*names, *attention.statistics, *attention.squares, *more)
        if OWN in found:
            self.own = _value_point()

    def hooked(self) -> dict[str, HookPoint]:
        """Those that are hooked, by name."""
        points: dict[str, Any] = dict(self._modules)
        found = {name.removeprefix("hook_"): p for name, p in points.items() if name.startswith("hook_")}
        found |= {OWN: self.own.hook_v} if "own" in self._modules else {}
        return {name: point for name, point in found.items() if is_hooked(point)}


class BlockPoints(HookedModule):
    """Hook points of one layer: of what was recognised in it, and of what is mixed into its values."""

    def __init__(self, layer: LayerStructure, mixture: Mixture) -> None:
        super().__init__()
        self.mixture, sources = mixture, mixture.sources
        streams = ("resid_pre", "resid_post") if layer.has_stream else ()
        self.add_hook_points(*streams, *(n for n in ("attn_out", "mlp_out") if getattr(layer, n) is not None))
        more = ("v_weights",) if mixture.by_token else ("v_mix",) if mixture.mixed and sources else ()
        self.attn = AttentionPoints(layer.attention, shown(layer), more)
        if len(layer.parts) > 1:
            for number, part in enumerate(layer.parts):
                self.attn.add_module(str(number), AttentionPoints(part.attention, shown_of_part(part)))
        if sources:
            self.attn.source = nn.ModuleDict({str(j): _value_point() for j in sources})
        if mixture.table:
            self.attn.table = _value_point()

    def parts(self, n: int) -> list[AttentionPoints]:
        """Hook points of each of n attentions."""
        return [self.attn] if n == 1 else [self.attn._modules[str(i)] for i in range(n)]  # type: ignore[misc]

    @property
    def source_points(self) -> dict[int, HookPoint]:
        """The hook points of the earlier layers' own values that are mixed into this layer's."""
        return {j: self.attn.source[str(j)].hook_v for j in self.mixture.sources}

    @property
    def table_point(self) -> HookPoint | None:
        """The hook point of values looked up by token id, None where the layer reads none."""
        return self.attn.table.hook_v if self.mixture.table else None


def shown(layer: LayerStructure) -> set[str]:
    """What a layer's attention shows beside its values: of several, what each of them does."""
    if not layer.parts:
        return set()
    found = set.intersection(*(shown_of_part(part) for part in layer.parts))
    found -= {"latent"} if len(layer.parts) > 1 else set()
    return found | ({"z"} if layer.z is not None else set())


def shown_of_part(part: Part) -> set[str]:
    """What an attention shows beside its values."""
    named = {"q": part.q, "k": part.k, OWN: part.v, "latent": part.latent}
    return {name for name, place in named.items() if place is not None} | (
        set() if part.attention.is_combined else {"z"}
    )


class DecoderPoints(NamedTuple):
    """All hook points: of the blocks, of the token embedding and of what the head reads; None where that was not found."""

    blocks: list[BlockPoints]
    embed: HookPoint | None
    head: HookPoint | None


def _value_point() -> HookedModule:
    module = HookedModule()
    module.add_hook_points("v")
    return module
