"""Causal attention with grouped key-value heads, whose queries, keys and values may be mixed with, or shared by, other layers.

    X_n = sum over j of w_j X_j + w_n X_n^own for X = Q, K, V, where X_n^own is the projection of the layer's input
    z = softmax(rope(Q) rope(K)^T / sqrt(d_head) + causal mask) V;  out = z W_O

The value residual of ResFormer, V_n = lambda_1 V_1 + lambda_2 V_n^own, is in `Attention.project`: V_1 arrives from layer 0 through
the memory of the forward pass, and `ResFormer.weights` gives the two lambdas. `cross_layer_wiring.py` decides at construction which layers
mix or share. Attention is fused unless a hook needs scores or pattern; statistics are streamed.

`JointAttention` has softmaxes that a shortcut defines, A = sum over c of w_c softmax(q_c [K_1; ...; K_S]^T / sqrt(d_head) + causal mask)
and z = A [V_1; ...; V_S]: cross-layer attention has one over several key sets, the attention residual several over one key set each,
sink logits one with an additional column. A `Recipe` rebuilds its scores and patterns from cached rotated queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.hook_names import NULL, QUADRATIC, STATISTICS, path_name
from workbench.kernels.attention_and_its_statistics import AttentionStatistics, attention_statistics
from workbench.kernels.full_pattern_reference import statistics_of
from workbench.kernels.joint_and_null_softmax import (
    Softmax,
    joint_attention,
    joint_scores,
    joint_statistics,
    statistics_of_sets,
)
from workbench.models.cross_layer_wiring import ATTENDED, LayerWiring
from workbench.models.generation import KeyValueCache
from workbench.models.hook_points import HookedModule, HookPoint, is_hooked
from workbench.models.layers import Linear, Rotation, rotate
from workbench.models.patterns_and_gradients import causal_scores, probabilities
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight, mix

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix

_PROJECTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
POINTS = ("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", *STATISTICS)


class Attention(HookedModule):
    """The attention of one layer: softmax(rope(Q) rope(K)^T / sqrt(d_head) + causal mask) V W_O, changed by shortcuts.

    Submodules have the hook points of tensors before they are mixed: `own` (projected by this layer), `source.<j>` (layer j's
    tensor as it arrives here), `table` (looked up by token id).
    """

    def __init__(self, config: ModelConfig, wiring: LayerWiring) -> None:
        super().__init__()
        self.config, self.wiring, self.layer = config, wiring, wiring.layer
        self.projections = wiring.projections
        self.projected = {n: p for n, p in self.projections.items() if p.projects}
        for name, projection in self.projected.items():
            heads = projection.own_heads or (config.n_heads if name == "q" else config.n_key_value_heads)
            setattr(self, _PROJECTION[name], Linear(config.d_model, heads * config.d_head, bias=False))
        self.o_proj = Linear(config.d_model, config.d_model, bias=False)
        self.outputs, self.gates = wiring.outputs, wiring.gates
        # of every tensor that is read: (source, module with its hook point, key in the memory)
        self.reads: dict[str, list[tuple[Source, HookedModule, Any]]] = {}
        # of every tensor that later layers read: (key in the memory, whether before mixing); layer 0 mixes nothing
        self.stores: dict[str, list[tuple[Any, bool]]] = {}
        for name, projection in self.projections.items():
            self.reads[name] = [(j, self.source_module(j), (name, j, s)) for j, s in projection.sources.items()]
            for _, module, _ in self.reads[name]:
                module.add_hook_points(name)
            states = [s for n, s in sorted(wiring.stored) if n == name and s != "cached"]
            apart = self.layer > 0 and not projection.own_heads
            self.stores[name] = [((name, self.layer, s), s == "own" and apart) for s in states]
        self.stores_attended = tuple(n for n in ATTENDED if (n, "cached") in wiring.stored)
        self.shows_own = tuple(n for n, p in self.projected.items() if n == "v" or p.sources)
        if self.shows_own:
            self.own = HookedModule()
            self.own.add_hook_points(*self.shows_own)
        self.coefficients = wiring.coefficients()
        # hook points of the coefficients, own last: [source], or for each token [batch, pos, kv_head, source]
        by_token = {n for n, p in self.projections.items() if p.mixer is not None and p.mixer.weighs_tokens}
        self.weight_points = {n: f"hook_{n}_{'weights' if n in by_token else 'mix'}" for n in self.coefficients}
        self.add_hook_points(*(point.removeprefix("hook_") for point in self.weight_points.values()))
        self.absent = self.missing_points()
        self.add_hook_points(*(n for n in POINTS if n not in self.absent))
        self.statistics = tuple(getattr(self, f"hook_{n}") for n in STATISTICS if n not in self.absent)

    def missing_points(self) -> dict[str, str]:
        """Return the hook points that this layer lacks, with the reason."""
        return {}

    def source_module(self, source: Source) -> HookedModule:
        """Return the submodule for the hook points of a source: `source.<layer>`, or `table`."""
        if isinstance(source, str):
            if not hasattr(self, "table"):
                self.table = HookedModule()
            return self.table
        if not hasattr(self, "source"):
            self.source = nn.ModuleDict()
        modules: Any = self.source
        if str(source) not in modules:
            modules[str(source)] = HookedModule()
        return modules[str(source)]

    def forward(self, x: Tensor, rotation: Rotation, memory: Memory, cache: KeyValueCache | None = None) -> Tensor:
        """Map the normalised stream [batch, pos, d_model] to the attention output, which is added to the stream."""
        q, _ = self.project("q", x, memory)
        k, _ = self.project("k", x, memory)
        v, sources = self.project("v", x, memory)
        shared_key = self.projections["k"].shared_source
        if shared_key is not None and k is memory["k", shared_key, "effective"]:  # no hook changed it
            rotated = memory["rotated", shared_key]
        else:
            rotated = rotate(k, rotation)
        q, k = self.run_hook("hook_rot_q", rotate(q, rotation)), self.run_hook_on_copy("hook_rot_k", rotated)
        keys, values = (k, v) if cache is None else self._extend(cache, k, v, memory)
        if self.stores_attended:
            memory["rotated", self.layer] = rotated
            attended = {"rot_q": q, "rot_k": keys, "v": values}
            for tensor in self.stores_attended:
                memory[tensor, self.layer, "cached"] = attended[tensor]
        z = self.attend(q, keys, values, memory)
        if self.outputs:
            weights = self.constants("output", z)
            for shortcut in self.outputs:
                z = shortcut.output(self.layer, z, v, sources, weights)
        for shortcut in self.gates:
            z = shortcut.gate(self.layer, z, v, x)
        return self.o_proj(self.run_hook("hook_z", z).flatten(-2))

    def project(self, name: Projection, x: Tensor, memory: Memory) -> tuple[Tensor, dict[Source, Tensor]]:
        """Return the layer's queries, keys or values X_n [batch, pos, head, d_head], and the X_j that it reads.

        A ResFormer layer mixes its values, V_n = lambda_1 V_1 + lambda_2 V_n^own; an SVFormer layer shares them, V_n = V_1.
        """
        wiring, hook = self.projections[name], f"hook_{name}"
        mixer = wiring.mixer
        sources: dict[Source, Tensor] = {}  # X_j, such as V_1
        for j, module, key in self.reads[name]:
            source = memory[key] if mixer is None else mixer.arriving(memory[key])
            sources[j] = module.run_hook_on_copy(hook, source)
        own: Any = None  # X_n^own
        if name in self.projected:
            own = getattr(self, _PROJECTION[name])(x).view(*x.shape[:2], -1, self.config.d_head)
            if name == "v":
                for shortcut in self.wiring.own_values:
                    own = shortcut.own_value(self.layer, own, x, memory["past"])
            if name in self.shows_own:
                own = self.own.run_hook(hook, own)

        if mixer is not None:  # X_n = sum over j of w_j X_j + w_n X_n^own
            terms = [sources[k].detach() if mixer.detaches else sources[k] for k in wiring.mixed]
            terms += [] if own is None else [own]
            weights = self.hooked_weights(name, mixer.weights(name, self.layer, memory, x), terms[-1])
            if mixer.weighs_tokens:
                weights = [w[..., None].to(terms[-1].dtype) if isinstance(w, Tensor) else w for w in weights]
            effective = self.run_hook(hook, mix(weights, terms))
        elif (shared := wiring.shared_source) is not None and own is None:  # X_n = X_j
            effective = self.run_hook_on_copy(hook, sources[shared])
        elif shared is not None:  # the first heads of X_n^own, the other heads of X_j
            joined = torch.cat((own, sources[shared][:, :, wiring.own_heads :]), 2)
            effective = self.run_hook_on_copy(hook, joined)
            # an unchanged X_j is in the key-value cache already
            is_cached = sources[shared] is memory[name, shared, "effective"]
            memory["joined", name, self.layer] = effective is joined and is_cached
        else:  # X_n = X_n^own
            own = effective = self.run_hook(hook, own)

        for key, before_mixing in self.stores[name]:  # for later layers: V_1 of layer 0, for example
            memory[key] = own if before_mixing and own is not None else effective
        return effective, sources

    def constants(self, path: str, like: Tensor) -> Mapping[str, Weight]:
        """Return the coefficients of a path, `output` or `pattern`, by the name of what they multiply, after their hooks."""
        values = self.wiring.constants[path]
        if not values or not self.hook_state.enabled:
            return values
        return dict(zip(values, self.hooked_weights(path, list(values.values()), like), strict=True))

    def hooked_weights(self, path: str, weights: Sequence[Weight], like: Tensor) -> Sequence[Weight]:
        """Return coefficients, own last, after the hooks at their hook point."""
        if not self.hook_state.enabled or not is_hooked(point := getattr(self, self.weight_points[path])):
            return weights
        wide = torch.promote_types(like.dtype, torch.float32)
        each = torch.broadcast_tensors(*(torch.as_tensor(w, dtype=wide, device=like.device) for w in weights))
        return point(torch.stack(each, -1)).unbind(-1)

    def _extend(self, cache: KeyValueCache, k: Tensor, v: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions; an unchanged shared tensor stays in its source layer's cache entry."""
        full = []
        tensors: list[tuple[Projection, Tensor]] = [("k", k), ("v", v)]
        for name, new in tensors:
            source, own = self.projections[name].shared_source, self.projections[name].own_heads
            shared = source is not None and new is memory.get(("new", name, source))
            shared = memory["joined", name, self.layer] if own else shared
            memory["new", name, self.layer] = new
            full.append(cache.extend(name, self.layer, new, source=source, shared=shared, own_heads=own))
        for tensor in ("rot_k", "v"):
            for j in self.wiring.attended.get(tensor, ()):
                cache.note(memory[tensor, j, "cached"])
        return full[0], full[1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Return the head outputs [batch, pos, head, d_head]; form statistics and pattern only if a hook needs them."""
        if self.hook_state.enabled:
            wanted = self.wanted_statistics()
            if is_hooked(self.hook_attn_scores) or is_hooked(self.hook_pattern):
                scores = self.run_hook("hook_attn_scores", causal_scores(q, k))
                pattern = self.run_hook("hook_pattern", probabilities(scores, q.dtype))
                if wanted:  # of the pattern after its hooks
                    self.show_statistics(wanted, statistics_of(scores, pattern))
                return torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2))
            if wanted:
                typed_q, typed_k = q.to(v.dtype), k.to(v.dtype)  # autocast leaves them wider than v
                if k.shape[1] != q.shape[1]:
                    self.show_statistics(wanted, joint_statistics([Softmax(1.0, typed_q, [typed_k])]))
                else:
                    z, statistics = attention_statistics(typed_q, typed_k, v, row_max=is_hooked(self.hook_row_max))
                    self.show_statistics(wanted, statistics)
                    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
                        return z
        if k.shape[1] != q.shape[1]:  # a cached past
            return joint_attention([Softmax(1.0, q, [k])], [v])
        grouped = k.shape[-2] != q.shape[-2]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)

    def wanted_statistics(self) -> list[HookPoint]:
        return [point for point in self.statistics if is_hooked(point)]

    @staticmethod
    def show_statistics(points: Sequence[HookPoint], statistics: AttentionStatistics) -> None:
        """Run the hooks of statistics; raise `WorkbenchError` if one returns another value."""
        for point in points:
            value = getattr(statistics, str(point.name).rsplit("hook_", 1)[-1])
            if point(value) is not value:
                raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the attention")

    def _weight(self, name: Projection) -> Tensor:
        source = self.projections[name].shared_source
        if source is None:
            weight: Tensor = getattr(self, _PROJECTION[name]).weight
            return weight.T.unflatten(1, (-1, self.config.d_head)).transpose(0, 1)
        whose = f"layer {source}'s: see blocks.{source}.attn" if isinstance(source, int) else f"the table {source}"
        raise WorkbenchError(f"layer {self.layer} has no W_{name.upper()} of its own; it uses {whose}")

    @property
    def W_Q(self) -> Tensor:  # noqa: N802
        """[head, d_model, d_head]; W_Q, W_K and W_V raise `WorkbenchError` if the layer uses a shared source."""
        return self._weight("q")

    @property
    def W_K(self) -> Tensor:  # noqa: N802
        """[kv_head, d_model, d_head]."""
        return self._weight("k")

    @property
    def W_V(self) -> Tensor:  # noqa: N802
        """[kv_head, d_model, d_head], as projected; coefficients of mixing are not folded in."""
        return self._weight("v")

    @property
    def W_O(self) -> Tensor:  # noqa: N802
        """[head, d_head, d_model]."""
        return self.o_proj.weight.T.unflatten(0, (self.config.n_heads, -1))

    def _circuit(self, left: Tensor, right: Tensor) -> FactoredMatrix:
        """Return a product of two weights per query head; raise `WorkbenchError` if a projection covers some heads only."""
        from transformer_lens import FactoredMatrix

        heads, groups = self.config.n_heads, self.config.n_key_value_heads
        short = next((w for w in (left, right) if len(w) not in (heads, groups)), None)
        if short is not None:
            few = f"{len(short)} of {groups} key-value heads"
            raise WorkbenchError(f"layer {self.layer} projects {few}; the others are shared")
        left, right = (w.repeat_interleave(heads // len(w), 0) for w in (left, right))
        return FactoredMatrix(left, right)

    @property
    def OV(self) -> FactoredMatrix:  # noqa: N802
        """TransformerLens' circuit W_V W_O [head, d_model, d_model] of this layer's own values; coefficients of mixing are not included."""
        return self._circuit(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:  # noqa: N802
        """TransformerLens' circuit W_Q W_K^T [head, d_model, d_model], without the rotation and norms of queries and keys."""
        return self._circuit(self.W_Q, self.W_K.mT)


class JointAttention(Attention):
    """Attention with softmaxes that a shortcut defines; their hook points are in `source.<j>` and `own`, or in `cross`."""

    def __init__(self, config: ModelConfig, wiring: LayerWiring) -> None:
        super().__init__(config, wiring)
        layers = sorted({j for js in wiring.attended.values() for j in js if isinstance(j, int)})
        modules: dict[Source, HookedModule] = {}
        for j in layers:
            if self.joint.branch == "source":
                modules[j] = self.source_module(j)
            elif len(layers) == 1:
                self.cross: Any = HookedModule()
                modules[j] = self.cross
            else:
                self.cross = getattr(self, "cross", None) or nn.ModuleDict()
                modules[j] = self.cross[str(j)] = HookedModule()
        # the layers whose rotated queries, rotated keys and values the softmaxes read, and the modules of their hook points
        attended = {name: {j: modules[j] for j in js} for name, js in wiring.attended.items()}
        self.attended: dict[str, dict[Source, HookedModule]] = attended
        for name, js in self.attended.items():
            for module in js.values():
                module.add_hook_points(name)
        # for each softmax and key set: the module with the hook points of its scores and pattern
        self.key_sets: list[list[HookedModule]] = [[self]]
        if self._kind == "mixture":
            self.own = getattr(self, "own", None) or HookedModule()
            self.key_sets = [[module] for module in (*modules.values(), self.own)]
        elif self._kind == "sets":
            self.key_sets = [[self, *modules.values()]]
        for module in (module for modules in self.key_sets for module in modules if module is not self):
            module.add_hook_points("attn_scores", "pattern")
        if self._kind == "null":
            self.add_hook_points(NULL)
            self.statistics += (getattr(self, f"hook_{NULL}"),)

    @property
    def joint(self) -> Shortcut:
        """The shortcut; its parameters belong to the model, not to this layer."""
        assert self.wiring.joint is not None
        return self.wiring.joint

    @property
    def _kind(self) -> str:
        return self.joint.attends(self.layer)

    def missing_points(self) -> dict[str, str]:
        if self._kind != "mixture":
            return {}
        layers = {j for js in self.wiring.attended.values() for j in js}
        names = ", ".join(f"{self.joint.branch}.{j}" for j in layers)
        where = f"{names} and own hook_attn_scores are those of the {len(layers) + 1} softmaxes"
        return {
            "lse": f"the pattern is a weighted sum of softmaxes, which has no log-sum-exp; {where}",
            "attn_scores": f"the pattern is a weighted sum of softmaxes, not the softmax of any scores; {where}",
        }

    def attend(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        read = {
            name: {j: module.run_hook_on_copy(f"hook_{name}", memory[name, j, "cached"]) for j, module in js.items()}
            for name, js in self.attended.items()
        }
        softmaxes = self.joint.softmaxes(self.layer, q, k, read, self.constants("pattern", q))
        values = [v, *read.get("v", {}).values()]
        if self.hook_state.enabled:
            wanted = self.wanted_statistics()
            modules = [self, *(module for modules in self.key_sets for module in modules)]
            squares = [getattr(module, name, None) for module in modules for name in QUADRATIC]
            if any(point is not None and is_hooked(point) for point in squares):
                total: Tensor | None = None
                for softmax, modules in zip(softmaxes, self.key_sets, strict=True):
                    scores = _run_hooks("hook_attn_scores", modules, joint_scores(softmax, 0, q.shape[1]))
                    pattern = probabilities(scores.flatten(-2), softmax.q.dtype, softmax.null).view_as(scores)
                    pattern = _run_hooks("hook_pattern", modules, pattern)
                    pattern = pattern if softmax.weight == 1.0 else softmax.weight * pattern
                    total = pattern if total is None else total + pattern
                assert total is not None
                if len(softmaxes) > 1:
                    pattern = self.run_hook("hook_pattern", total.squeeze(3)).unsqueeze(3)
                if wanted:
                    self.show_statistics(wanted, statistics_of_sets(scores, pattern, softmaxes[-1].null))
                repeats = q.shape[-2] // v.shape[-2]
                wide = torch.stack([x.repeat_interleave(repeats, dim=-2) for x in values], 1)
                return torch.einsum("bhqsk,bskhd->bqhd", pattern, wide)
            if wanted:
                self.show_statistics(wanted, joint_statistics(softmaxes))
        return joint_attention(softmaxes, values)

    def recipe(self) -> Recipe:
        return Recipe(self)


def _run_hooks(name: str, modules: Sequence[HookedModule], squares: Tensor) -> Tensor:
    """Run the hooks on scores or patterns [batch, head, query, set, pos], for each set at its module's hook point."""
    return torch.stack([m.run_hook(name, x) for m, x in zip(modules, squares.unbind(3), strict=True)], 3)


class Recipe:
    """Rebuilds a layer's scores and patterns from cached rotated queries and keys; it does not keep the model alive."""

    def __init__(self, attn: JointAttention) -> None:
        def name(module: HookedModule, point: str) -> str:
            return str(getattr(module, f"hook_{point}").name)

        self.joint, self.layer = attn.joint, attn.layer
        self.q, self.k, self.total = (name(attn, point) for point in ("rot_q", "rot_k", "pattern"))
        reads = ((tensor, modules) for tensor, modules in attn.attended.items() if tensor != "v")
        self.reads = {tensor: {j: name(m, tensor) for j, m in modules.items()} for tensor, modules in reads}
        # names of scores and pattern, for each softmax and key set
        self.shown = [[(name(m, "attn_scores"), name(m, "pattern")) for m in modules] for modules in attn.key_sets]
        self.coefficients = attn.coefficients.get("pattern", ())  # what the entries of `weights` multiply
        self.weights = name(attn, "pattern_mix") if self.coefficients else ""

    @property
    def needs(self) -> set[str]:
        """Names of the activations that it reads."""
        weights = {self.weights} if self.weights else set()
        return {self.q, self.k, *(n for names in self.reads.values() for n in names.values())} | weights

    @property
    def makes(self) -> set[str]:
        """Names of the scores and patterns that it makes."""
        return {self.total, *(n for names in self.shown for both in names for n in both)}

    @property
    def paths(self) -> list[list[str]]:
        """The source of the keys, as `own`, `first`, `cross.2`, for each softmax and key set."""
        return [[path_name(pattern) for _, pattern in names] for names in self.shown]

    def softmaxes(self, cache: Mapping[str, Tensor]) -> list[Softmax]:
        """Return the layer's softmaxes from cached activations, with or without a batch."""
        get = lambda n: cache[n][None] if cache[n].ndim == 3 else cache[n]  # noqa: E731
        read = {t: {j: get(n) for j, n in names.items()} for t, names in self.reads.items()}
        values = cache[self.weights].unbind() if self.weights else ()
        weights: dict[str, Weight] = dict(zip(self.coefficients, values, strict=True))
        return self.joint.softmaxes(self.layer, get(self.q), get(self.k), read, weights)

    @torch.no_grad()
    def __call__(self, cache: Mapping[str, Tensor], name: str) -> Tensor:
        """Return scores or a pattern [batch, head, query, key]; without the batch if the cache has none."""
        single = cache[self.q].ndim == 3
        softmaxes = self.softmaxes(cache)
        total: Tensor | float = 0.0
        for softmax, names in zip(softmaxes, self.shown, strict=True):
            scores = joint_scores(softmax, 0, softmax.q.shape[1])
            pattern = probabilities(scores.flatten(-2), softmax.q.dtype, softmax.null).view_as(scores)
            for i, both in enumerate(names):
                if name in both:
                    result = (scores, pattern)[both.index(name)][:, :, :, i]
                    return result[0] if single else result
            total = total + softmax.weight * pattern[:, :, :, 0]
        assert isinstance(total, Tensor)
        return total[0] if single else total
