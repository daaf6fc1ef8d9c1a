"""The softmaxes that make a layer's attention, in any architecture, as float32 arrays that need no model.

Most layers have one softmax over their own keys. If a shortcut defines the attention (cross-layer attention, attention
residual), a layer has several softmaxes, or one over the keys of several layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.kernels.attention import attention_statistics
from workbench.kernels.joint import Softmax
from workbench.kernels.pooled import attention_window
from workbench.models.hooked import HookedModel
from workbench.models.joint_attention import Recipe
from workbench.names import NULL
from workbench.prompts.single_pass import array


@dataclass(frozen=True, kw_only=True)
class SoftmaxArrays:
    """One softmax of a layer's attention: weight * softmax(q [K_1; ...] / sqrt(width)), rows normalised by `lse`."""

    weight: float
    queries: np.ndarray
    """Rotated, float32 [T, head, width]."""
    keys: list[np.ndarray]
    """Rotated, float32 [T, kv_head, width], of each set of keys."""
    branches: list[str]
    """Source of the keys: `own`, `first`, `cross`, `cross.<layer>`."""
    lse: np.ndarray
    """Log-sum-exps of the rows, float32 [head, T]."""
    null: np.ndarray | None = None
    """float32 [head, T]: what of each row goes to no token and is missing in its sum; None where nothing does."""

    @classmethod
    def of(cls, softmax: Softmax, branches: list[str], lse: Tensor | None = None) -> SoftmaxArrays:
        """Return a softmax [1, T, ...] as arrays; the log-sum-exp covers all sets of keys."""
        null = None
        if lse is None:
            lse = torch.stack([attention_statistics(softmax.q, k, k)[1].lse for k in softmax.keys]).logsumexp(0)
            if softmax.null is not None:
                logits = softmax.null.to(lse)[:, None]
                lse = torch.logaddexp(lse, logits)
                null = array(softmax.weight * (logits - lse[0]).exp())
        q, *keys = (array(x[0]) for x in (softmax.q, *softmax.keys))
        return cls(weight=float(softmax.weight), queries=q, keys=keys, branches=branches, lse=array(lse[0]), null=null)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.lse)

    def weights(self, head: int, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Return the pattern [query, key] by set of keys; future keys are 0."""
        q, lse = torch.from_numpy(self.queries[None, :, head, None]), torch.from_numpy(self.lse[None, head, None])
        for every in self.keys:
            k = torch.from_numpy(every[None, :, head * every.shape[1] // self.heads, None])
            weights = attention_window(q, k, lse, rows, columns)[0, 0]
            yield weights if self.weight == 1.0 else weights.mul_(self.weight)


@dataclass(frozen=True, kw_only=True)
class PatternArrays:
    """The whole pattern of an observed layer that rotated queries and keys alone do not make: masked, or with sink logits."""

    pattern: np.ndarray
    """float32 [head, T, T]."""
    null: np.ndarray | None
    """float32 [head, T]: what of each row goes to no token and is missing in its sum; None where nothing does."""
    branches: tuple[str, ...] = ("own",)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.pattern)

    def weights(self, head: int, rows: slice, columns: slice) -> Iterator[Tensor]:
        """[query, key]; the future is 0."""
        yield torch.from_numpy(self.pattern[head, rows, columns].copy())

    @classmethod
    def of(cls, layer: int, tensors: Mapping[str, Tensor]) -> PatternArrays:
        """Softmaxes from a layer's activations [1, head, ...] by name."""
        pattern, null = (tensors.get(name) for name in attention_hook_points(layer, ("pattern", NULL)))
        assert pattern is not None
        return cls(pattern=array(pattern[0]), null=None if null is None else array(null[0]))


LayerArrays = SoftmaxArrays | PatternArrays
MOST_BYTES = 2**31
"""Of the whole patterns of a model that are kept for its maps."""


def recipes_of(model: HookedModel) -> dict[int, Recipe]:
    """How to make the attention of the layers that are no single softmax over their own keys."""
    return {recipe.layer: recipe for recipe in model.recipes()}


def attention_hook_points(layer: int, names: Sequence[str]) -> list[str]:
    """Hook points of a layer's attention."""
    return [f"blocks.{layer}.attn.hook_{name}" for name in names]


def needed_points(model: HookedModel, names: Sequence[str], T: int) -> dict[int, list[str]]:
    """Hook points behind every layer's maps: `names` of ordinary layers, else the inputs of the softmaxes.

    An observed layer whose rotated queries and keys do not make its pattern gives the pattern in their place. Raises
    `BadData` in words where it does not show that either, or where patterns of T tokens take more than `MOST_BYTES`.
    """
    recipes, needed, whole = recipes_of(model), dict[int, list[str]](), 0
    for layer in range(model.config.n_layers):
        needed[layer] = sorted(recipes[layer].needs) if layer in recipes else attention_hook_points(layer, names)
        (pattern,) = attention_hook_points(layer, ("pattern",))
        if layer not in recipes and pattern in model.hook_dict and any(n in model.absent for n in needed[layer]):
            kept = [name for name in names if name not in ("rot_q", "rot_k", "lse")]
            kept += [NULL] if attention_hook_points(layer, (NULL,))[0] in model.hook_dict else []
            needed[layer], whole = (
                [pattern, *attention_hook_points(layer, kept)],
                whole + model.config.n_heads * T * T * 4,
            )
        if why := next((model.absent[name] for name in needed[layer] if name in model.absent), None):
            raise BadData(f"this model's attention cannot be drawn: layer {layer} is {why}")
    if whole > MOST_BYTES:
        most = int((MOST_BYTES / whole) ** 0.5 * T)
        raise BadData(
            f"this model's maps are made of whole patterns, {whole / 2**30:.1f} GiB for {T} tokens: give {most} at most"
        )
    return needed


def softmaxes_of(recipe: Recipe, tensors: Mapping[str, Tensor]) -> list[SoftmaxArrays]:
    """The softmaxes of a layer whose attention a shortcut defines, from cached activations by name."""
    return [SoftmaxArrays.of(s, names) for s, names in zip(recipe.softmaxes(tensors), recipe.paths, strict=True)]


def weights_by_keys(
    softmaxes: Sequence[LayerArrays], head: int, queries: range, keys: range
) -> Iterator[tuple[int, str, Tensor]]:
    """(place, branch, weights [query, key]) of every set of keys of every softmax, times the softmax's weight.

    `place` counts the sets of a softmax; the pattern of one place is the sum over softmaxes. The future is 0.
    """
    rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
    for softmax in softmaxes:
        each = zip(softmax.branches, softmax.weights(head, rows, columns), strict=True)
        yield from ((place, branch, weights) for place, (branch, weights) in enumerate(each))
