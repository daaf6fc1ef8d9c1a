"""Sizes of value vectors and streams at each layer and position of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.models.hooked import HookedModel
from workbench.observing.observed_model import Observed
from workbench.prompts.single_pass import array, by_layer, float32_or_better, streams
from workbench.prompts.tokens import PromptLike, single_prompt


@dataclass(frozen=True, kw_only=True)
class ValueNorms:
    """Sizes of value vectors and streams; Euclidean norms over all key-value heads, NaN where a layer has no such vector."""

    tokens: list[str]
    own: np.ndarray
    """As projected from the layer's own input [layer, T]."""
    first_part: np.ndarray
    """The first layer's value times its coefficient [layer, T], at the layers that mix or borrow it."""
    effective: np.ndarray
    """What the attention multiplies [layer, T]."""
    cosine: np.ndarray
    """Between own and effective value [layer, T]."""
    stream: np.ndarray
    """[layer + 1, T]: what the blocks read, and what the final norm reads; row 0 is the embedding's in most models."""


@torch.no_grad()
def value_norms(model: HookedModel, prompt: PromptLike) -> ValueNorms:
    """Norms of values and streams at each layer and position, and how far mixing turns the values.

    Costs one run; memory one layer's values. NeuTRENO's pull comes after the attention and is no part of a value.
    """
    prompt = single_prompt(model, prompt)
    T, n_layers, shown = prompt.ids.shape[1], model.config.n_layers, streams(model)
    rows = {n: np.full((n_layers, T), np.nan, np.float32) for n in ("own", "first_part", "effective", "cosine")}
    stream = np.full((n_layers + 1, T), np.nan, dtype=np.float32)
    groups: dict[Any, list[str]] = {("stream", n): [name] for n, name in shown.items()}
    groups |= {n: _value_points(model, n) for n in range(n_layers)}

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        if isinstance(key, tuple):
            stream[key[1]] = _norms(next(iter(tensors.values())))
            return
        for name, row in _of_layer(model, key, tensors).items():
            rows[name][key] = row

    by_layer(model, prompt.ids, groups, reduce)
    return ValueNorms(**rows, tokens=prompt.tokens, stream=stream)


def _value_points(model: HookedModel, layer: int) -> list[str]:
    stem, first = f"blocks.{layer}.attn", _mixed_first(model, layer)
    names = [f"{stem}.hook_v", f"{stem}.own.hook_v", *(first[:2] if first else [])]
    return [n for n in names if n in model.hook_dict]


def _mixed_first(model: HookedModel, layer: int) -> tuple[str, str, int] | None:
    """Hook points of the first layer's values in a layer's mix, of the coefficients, and the index of their coefficient."""
    attn: Any = model.blocks[layer].attn
    names = ("hook_v_mix",) if isinstance(model, Observed) else ("hook_v_mix", "hook_v_weights")
    point = next((getattr(attn, name) for name in names if hasattr(attn, name)), None)
    if point is None:
        return None
    if isinstance(model, Observed):
        points = model.blocks[layer].source_points
        sources = list(points)
    else:
        sources = list(attn.projections["v"].mixed)
        points = {j: module.hook_v for j, module, _ in attn.reads["v"]}
    return (str(points[0].name), str(point.name), sources.index(0)) if 0 in sources else None


def _of_layer(model: HookedModel, layer: int, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    stem, attn = f"blocks.{layer}.attn", model.blocks[layer].attn
    v, own = tensors[f"{stem}.hook_v"], tensors.get(f"{stem}.own.hook_v")
    result = {"effective": _norms(v)}
    if own is not None:
        here = v[0, :, : own.shape[2]]  # where other heads are another layer's
        cosine = torch.cosine_similarity(
            float32_or_better(own[0].flatten(1)), float32_or_better(here.flatten(1)), dim=-1
        )
        result |= {"own": _norms(own), "cosine": array(cosine)}
    if first := _mixed_first(model, layer):
        name, mix, place = first
        weight = tensors[mix][..., place]  # a number, or one of each token [1, T, kv_head]
        result["first_part"] = _norms((weight[..., None] if weight.ndim else weight) * tensors[name])
    elif own is None and not isinstance(model, Observed) and attn.projections["v"].shared_source == 0:
        result["first_part"] = result["effective"]
    return result


def _norms(x: Tensor) -> np.ndarray:
    """[T] of a tensor [1, T, ...]."""
    return array(float32_or_better(x[0].flatten(1)).norm(dim=-1))
