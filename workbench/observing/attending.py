"""Attention of an observed module as it is listened to: fused calls, and the products and softmax of an eager one.

What nobody replaces goes on as the same tensor, and a call that is only read runs untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.attention import AttentionStatistics
from workbench.models.activations import probabilities
from workbench.models.points import hooked
from workbench.names import STATISTICS
from workbench.observing.anatomy import Layer
from workbench.observing.calls import Fused, Product, arrange, restore
from workbench.observing.fitting import fit
from workbench.observing.layouts import from_heads, get, put, to_heads
from workbench.observing.masks import CAUSAL, HIDDEN, kind_of, masked_statistics, pattern_statistics
from workbench.observing.projections import Projection
from workbench.observing.tracing import MATRIX, Attention, causal_attention
from workbench.observing.watching import Watch

if TYPE_CHECKING:
    from workbench.observing.observed import Observed

_ATTENTION = ("v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "v_mix", *STATISTICS)
_MOST_POSITIONS = 4096  # enough for coefficients to 1e-7


class Attending:
    """Memory of one run, and what hears of the calls of its attention."""

    def __init__(self, observed: Observed, tokens: Tensor) -> None:
        self.observed, self.module = observed, observed.foreign
        self.layers = observed.anatomy.layers
        self.batch, self.length = tokens.shape
        self.watch: Watch | None = None
        self.running: list[int] = []  # layers, innermost last
        self.runs: Counter[str] = Counter()  # of modules, in all
        self.within: list[Counter[str]] = []  # of modules and calls, in each running layer
        self.own: dict[int, Tensor] = {}  # own values [batch, pos, kv_head, d_head] that later layers read
        self.lse: dict[int, Tensor] = {}  # of eager scores that statistics are wanted of
        self.kinds: dict[int, str] = {}  # masks already looked at
        self.masks: list[Tensor] = []  # kept so that their ids stay theirs
        self.at = {(layer.block, layer.run): i for i, layer in enumerate(self.layers)}
        attentions: Any = [block.attn for block in cast(Any, observed.blocks)]
        self.points = [  # of each layer's attention, those that somebody listens to
            {n.removeprefix("hook_"): p for n, p in attn._modules.items() if n.startswith("hook_") and hooked(p)}
            for attn in attentions
        ]
        each = {i: observed.sources_of(i) for i in range(len(self.layers))}
        self.mixed = {i: s for i, s in each.items() if "v_mix" in self.points[i] or any(map(hooked, s.values()))}
        self.needed = {
            j for i in self.mixed for j in (*observed.mixing(i), i)
        }  # layers whose own values are read again
        found = [(i, *heard) for i in each for heard in self._projections(i)]
        self.parts = [heard for heard in found if heard[2].module != MATRIX]
        self.bare: dict[tuple[int, int], list[tuple[str, Projection, Any]]] = {}  # by layer, and which bare matrix
        for i, name, projection, point in found:
            if projection.module == MATRIX:
                self.bare.setdefault((i, projection.run), []).append((name, projection, point))
        inside = {i for i, points in enumerate(self.points) if points.keys() & set(_ATTENTION)}
        self.attentive = inside | self.needed | {i for i, _ in self.bare}  # layers whose calls are of interest

    # ---- hook points -------------------------------------------------------------------------------------------------

    def fire(self, point: Any, tensor: Tensor) -> Tensor:
        """What leaves a hook point: the same tensor where nobody replaces it."""
        if point is None or not hooked(point):
            return tensor
        handed = tensor.clone() if self.observed.anatomy.in_place else tensor
        out = self._hooks_of(point, handed)
        return tensor if out is handed else out.to(tensor.dtype)

    def show(self, point: Any, tensor: Tensor) -> None:
        """Fire a hook point that can only be read."""
        if point is not None and hooked(point) and self._hooks_of(point, tensor) is not tensor:
            raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the module")

    def _hooks_of(self, point: Any, tensor: Tensor) -> Tensor:
        """The hooks' answer; what they compute themselves is no call of the module."""
        if self.watch is None:
            return point(tensor)
        before, self.watch.silent = self.watch.silent, True
        try:
            return point(tensor)
        finally:
            self.watch.silent = before

    def point(self, i: int, name: str) -> Any:
        """Hook point of a layer's attention, None where nobody listens to it."""
        return self.points[i].get(name)

    def wanted(self, i: int, *names: str) -> bool:
        """Whether somebody listens to one of a layer's attention points."""
        points = self.points[i]
        return any(name in points for name in names)

    def _projections(self, i: int) -> Iterator[tuple[str, Projection, Any]]:
        """What is wanted of a layer's projections: q, k or v, where it stands, its hook point."""
        layer = self.layers[i]
        for name, projection in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
            point = self.observed.own_point(i) if name == "v" else self.point(i, name)
            heard = point is not None and hooked(point)
            if projection is not None and (heard or (name == "v" and i in self.needed)):
                yield name, projection, point

    # ---- fused attention ----------------------------------------------------------------------------------------------

    def _call(self, kind: str) -> tuple[int, int]:
        """(layer, which call of this class it is there); layer -1 outside the observed blocks."""
        if not self.running or self.running[-1] < 0:
            return -1, 0
        count = self.within[-1][f"({kind})"]
        self.within[-1][f"({kind})"] += 1
        return self.running[-1], count

    def fused(self, call: Fused) -> Any:
        """Fire around one whole attention."""
        i, count = self._call("fused")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind != "fused" or layer.calls != (count,) or i not in self.attentive:
            return call.run()
        q, k, v = call.heads(self.batch)
        matters = self.wanted(i, "rot_q", "rot_k", *STATISTICS)
        self._refuse(i, q, k, self._kind(call) if matters else CAUSAL, call.dropout)
        times = _times(v, layer.attention)
        short_k, short_v = k[:, :, ::times], v[:, :, ::times]
        factor = call.scale * q.shape[-1] ** 0.5
        changed = self._inputs(i, q, short_k, short_v, factor)
        q, short_k, short_v = (
            changed.get(n, x) for n, x in zip(("query", "key", "value"), (q, short_k, short_v), strict=True)
        )
        wide = {
            n: x if n == "query" else x.repeat_interleave(times, dim=2) if times > 1 else x for n, x in changed.items()
        }
        pattern, replaced = None, False
        if self.wanted(i, "attn_scores", "pattern"):
            scores = _scores(q, short_k, call)
            pattern, replaced = self._pattern(i, scores, v.dtype)
        self._statistics(i, lambda: self._read(call, q, short_k, short_v, layer, pattern))
        if pattern is not None and replaced:
            z = torch.einsum("bhqk,bkhd->bqhd", pattern, _wide(short_v, q.shape[2]))
            raw = call.run(wide)
            return put(raw, call.output, call.raw(z.to(v.dtype), get(raw, call.output)))
        raw = call.run(wide)
        if layer.z is None and self.wanted(i, "z"):
            found = get(raw, call.output)
            z = call.z(found, self.batch)
            out = self.fire(self.point(i, "z"), z)
            return raw if out is z else put(raw, call.output, call.raw(out, found))
        return raw

    def _kind(self, call: Fused) -> str:
        """What a mask does, looked at once for all layers that share it."""
        if not isinstance(call.mask, Tensor):
            return kind_of(call.mask, call.causal, self.length, call.window)
        if id(call.mask) not in self.kinds:
            self.kinds[id(call.mask)] = kind_of(call.mask, call.causal, self.length, call.window)
            self.masks.append(call.mask)
        return self.kinds[id(call.mask)]

    def _inputs(self, i: int, q: Tensor, k: Tensor, v: Tensor, factor: float) -> dict[str, Tensor]:
        """Fire on q, k, v [batch, pos, head, d_head] as the attention reads them; what was replaced, by name."""
        changed: dict[str, Tensor] = {}
        self._sources(i, v)
        if (out := self.fire(self.point(i, "v"), v)) is not v:
            changed["value"] = out
        if self.wanted(i, "rot_q"):
            folded = q if abs(factor - 1) < 1e-6 else q * factor
            if (out := self.fire(self.point(i, "rot_q"), folded)) is not folded:
                changed["query"] = out if folded is q else out / factor
        if (out := self.fire(self.point(i, "rot_k"), k)) is not k:
            changed["key"] = out
        return changed

    def _sources(self, i: int, v: Tensor) -> None:
        """Fire the sources of a mixed value, and the coefficients they stand in it with."""
        if i in self.needed and self.layers[i].v is None and not self.observed.mixing(i):
            self.own[i] = v
        if i not in self.mixed:
            return
        layers = self.observed.mixing(i)
        for j, point in self.mixed[i].items():
            self.show(point, self.own[j])
        if self.wanted(i, "v_mix"):
            parts = [self.own[j] for j in layers]
            every = [*parts, self.own[i]] if i in self.own else parts
            found, _ = fit(_some(v), [_some(x) for x in every])
            found = found if i in self.own else [*found, 0.0]
            self.show(self.point(i, "v_mix"), v.new_tensor(found, dtype=torch.promote_types(v.dtype, torch.float32)))

    def _pattern(self, i: int, scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """The pattern [batch, head, query, key] of scores after the hooks, and whether one of them replaced anything."""
        first = self.fire(self.point(i, "attn_scores"), scores)
        pattern = probabilities(first, dtype).nan_to_num(0.0)
        out = self.fire(self.point(i, "pattern"), pattern)
        return out, first is not scores or out is not pattern

    def _read(
        self, call: Fused, q: Tensor, k: Tensor, v: Tensor, layer: Layer, pattern: Tensor | None
    ) -> AttentionStatistics:
        if pattern is not None:  # of the pattern in use, whatever a hook made of it
            return pattern_statistics(_scores(q, k, call).logsumexp(-1), pattern)
        if layer.attention.mask == CAUSAL:
            return causal_attention(q, k, v, call.scale)[1]
        return masked_statistics(q, k, v, scale=call.scale, mask=call.mask, causal=call.causal)[1]

    def _statistics(self, i: int, read: Callable[[], AttentionStatistics]) -> None:
        points = [(name, self.point(i, name)) for name in STATISTICS]
        if any(p is not None and hooked(p) for _, p in points):
            found = read()
            for name, point in points:
                self.show(point, getattr(found, name))

    def _refuse(self, i: int, q: Tensor, k: Tensor, kind: str = CAUSAL, dropout: float = 0.0) -> None:
        """Raise where the attention is not what was observed, and what is asked for depends on it."""
        where, known = f"attention in layer {i}", self.layers[i].attention.mask
        if dropout:
            raise WorkbenchError(f"dropout of {dropout} is active in the {where}: call module.eval() first")
        if q.shape[1] != k.shape[1] or q.shape[1] != self.length:
            raise WorkbenchError(
                f"{where} lets {q.shape[1]} queries attend to {k.shape[1]} keys for {self.length} tokens; give whole sequences"
            )
        if known == CAUSAL != kind and self.wanted(i, "rot_q", "rot_k", *STATISTICS):
            raise WorkbenchError(
                f"{where} is masked otherwise now ({kind}) than on the example tokens ({known}); observe the module again "
                f"with example tokens of this kind and length ({self.length})"
            )

    # ---- eager attention ---------------------------------------------------------------------------------------------

    def product(self, call: Product) -> Any:
        """Fire around the two products of an eager attention."""
        i, count = self._call("product")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind != "eager" or i not in self.attentive:
            return call.run()
        if count == layer.calls[0]:
            return self._score_product(i, call)
        return self._value_product(i, call) if count == layer.calls[2] else call.run()

    def _score_product(self, i: int, call: Product) -> Any:
        if not self.wanted(i, "rot_q", "rot_k"):
            return call.run()
        known = self.layers[i].attention
        which, q_order, k_order = known.axes[:3]
        arranged = call.arranged(which, q_order), call.arranged(1 - which, k_order)
        q, k = (to_heads(x, self.batch) for x in arranged)
        self._refuse(i, q, k)
        times = _times(k, known)
        short, changed = k[:, :, ::times], {}
        factor = known.scale * q.shape[-1] ** 0.5
        folded = q if abs(factor - 1) < 1e-6 else q * factor
        if (out := self.fire(self.point(i, "rot_q"), folded)) is not folded:
            out = out if folded is q else out / factor
            changed[which] = call.restored(which, from_heads(out, arranged[0]), q_order)
        if (out := self.fire(self.point(i, "rot_k"), short)) is not short:
            wide = from_heads(out.repeat_interleave(times, dim=2), arranged[1])
            changed[1 - which] = call.restored(1 - which, wide, k_order)
        return call.run(changed)

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Fire on an eager attention's scores."""
        i, count = self._call("softmax")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind != "eager" or count != layer.calls[1]:
            return run(scores)
        shaped = scores.reshape(self.batch, -1, *scores.shape[-2:])
        out = self.fire(self.point(i, "attn_scores"), shaped)
        used = scores if out is shaped else out.reshape(scores.shape)
        pattern = run(used)
        if self.wanted(i, "rot_q", "rot_k", *STATISTICS):
            kind = kind_of(shaped[:, :1] > HIDDEN, False, self.length)
            self._refuse(i, shaped[:, 0], shaped[:, 0].mT, kind)
        if self.wanted(i, *STATISTICS):
            self.lse[i] = out.detach().to(torch.promote_types(out.dtype, torch.float32)).logsumexp(-1)
        return pattern

    def _value_product(self, i: int, call: Product) -> Any:
        known = self.layers[i].attention
        which, _, v_order, z_order = known.axes[3:]
        changed: dict[int, Tensor] = {}
        arranged = call.arranged(1 - which, v_order)
        wide_v = to_heads(arranged, self.batch)
        times = _times(wide_v, known)
        v = wide_v[:, :, ::times]
        self._sources(i, v)
        if (out := self.fire(self.point(i, "v"), v)) is not v:
            wide = from_heads(out.repeat_interleave(times, dim=2), arranged)
            changed[1 - which] = call.restored(1 - which, wide, v_order)
        pattern = call.operands[which]
        shaped = pattern.reshape(self.batch, -1, self.length, self.length)
        used = self.fire(self.point(i, "pattern"), shaped)
        if used is not shaped:
            changed[which] = used.reshape(pattern.shape)
        if (lse := self.lse.pop(i, None)) is not None:
            self._statistics(i, lambda: pattern_statistics(lse, used))
        raw = call.run(changed)
        if self.layers[i].z is None and self.wanted(i, "z"):
            lined = arrange(raw, call.letters[2], z_order)
            z = to_heads(lined, self.batch)
            out = self.fire(self.point(i, "z"), z)
            return raw if out is z else restore(from_heads(out, lined), z_order, call.letters[2])
        return raw


def _scores(q: Tensor, k: Tensor, call: Fused) -> Tensor:
    """Scaled, masked scores [batch, head, query, key] of a fused call."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _wide(k, q.shape[2])) * call.scale
    if call.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if call.mask is None:
        return scores
    return scores.masked_fill(~call.mask, float("-inf")) if call.mask.dtype == torch.bool else scores + call.mask


def _times(x: Tensor, known: Attention) -> int:
    """How often each key-value head is repeated in this call: a module may repeat them only where it passes a mask."""
    return x.shape[2] // known.kv_heads


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _some(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[:_MOST_POSITIONS]
