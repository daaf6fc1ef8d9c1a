"""Attention by several softmaxes, or by one with more columns than the layer's own keys.

    A = sum over c of w_c softmax(q_c [K_1; ...; K_S]^T / sqrt(d_head) + causal mask);  z = A [V_1; ...; V_S]

A shortcut defines the softmaxes (`Shortcut.softmaxes`): cross-layer attention has one over several key sets, the attention
residual several over one key set each, sink logits one with an additional column. The kernel (`kernels/joint.py`) forms no T x T
array. Scores and patterns are formed for hooks only; a `Recipe` rebuilds them from cached rotated queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.kernels.joint import Softmax, joint_attention, joint_scores, joint_statistics, statistics_of_sets
from workbench.models.activations import probabilities
from workbench.models.attention import Attention
from workbench.models.hook_points import HookedModule, is_hooked
from workbench.models.shortcut import Memory, Shortcut, Source, Weight
from workbench.models.wiring import LayerWiring
from workbench.names import NULL, QUADRATIC, path_name


class JointAttention(Attention):
    """Attention with softmaxes that a shortcut defines; their hook points are in `source.<j>` and `own`, or in `cross`."""

    def __init__(self, config: ModelConfig, wiring: LayerWiring) -> None:
        super().__init__(config, wiring)
        layers = sorted({j for js in wiring.attended.values() for j in js if isinstance(j, int)})
        modules: dict[Source, HookedModule] = {j: self._module(j, len(layers)) for j in layers}
        # the layers whose rotated queries, rotated keys and values the softmaxes read, and the modules of their hook points
        self.attended: dict[str, dict[Source, HookedModule]] = {
            name: {j: modules[j] for j in js} for name, js in wiring.attended.items()
        }
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

    def _module(self, layer: int, count: int) -> HookedModule:
        if self.joint.branch == "source":
            return self.source_module(layer)
        if count == 1:
            self.cross: Any = HookedModule()
            return self.cross
        self.cross = getattr(self, "cross", None) or nn.ModuleDict()
        self.cross[str(layer)] = HookedModule()
        return self.cross[str(layer)]

    def missing_points(self) -> dict[str, str]:
        """Return the hook points that a weighted sum of softmaxes lacks: it has no scores."""
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
        """Return the head outputs [batch, pos, head, d_head] of the shortcut's softmaxes."""
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
                scores, pattern = self._patterns(softmaxes)
                if wanted:
                    self.show_statistics(wanted, statistics_of_sets(scores, pattern, softmaxes[-1].null))
                repeats = q.shape[-2] // v.shape[-2]
                wide = torch.stack([x.repeat_interleave(repeats, dim=-2) for x in values], 1)
                return torch.einsum("bhqsk,bskhd->bqhd", pattern, wide)
            if wanted:
                self.show_statistics(wanted, joint_statistics(softmaxes))
        return joint_attention(softmaxes, values)

    def _patterns(self, softmaxes: Sequence[Softmax]) -> tuple[Tensor, Tensor]:
        """Return (scores of the last softmax, pattern) [batch, head, query, set, pos] after their hooks."""
        total: Tensor | None = None
        for softmax, modules in zip(softmaxes, self.key_sets, strict=True):
            scores = joint_scores(softmax, 0, softmax.q.shape[1])
            scores = _run_hooks("hook_attn_scores", modules, scores)
            pattern = probabilities(scores.flatten(-2), softmax.q.dtype, softmax.null).view_as(scores)
            pattern = _run_hooks("hook_pattern", modules, pattern)
            pattern = pattern if softmax.weight == 1.0 else softmax.weight * pattern
            total = pattern if total is None else total + pattern
        assert total is not None
        return scores, self.run_hook("hook_pattern", total.squeeze(3)).unsqueeze(3) if len(softmaxes) > 1 else total

    def recipe(self) -> Recipe:
        """Return the recipe that rebuilds this layer's scores and patterns."""
        name = lambda module, point: str(getattr(module, f"hook_{point}").name)  # noqa: E731
        return Recipe(
            joint=self.joint,
            layer=self.layer,
            q=name(self, "rot_q"),
            k=name(self, "rot_k"),
            reads={t: {j: name(m, t) for j, m in js.items()} for t, js in self.attended.items() if t != "v"},
            shown=[[(name(m, "attn_scores"), name(m, "pattern")) for m in modules] for modules in self.key_sets],
            total=name(self, "pattern"),
            coefficients=self.coefficients.get("pattern", ()),
            weights=name(self, "pattern_mix") if "pattern" in self.coefficients else "",
        )


def _run_hooks(name: str, modules: Sequence[HookedModule], squares: Tensor) -> Tensor:
    """Run the hooks on scores or patterns [batch, head, query, set, pos], for each set at its module's hook point."""
    return torch.stack([m.run_hook(name, x) for m, x in zip(modules, squares.unbind(3), strict=True)], 3)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rebuilds a layer's scores and patterns from cached rotated queries and keys; it does not keep the model alive."""

    joint: Shortcut
    layer: int
    q: str
    k: str
    reads: Mapping[str, Mapping[Source, str]]
    shown: Sequence[Sequence[tuple[str, str]]]  # names of scores and pattern, for each softmax and key set
    total: str  # name of the sum of the softmaxes' patterns
    coefficients: Sequence[str]  # what the entries of `weights`, a name too, multiply
    weights: str

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
