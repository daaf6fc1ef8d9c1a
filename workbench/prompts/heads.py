"""The attention of all heads of a model in one prompt, from one run: pictures, entropy, effective keys, sinks.

    heads = attention_overview(model, ids)

No T x T array is made. If a layer also attends to other layers' keys, received attention is summed over all sets of keys. If
patterns are mixed, it is the value of the mixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.kernels.joint import joint_statistics
from workbench.kernels.pooled import bucket_edges, pooled_attention, pooled_maximum
from workbench.metrics.attention import effective_keys, null_mass, row_entropy, sink_mass
from workbench.metrics.base import METRICS
from workbench.models.hooked import HookedModel
from workbench.names import NULL
from workbench.prompts.attention_maps import STRIP, AttentionInputs, Pool, attention_map, check_pool
from workbench.prompts.single_pass import array, by_layer
from workbench.prompts.softmaxes import (
    LayerArrays,
    PatternArrays,
    SoftmaxArrays,
    attention_hook_points,
    needed_points,
    recipes_of,
    softmaxes_of,
    weights_by_keys,
)
from workbench.prompts.tokens import PromptLike, single_prompt

READ = ("rot_q", "rot_k", "row_entropy", "sink")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Pictures and numbers of all heads."""

    tiles: np.ndarray
    """Pooled attention [layer, head, query bucket, key bucket]; the future is NaN."""
    edges: list[int]
    """First position of each bucket, and T."""
    statistics: pd.DataFrame
    """A row for each head: layer, head, row_entropy (nats), normalised_entropy, effective_keys, sink_mass; null_mass where there is one."""
    uniform: dict[str, float]
    """The same statistics under uniform causal attention of this length."""


@torch.no_grad()
def attention_overview(
    model: HookedModel, prompt: PromptLike, buckets: int = 64, *, pool: Pool = "mean",
    progress: Callable[[int, int], None] | None = None,
) -> Overview:  # fmt: skip
    """All layers and heads at once, from one run: pooled pictures, entropy, effective keys, sinks.

    `pool`: a cell of the pictures is the mean over its queries of the attention to its keys (rows sum to 1). With `max` it
    is the largest weight, which shows stripes that a mean hides. Costs one run and about two more passes over the
    attention: time O(L H T^2 d_head), memory O(T d_model) and the pictures. Raises `BadData` for a prompt that cannot be
    read and where an observed model shows no attention, `UnknownName` for another pool. `progress` is called with
    (layers done, all), and may raise to stop.
    """
    check_pool(pool)
    ids, recipes = single_prompt(model, prompt).ids, recipes_of(model)
    T, n_layers = ids.shape[1], model.config.n_layers
    tiles: dict[int, np.ndarray] = {}
    tables: dict[int, pd.DataFrame] = {}

    def reduce(layer: int, tensors: dict[str, Tensor]) -> None:
        rot_q, rot_k, entropy, sink, null = (tensors.get(name) for name in attention_hook_points(layer, (*READ, NULL)))
        if layer in recipes and len(many := recipes[layer].softmaxes(tensors)) == len(many[0].keys) == 1:
            found = joint_statistics(many)
            entropy, sink, null = found.row_entropy, found.sink, found.null
            tiles[layer] = _tiles(many[0].q, many[0].keys[0], buckets, pool, found.lse)
        elif layer in recipes:
            softmaxes = softmaxes_of(recipes[layer], tensors)
            entropy, sink = _statistics(softmaxes)
            tiles[layer] = _drawn(softmaxes, T, buckets, pool)
        elif rot_q is None or rot_k is None:
            tiles[layer] = _drawn([PatternArrays.of(layer, tensors)], T, buckets, pool)
        else:
            tiles[layer] = _tiles(rot_q, rot_k, buckets, pool)
        assert entropy is not None
        assert sink is not None
        tables[layer] = _per_head(layer, entropy, sink, null)
        if progress is not None:
            progress(len(tiles), n_layers)

    by_layer(model, ids, needed_points(model, READ, T), reduce)
    uniform = {n: METRICS[n].controls["uniform_causal"](T) for n in ("row_entropy", "effective_keys", "sink_mass")}
    return Overview(
        tiles=np.stack([tiles[n] for n in range(n_layers)]),
        edges=bucket_edges(T, buckets),
        statistics=pd.concat([tables[n] for n in range(n_layers)], ignore_index=True),
        uniform=uniform | {"normalised_entropy": 1.0},
    )


def _per_head(layer: int, entropy: Tensor, sink: Tensor, null: Tensor | None) -> pd.DataFrame:
    """A row for each head from what its rows' entropies, sinks and shares of no token [1, head, T] are."""
    columns: Mapping[str, Tensor] = {
        "row_entropy": row_entropy(entropy), "normalised_entropy": row_entropy(entropy, normalised=True),
        "effective_keys": effective_keys(entropy), "sink_mass": sink_mass(sink),
    }  # fmt: skip
    columns = columns if null is None else {**columns, "null_mass": null_mass(null)}
    heads = {"layer": layer, "head": range(entropy.shape[1])}
    return pd.DataFrame(heads | {name: array(column[0]).tolist() for name, column in columns.items()})


def _tiles(q: Tensor, k: Tensor, buckets: int, pool: Pool, lse: Tensor | None = None) -> np.ndarray:
    """Pooled attention [head, query bucket, key bucket] of one softmax, the future NaN."""
    cells = array((pooled_attention if pool == "mean" else pooled_maximum)(q, k, lse, buckets=buckets)[0])
    cells[:, np.triu(np.ones(cells.shape[1:], dtype=bool), 1)] = np.nan
    return cells


def _drawn(softmaxes: Sequence[LayerArrays], T: int, buckets: int, pool: Pool) -> np.ndarray:
    """Pooled attention [head, query bucket, key bucket] from windows of it."""
    inputs, heads = AttentionInputs(T=T, layers=[list(softmaxes)]), range(softmaxes[0].heads)
    return np.stack([attention_map(inputs, 0, h, most=buckets, pool=pool).weights for h in heads])


def _statistics(softmaxes: Sequence[SoftmaxArrays]) -> tuple[Tensor, Tensor]:
    """row_entropy and sink [1, head, T] where a shortcut defines the attention, sets of keys folded as in the model's own."""
    heads, T = softmaxes[0].lse.shape
    entropy, sink = torch.zeros(2, 1, heads, T)
    step = max(1, STRIP // T)
    for head, start in itertools.product(range(heads), range(0, T, step)):
        rows = range(start, min(start + step, T))
        patterns: dict[int, Tensor] = {}
        for place, _, w in weights_by_keys(softmaxes, head, rows, range(rows.stop)):
            patterns[place] = patterns[place] + w if place in patterns else w
        here = slice(rows.start, rows.stop)
        for w in patterns.values():
            entropy[0, head, here] += torch.special.entr(w).sum(-1)
            sink[0, head, here] += w[:, 0]
    return entropy, sink
