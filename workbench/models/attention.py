"""Causal attention with grouped key-value heads; queries, keys and values may come from, or be mixed with, other layers'.

Attention is fused unless a hook asks for scores or pattern; statistics are streamed; points without hooks cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.kernels.attention import AttentionStatistics, attention_statistics, statistics_of
from workbench.kernels.joint import Softmax, joint_attention, joint_scores, joint_statistics, statistics_of_sets
from workbench.models.activations import causal_scores, probabilities
from workbench.models.cache import KeyValueCache
from workbench.models.points import Part, Point, at, hooked, keep, lent
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, State, mix, overrides
from workbench.names import STATISTICS

_PROJ = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_HOOK = {name: f"hook_{name}" for name in ("q", "k", "v", "rot_q", "rot_k")}


class Rotary(nn.Module):
    """Rotary positions: x cos + rot(x) sin with rot([a; b]) = [-b; a] over the two halves of a head."""

    def __init__(self, d_head: int, n_ctx: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.n_ctx, self.theta = d_head, n_ctx, theta
        self.tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, length: int, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines from position `start`, each [length, 1, d_head], computed once for a device and dtype."""
        key = (like.device, like.dtype)
        if torch.compiler.is_compiling():  # part of the graph, which would be made again for a table made meanwhile
            cos, sin = self._table(like)
            return cos[start : start + length], sin[start : start + length]
        if key not in self.tables:
            self.tables[key] = self._table(like)
        cos, sin = self.tables[key]
        return cos[start : start + length], sin[start : start + length]

    @torch.inference_mode(False)  # a table made in inference mode could never be trained with
    def _table(self, like: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.d_head, 2, device=like.device, dtype=wide) / self.d_head
        position = torch.arange(self.n_ctx, device=like.device, dtype=wide)
        angle = torch.outer(position, 1.0 / self.theta**exponent)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle.sin(), angle.sin()), -1)
        return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """[batch, pos, head, d_head] turned by its position; the sign of rot() is in the sines."""
    return x * turn[0] + x.roll(x.shape[-1] // 2, -1) * turn[1]  # unfused: rounds as the published code does


class Branch(Part):
    """A tensor on its way into a layer: `own`, `first`, `source.<j>`, `table`, `cross`."""

    def show(self, *points: str) -> None:
        """Add hook points."""
        for point in points:
            setattr(self, f"hook_{point}", Point())
        keep(self)


class Attention(Part):
    """softmax(rope(Q) rope(K)^T / sqrt(d_head) + causal mask) V W_O, with whatever the shortcuts change about it."""

    def __init__(self, config: ModelConfig, layer: int, shortcuts: Sequence[Shortcut]) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.lenders: dict[str, Source] = {}  # whose projection this layer uses
        self.branches: dict[str, dict[Source, tuple[Branch, State]]] = {}  # what it mixes, borrows or is pulled toward
        self.mixers: dict[str, tuple[Shortcut, tuple[Source, ...]]] = {}  # who mixes, and which of the sources
        self.reads: dict[str, dict[Source, Branch]] = {}  # what its softmaxes read of other layers
        self.kept: dict[str, tuple[State, ...]] = {"q": (), "k": (), "v": ()}  # what later layers want; the model tells
        self.attended: tuple[str, ...] = ()  # rotated queries, keys or values that their softmaxes want
        self.absent: dict[str, str] = {}  # statistics that do not exist here, and why
        self.joint = next((s for s in shortcuts if s.attends(layer)), None)
        widths: dict[Projection, int] = {"q": config.d_model, "k": config.d_key_value, "v": config.d_key_value}
        for name, width in widths.items():
            self.lenders[name] = next((j for s in shortcuts if (j := s.lender(name, layer)) != layer), layer)
            if self.lenders[name] == layer:
                setattr(self, f"{name}_proj", nn.Linear(config.d_model, width, bias=False))
            self._wire(name, [s for s in shortcuts if s is not self.joint])
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.outputs = sorted((s for s in shortcuts if overrides(s, "output")), key=lambda s: s.multiplies)
        self.shown = [n for n in widths if self.lenders[n] == layer and (n == "v" or self.branches[n])]
        if self.shown:
            self.own = getattr(self, "own", Branch())
            self.own.show(*self.shown)
        for point in ("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", *STATISTICS):
            setattr(self, f"hook_{point}", Point())
        self.parts: list[list[Part]] = []  # of each softmax, of each key set: who shows its scores and pattern
        if self.joint is not None:
            self._wire_jointly(self.joint)
        self.statistics = tuple(getattr(self, f"hook_{n}") for n in STATISTICS if n not in self.absent)
        keep(self)

    # ---- wiring ------------------------------------------------------------------------------------------------------

    def _wire(self, name: Projection, shortcuts: Sequence[Shortcut]) -> None:
        """Branches of the sources of q, k or v, and who mixes them."""
        lender, wanted = self.lenders[name], dict[Source, State]()
        if lender != self.layer:
            wanted[lender] = "effective"
        mixed = {  # elsewhere what a layer projects is what it attends with
            j
            for j in range(1, self.layer)
            if any(s.mixes(name, j) for s in shortcuts) and all(s.lender(name, j) == j for s in shortcuts)
        }
        for shortcut in shortcuts:
            mixes = shortcut.mixes(name, self.layer)
            if mixes and lender != self.layer:
                continue  # nothing of its own to mix: it attends with what it borrows
            sources = shortcut.sources(name, self.layer)
            for j in sources:
                if wanted.setdefault(j, shortcut.reads) != shortcut.reads and j in mixed:
                    readers = [s for s in shortcuts if j in (s.lender(name, self.layer), *s.sources(name, self.layer))]
                    raise WorkbenchError(
                        f"{' and '.join(s.prefix for s in readers)} cannot be combined: layer {self.layer} would read"
                        f" {name} of layer {j} both before and after it is mixed"
                    )
            if mixes:
                self.mixers[name] = shortcut, sources
                setattr(self, f"hook_{name}_mix", Point())  # [sources + 1], own last
        layers = sorted(j for j in wanted if isinstance(j, int))
        order: list[Source] = [*layers, *(j for j in wanted if isinstance(j, str))]
        self.branches[name] = {j: (self._branch(j, layers), wanted[j]) for j in order}
        for branch, _ in self.branches[name].values():
            branch.show(name)

    def _branch(self, source: Source, layers: Sequence[int]) -> Branch:
        """Where a source's hook points stand: `table`, `first`, or `source.<j>` where others than layer 0 are sources."""
        if isinstance(source, str):
            self.table = getattr(self, "table", None) or Branch()
            return self.table
        if list(layers) == [0]:
            self.first = getattr(self, "first", None) or Branch()
            return self.first
        others: Any = getattr(self, "source", None) or nn.ModuleDict()
        self.source = others
        if str(source) not in others:
            others[str(source)] = Branch()
        return others[str(source)]

    def _wire_jointly(self, joint: Shortcut) -> None:
        """Branches of what the softmaxes read, and who shows the scores and patterns of which."""
        kind = joint.attends(self.layer)
        found = {t: js for t in ("rot_q", "rot_k", "v") if (js := joint.sources(t, self.layer))}
        layers = sorted({j for js in found.values() for j in js})
        if len(layers) > 1:
            others = {j: Branch() for j in layers}
            setattr(self, joint.branch, nn.ModuleDict({str(j): branch for j, branch in others.items()}))
        else:
            branch = getattr(self, joint.branch, None) or Branch()
            setattr(self, joint.branch, branch)
            others = dict.fromkeys(layers, branch)
        for tensor, js in found.items():
            self.reads[tensor] = {j: others[j] for j in js}
            for j in js:
                others[j].show(tensor)
        if kind == "mixture":
            self.own = getattr(self, "own", Branch())
            self.parts = [[branch] for branch in (*others.values(), self.own)]
            where = f"{joint.branch} and own hook_attn_scores are those of the {len(self.parts)} softmaxes"
            self.absent = {
                "lse": f"the pattern is a weighted sum of softmaxes, which has no log-sum-exp; {where}",
                "attn_scores": f"the pattern is a weighted sum of softmaxes, not the softmax of any scores; {where}",
            }
            del self.hook_lse, self.hook_attn_scores
        else:
            self.parts = [[self, *others.values()] if kind == "sets" else [self]]
        for parts in self.parts:
            for part in parts:
                if part is not self:
                    part.show("attn_scores", "pattern")

    def needs(self) -> list[tuple[str, int, State]]:
        """(tensor, layer, state) of everything this layer reads of earlier ones."""
        found = [(n, j, state) for n, js in self.branches.items() for j, (_, state) in js.items() if isinstance(j, int)]
        found += [(n, j, "cached") for n, js in self.reads.items() for j in js if isinstance(j, int)]
        if isinstance(j := self.lenders["k"], int) and j != self.layer:
            found.append(("rot_k", j, "cached"))
        return found

    def provide(self, name: str, state: State) -> None:
        """Keep a tensor for a later layer."""
        if state == "cached":
            self.attended = tuple(sorted({*self.attended, name}))
        else:
            self.kept[name] = tuple(sorted({*self.kept[name], state}))

    # ---- queries, keys and values ------------------------------------------------------------------------------------

    def project(self, name: Projection, x: Tensor, memory: Memory) -> tuple[Tensor, dict[Source, Tensor]]:
        """Effective query, key or value [batch, pos, head, d_head], and the sources it may have used."""
        own: Any = None
        if self.lenders[name] == self.layer:
            own = getattr(self, _PROJ[name])(x).view(*x.shape[:2], -1, self.config.d_head)
            if name in self.shown:
                own = at(self.own, _HOOK[name], own)
        sources = {
            j: lent(branch, _HOOK[name], memory[name, j, state]) for j, (branch, state) in self.branches[name].items()
        }
        if name in self.mixers:
            effective = at(self, _HOOK[name], self._mixed(name, own, sources, memory))
        else:
            borrowed = None if own is not None else sources[self.lenders[name]]
            own = effective = at(self, _HOOK[name], own) if borrowed is None else lent(self, _HOOK[name], borrowed)
        for state in self.kept[name]:
            memory[name, self.layer, state] = own if state == "own" and self.layer > 0 else effective
        return effective, sources

    def _mixed(self, name: Projection, own: Tensor, sources: Mapping[Source, Tensor], memory: Memory) -> Tensor:
        mixer, layers = self.mixers[name]
        weights = mixer.weights(name, self.layer, memory)
        if self.switch.on and hooked(point := getattr(self, f"{_HOOK[name]}_mix")):
            wide = torch.promote_types(own.dtype, torch.float32)
            weights = point(torch.stack([torch.as_tensor(w, dtype=wide, device=own.device) for w in weights])).unbind()
        mixed = [sources[j].detach() if mixer.detaches else sources[j] for j in layers]
        return mix(weights, [*mixed, own])

    def _rotated_key(self, k: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        lender = self.lenders["k"]
        if lender != self.layer and k is memory["k", lender, "effective"]:
            return memory["turned", lender]  # the lender's, turned already
        return rotate(k, turn)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Memory, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Normalised stream [batch, pos, d_model] -> attention's addition to the stream."""
        q, _ = self.project("q", x, memory)
        k, _ = self.project("k", x, memory)
        v, sources = self.project("v", x, memory)
        turned = self._rotated_key(k, turn, memory)
        q, k = at(self, "hook_rot_q", rotate(q, turn)), lent(self, "hook_rot_k", turned)
        keys, values = (k, v) if cache is None else self._extend(cache, k, v, memory)
        if self.attended:
            memory["turned", self.layer] = turned
            for name, tensor in (("rot_q", q), ("rot_k", keys), ("v", values)):
                if name in self.attended:
                    memory[name, self.layer, "cached"] = tensor
        z = self.attend(q, keys, values) if self.joint is None else self.attend_jointly(q, keys, values, memory)
        for shortcut in self.outputs:
            z = shortcut.output(self.layer, z, v, sources, x)
        return self.o_proj(at(self, "hook_z", z).flatten(-2))

    def _extend(self, cache: KeyValueCache, k: Tensor, v: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions; what is borrowed as it is stays where its lender put it."""
        full = []
        for name, new in (("k", k), ("v", v)):
            lender = self.lenders[name]
            borrowed = lender != self.layer and new is memory.get(("stored", name, lender))
            memory["stored", name, self.layer] = new
            full.append(cache.extend(name, self.layer, new, lender=lender, borrowed=borrowed))
        for name in ("rot_k", "v"):
            for j in self.reads.get(name, ()):
                cache.note(memory[name, j, "cached"])
        return full[0], full[1]

    # ---- one softmax -------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head outputs [batch, pos, head, d_head]; statistics and pattern only where a hook asks for them."""
        if self.switch.on and (found := self._observed(q, k, v)) is not None:
            return found
        if k.shape[1] != q.shape[1]:  # a cached past
            return joint_attention([Softmax(1.0, q, [k])], [v])
        grouped = k.shape[-2] != q.shape[-2]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)

    def _observed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Fire what listens to the attention; the head outputs where they came of it."""
        wanted = [point for point in self.statistics if hooked(point)]
        if hooked(self.hook_attn_scores) or hooked(self.hook_pattern):
            z, scores, pattern = self._eager(q, k, v)
            if wanted:  # of the pattern in use, whatever a hook made of it
                self._show(wanted, statistics_of(scores, pattern))
            return z
        if not wanted:
            return None
        # autocast leaves q and k wider than v; attention runs in v's type
        q, k = q.to(v.dtype), k.to(v.dtype)
        if k.shape[1] != q.shape[1]:
            self._show(wanted, joint_statistics([Softmax(1.0, q, [k])]))
            return None
        z, statistics = attention_statistics(q, k, v, row_max=hooked(self.hook_row_max))
        self._show(wanted, statistics)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return None if trained else z

    @staticmethod
    def _show(points: list[Point], statistics: AttentionStatistics) -> None:
        for point in points:
            value = getattr(statistics, str(point.name).rsplit("hook_", 1)[-1])
            if point(value) is not value:
                raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the attention")

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = at(self, "hook_attn_scores", causal_scores(q, k))
        pattern = at(self, "hook_pattern", probabilities(scores, q.dtype))
        v = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)
        return torch.einsum("bhqk,bkhd->bqhd", pattern, v), scores, pattern

    # ---- several softmaxes, or one over several layers' keys ---------------------------------------------------------

    def attend_jointly(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """As `attend`, where a shortcut defines the softmaxes."""
        assert self.joint is not None
        read = {
            name: {j: lent(branch, _HOOK[name], memory[name, j, "cached"]) for j, branch in branches.items()}
            for name, branches in self.reads.items()
        }
        softmaxes, values = self.joint.softmaxes(self.layer, q, k, read), [v, *read.get("v", {}).values()]
        if self.switch.on:
            wanted = [point for point in self.statistics if hooked(point)]
            shown: list[Part] = [self, *(part for parts in self.parts for part in parts)]
            quadratic = [getattr(part, name, None) for part in shown for name in _QUADRATIC]
            if any(point is not None and hooked(point) for point in quadratic):
                scores, pattern = patterns(softmaxes, self.parts, self)
                if wanted:
                    self._show(wanted, statistics_of_sets(scores, pattern))
                repeats = q.shape[-2] // v.shape[-2]
                wide = torch.stack([x.repeat_interleave(repeats, dim=-2) for x in values], 1)
                return torch.einsum("bhqsk,bskhd->bqhd", pattern, wide)
            if wanted:
                self._show(wanted, joint_statistics(softmaxes))
        return joint_attention(softmaxes, values)

    def recipe(self) -> Recipe | None:
        """How to rebuild this layer's scores and patterns from cached queries and keys, where they are no single softmax."""
        if self.joint is None:
            return None
        name = lambda part, point: str(getattr(part, f"hook_{point}").name)  # noqa: E731
        return Recipe(
            joint=self.joint,
            layer=self.layer,
            q=name(self, "rot_q"),
            k=name(self, "rot_k"),
            reads={t: {j: name(b, t) for j, b in found.items()} for t, found in self.reads.items() if t != "v"},
            shown=[[(name(p, "attn_scores"), name(p, "pattern")) for p in parts] for parts in self.parts],
            whole=name(self, "pattern"),
        )

    def _projection(self, name: Projection) -> Tensor:
        lender = self.lenders[name]
        if lender == self.layer:
            return getattr(self, _PROJ[name]).weight.T.unflatten(1, (-1, self.config.d_head)).transpose(0, 1)
        whose = f"layer {lender}'s: see blocks.{lender}.attn" if isinstance(lender, int) else f"the table {lender}"
        raise WorkbenchError(f"layer {self.layer} has no W_{name.upper()} of its own; it uses {whose}")

    @property
    def W_Q(self) -> Tensor:  # noqa: N802
        """[head, d_model, d_head]; like keys and values refused where the layer borrows them."""
        return self._projection("q")

    @property
    def W_K(self) -> Tensor:  # noqa: N802
        """[kv_head, d_model, d_head]."""
        return self._projection("k")

    @property
    def W_V(self) -> Tensor:  # noqa: N802
        """[kv_head, d_model, d_head], as projected; coefficients of mixing are not folded in."""
        return self._projection("v")

    @property
    def W_O(self) -> Tensor:  # noqa: N802
        """[head, d_head, d_model]."""
        return self.o_proj.weight.T.unflatten(0, (self.config.n_heads, -1))


_QUADRATIC = ("hook_attn_scores", "hook_pattern")


def patterns(softmaxes: Sequence[Softmax], parts: Sequence[Sequence[Part]], whole: Part) -> tuple[Tensor, Tensor]:
    """(scores of the last softmax, pattern) [batch, head, query, set, pos], shown at the parts' and the whole's points."""
    total: Tensor | None = None
    for softmax, shown in zip(softmaxes, parts, strict=True):
        scores = joint_scores(softmax, 0, softmax.q.shape[1])
        scores = torch.stack([at(p, "hook_attn_scores", s) for p, s in zip(shown, scores.unbind(3), strict=True)], 3)
        pattern = probabilities(scores.flatten(-2), softmax.q.dtype).view_as(scores)
        pattern = torch.stack([at(p, "hook_pattern", x) for p, x in zip(shown, pattern.unbind(3), strict=True)], 3)
        pattern = pattern if softmax.weight == 1.0 else softmax.weight * pattern
        total = pattern if total is None else total + pattern
    assert total is not None
    return scores, at(whole, "hook_pattern", total.squeeze(3)).unsqueeze(3) if len(softmaxes) > 1 else total


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Scores and patterns of a layer whose attention a shortcut defines, from cached rotated queries and keys."""

    joint: Shortcut
    layer: int
    q: str
    k: str
    reads: Mapping[str, Mapping[Source, str]]
    shown: Sequence[Sequence[tuple[str, str]]]  # names of scores and pattern, of each softmax, of each key set
    whole: str

    @property
    def needs(self) -> set[str]:
        """Names of the activations it is made from."""
        return {self.q, self.k, *(n for found in self.reads.values() for n in found.values())}

    @property
    def makes(self) -> set[str]:
        """Names of what it can make."""
        return {self.whole, *(n for names in self.shown for both in names for n in both)}

    def __call__(self, cache: Mapping[str, Tensor], name: str) -> Tensor:
        """[batch, head, query, key], without the batch where the cache has none."""
        single = cache[self.q].ndim == 3
        get = lambda n: cache[n][None] if single else cache[n]  # noqa: E731
        read = {t: {j: get(n) for j, n in found.items()} for t, found in self.reads.items()}
        total: Tensor | float = 0.0
        for softmax, names in zip(
            self.joint.softmaxes(self.layer, get(self.q), get(self.k), read), self.shown, strict=True
        ):
            scores = joint_scores(softmax, 0, softmax.q.shape[1])
            pattern = probabilities(scores.flatten(-2), softmax.q.dtype).view_as(scores)
            for i, both in enumerate(names):
                if name in both:
                    found = (scores, pattern)[both.index(name)][:, :, :, i]
                    return found[0] if single else found
            total = total + softmax.weight * pattern[:, :, :, 0]
        assert isinstance(total, Tensor)
        return total[0] if single else total
