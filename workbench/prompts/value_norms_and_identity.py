"""Sizes of a prompt's value vectors and streams, and how well they name their own token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import refuse_unknown
from workbench.hook_names import ACTIVATIONS
from workbench.interventions.token_ranks import token_tables, tokens_ahead
from workbench.metrics.base import wide
from workbench.models.hooked import HookedModel
from workbench.observing.observed_model import Observed
from workbench.prompts.prompt import PromptLike, array, by_layer, chosen_positions, single_prompt, streams


@dataclass(frozen=True, kw_only=True)
class ValueNorms:
    """Sizes of value vectors and streams; Euclidean norms over all key-value heads, NaN where a layer has no such vector."""

    tokens: list[str]
    own: np.ndarray  # as projected from the layer's own input [layer, T]
    # the first layer's value times its coefficient [layer, T], at the layers that mix or borrow it
    first_part: np.ndarray
    effective: np.ndarray  # what the attention multiplies [layer, T]
    cosine: np.ndarray  # between own and effective value [layer, T]
    # [layer + 1, T]: what the blocks read, and what the final norm reads; row 0 is the embedding's in most models
    stream: np.ndarray


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
    for n in range(n_layers):
        names = [f"blocks.{n}.attn.hook_v", f"blocks.{n}.attn.own.hook_v", *(_mixed_first(model, n) or ())[:2]]
        groups[n] = [name for name in names if name in model.hook_dict]

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        if isinstance(key, tuple):
            stream[key[1]] = _norms(next(iter(tensors.values())))
            return
        stem, attn = f"blocks.{key}.attn", model.blocks[key].attn
        v, own = tensors[f"{stem}.hook_v"], tensors.get(f"{stem}.own.hook_v")
        rows["effective"][key] = _norms(v)
        if own is not None:
            here = v[0, :, : own.shape[2]]  # where other heads are another layer's
            one, other = (wide(x.flatten(1)) for x in (own[0], here))
            rows["own"][key], rows["cosine"][key] = _norms(own), array(torch.cosine_similarity(one, other, dim=-1))
        if first := _mixed_first(model, key):
            name, mix, place = first
            weight = tensors[mix][..., place]  # a number, or one of each token [1, T, kv_head]
            rows["first_part"][key] = _norms((weight[..., None] if weight.ndim else weight) * tensors[name])
        elif own is None and not isinstance(model, Observed) and attn.projections["v"].shared_source == 0:
            rows["first_part"][key] = rows["effective"][key]

    by_layer(model, prompt.ids, groups, reduce)
    return ValueNorms(**rows, tokens=prompt.tokens, stream=stream)


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


def _norms(x: Tensor) -> np.ndarray:
    """[T] of a tensor [1, T, ...]."""
    return array(wide(x[0].flatten(1)).norm(dim=-1))


SITES = ("stream", "own_v", "v")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """How well each vector's nearest table row names its own token."""

    positions: np.ndarray  # int64 [pos], the positions that were read
    tokens: list[str]  # [pos], the prompt's tokens there
    reciprocal_rank: dict[str, np.ndarray]
    """Of each site `stream`, `own_v`, `v`: 1 / rank of the true token, float32 [layer, pos], NaN where a layer lacks it.

    1 where the true token is first. Streams have L + 1 rows: what the blocks read, and what the final norm reads.
    """
    chance: float  # expected 1 / rank of a token drawn at random


@torch.no_grad()
def token_identity(
    model: HookedModel, prompt: PromptLike, *, sites: Sequence[str] = SITES, positions: slice | None = None
) -> Identity:
    """Return the rank of every position's own token by cosine, among embeddings (streams) or the first layer's values
    (values).

    The experiment `nearest_embedding` uses the same measure. It needs no training. Costs one run, one run of the whole
    vocabulary for the table of values, and O(pos d_vocab width) in float64 for each layer and site. Select `positions` of
    long prompts. Raises `UnknownName` for another site.
    """
    prompt = single_prompt(model, prompt)
    where, n_layers = chosen_positions(prompt.ids.shape[1], positions), model.config.n_layers
    for site in sites:
        refuse_unknown("site", site, SITES)
    places = {("stream", n): name for n, name in streams(model).items()}
    places |= {(s, n): ACTIVATIONS[s].hook.format(layer=n) for s in SITES[1:] for n in range(n_layers)}
    tables = token_tables(model, sites)
    places = {(s, n): name for (s, n), name in places.items() if s in tables and name in model.hook_dict}
    ranks = {s: np.full((n_layers + (s == "stream"), len(where)), np.nan, np.float32) for s in sites}
    true = prompt.ids[:, where.start : where.stop]

    def reduce(key: tuple[str, int], tensors: dict[str, Tensor]) -> None:
        site, layer = key
        x = next(iter(tensors.values())).flatten(2)[:, where.start : where.stop]
        ranks[site][layer] = array(1 / (1 + tokens_ahead(x, tables[site], true)[0].double()))

    by_layer(model, prompt.ids, {key: [name] for key, name in places.items()}, reduce)
    vocabulary = model.config.d_vocab
    return Identity(
        positions=np.arange(where.start, where.stop), tokens=prompt.strings(true[0].tolist()), reciprocal_rank=ranks,
        chance=sum(1 / rank for rank in range(1, vocabulary + 1)) / vocabulary,
    )  # fmt: skip
