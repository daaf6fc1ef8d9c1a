"""Attention scores and patterns from queries and keys, and cached activations that rebuild them when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.reference import shares
from workbench.names import QUADRATIC, ByHookName, hook_name


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scaled, masked scores [..., head, query, key] of rotated q [..., pos, head, d_head] and grouped k."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def probabilities(scores: Tensor, dtype: torch.dtype, null: Tensor | None = None) -> Tensor:
    """Return the softmax of scores in `dtype`; `null` has the logits [head] of an additional column."""
    return shares(scores, null).to(dtype)


class RebuiltPatterns(ByHookName[Tensor]):
    """Cached activations; scores and patterns are rebuilt from rotated queries and keys when they are read."""

    recipes: Sequence[Any] = ()
    """One `joint_attention.Recipe` for each layer whose attention a shortcut defines."""

    def with_recipes(self, recipes: Sequence[Any]) -> RebuiltPatterns:
        """Set the recipes and return the cache."""
        self.recipes = recipes
        return self

    def __missing__(self, key: Any) -> Tensor:
        if key not in self:
            raise KeyError(key)
        if (name := hook_name(key)) != key:
            return self[name]
        for recipe in self.recipes:
            if key in recipe.makes:
                return recipe(self, key)
        stem, point = key.rsplit(".", 1)
        q, k = self[f"{stem}.hook_rot_q"], self[f"{stem}.hook_rot_k"]
        scores = causal_scores(q, k)
        return scores if point == "hook_attn_scores" else probabilities(scores, q.dtype)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        key = hook_name(str(key))
        for recipe in self.recipes:
            if key in recipe.makes:
                return recipe.needs <= self.keys()
        stem, _, point = key.rpartition(".")
        return point in QUADRATIC and {f"{stem}.hook_rot_q", f"{stem}.hook_rot_k"} <= self.keys()
