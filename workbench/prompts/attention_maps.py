"""Maps of single heads in one prompt, from 2 tokens to tens of thousands: any window of them, exact or pooled.

    inputs = attention_inputs(model, ids)                                   # rotated queries and keys, log-sum-exps
    attention_map(inputs, 3, 1, slice(0, 256), slice(0, 256))               # exact weights; larger windows are pooled

No T x T array is made. The attention is the model's own in every architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName
from workbench.kernels.joint import Softmax
from workbench.kernels.pooled import bucket_edges
from workbench.models.hooked import HookedModel
from workbench.prompts.single_pass import by_layer, chosen_positions
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

MAX_CELLS = 512
"""Numbers along an axis of what is sent to a browser: points of a profile, cells of a window."""
STRIP = 2**20
"""Weights of a window in memory at a time: 4 MiB, where a processor is quickest."""
Pool = Literal["mean", "max"]
POOLS = ("mean", "max")
READ = ("rot_q", "rot_k", "lse")


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Queries, keys and statistics of one prompt, from which all its maps are drawn without the model."""

    T: int
    layers: list[list[LayerArrays]]
    """The softmaxes of each layer."""

    def branches(self, layer: int) -> list[str]:
        """Return the sets of keys that a layer sees: `own`, `first`, `cross`, `cross.<layer>`. Raises `UnknownName` for a layer."""
        return [branch for softmax in self.softmaxes(layer) for branch in softmax.branches]

    def softmaxes(self, layer: int) -> list[LayerArrays]:
        """The softmaxes of a layer; raises `UnknownName` for another."""
        if layer not in range(len(self.layers)):
            raise UnknownName("layer", layer, map(str, range(len(self.layers))))
        return self.layers[layer]


@torch.no_grad()
def attention_inputs(model: HookedModel, prompt: PromptLike) -> AttentionInputs:
    """Rotated queries and keys and the rows' log-sum-exps of one run, as float32 arrays.

    4 T (d_model + d_key_value + H) bytes a layer, more where it sees other layers' keys. Costs one run and one pass over the
    attention. Raises `BadData` for a prompt that cannot be read and where an observed model shows no attention.
    """
    ids, recipes = single_prompt(model, prompt).ids, recipes_of(model)
    layers: dict[int, list[LayerArrays]] = {}

    def reduce(layer: int, tensors: dict[str, Tensor]) -> None:
        if layer in recipes:
            layers[layer] = list[LayerArrays](softmaxes_of(recipes[layer], tensors))
        elif attention_hook_points(layer, ("pattern",))[0] in tensors:
            layers[layer] = [PatternArrays.of(layer, tensors)]
        else:
            q, k, lse = (tensors[name] for name in attention_hook_points(layer, READ))
            layers[layer] = [SoftmaxArrays.of(Softmax(1.0, q, [k]), ["own"], lse)]

    by_layer(model, ids, needed_points(model, READ, ids.shape[1]), reduce)
    return AttentionInputs(T=ids.shape[1], layers=[layers[n] for n in range(model.config.n_layers)])


@dataclass(frozen=True, kw_only=True)
class Window:
    """A piece of one head's attention map, in at most so many cells."""

    weights: np.ndarray
    """float32 [row, column]; NaN where a cell holds nothing but the future."""
    queries: list[int]
    """First query of each row, and the one behind the last row."""
    keys: list[int]
    """First key of each column, and the one behind the last."""

    @property
    def exact(self) -> bool:
        """Return whether each cell holds one attention weight."""
        rows, columns = self.weights.shape
        return rows == self.queries[-1] - self.queries[0] and columns == self.keys[-1] - self.keys[0]


@torch.no_grad()
def attention_map(
    inputs: AttentionInputs, layer: int, head: int, queries: slice | None = None, keys: slice | None = None, *,
    most: int = MAX_CELLS, pool: Pool = "mean", branch: str | None = None,
) -> Window:  # fmt: skip
    """Attention of some neighbouring queries to some neighbouring keys, pooled where either are more than `most`.

    The pool `mean` is the mean over a cell's queries of the mass they send to all its keys. Rows over all keys then sum to
    1 at every depth of zoom. The pool `max` is the largest weight in a cell. `branch`: to these keys alone (`AttentionInputs.branches`),
    None for all. Costs O(queries keys width) time; memory is a few times 4 MiB and the cells, or the weights behind a row of cells where
    those are more. Raises `UnknownName` for a layer, head, pool or branch, `BadData` for an empty window.
    """
    softmaxes = inputs.softmaxes(layer)
    heads = softmaxes[0].heads
    if isinstance(head, bool) or head not in range(heads):
        raise UnknownName("head", head, map(str, range(heads)))
    check_pool(pool)
    if branch is not None and branch not in inputs.branches(layer):
        raise UnknownName("branch", branch, inputs.branches(layer))
    if most < 1:
        raise BadData(f"most={most}: a window has at least one cell")
    rows, columns = chosen_positions(inputs.T, queries), chosen_positions(inputs.T, keys)
    row_edges = [rows.start + e for e in bucket_edges(len(rows), most)]
    key_edges = [columns.start + e for e in bucket_edges(len(columns), most)]
    cells = np.full((len(row_edges) - 1, len(key_edges) - 1), np.nan, dtype=np.float32)
    for first, last in _strips(row_edges, len(columns)):
        strip = range(row_edges[first], row_edges[last])
        past = range(columns.start, min(columns.stop, strip.stop))
        if past:  # else all of it is the future
            edges = [e - past.start for e in key_edges if e < past.stop]
            starts = [e - strip.start for e in row_edges[first:last]]
            weights = _weights(softmaxes, head, strip, past, branch)
            cells[first:last, : len(edges)] = _pooled(weights, strip, past, (starts, edges), pool)
    cells[np.array(key_edges[:-1]) > np.array(row_edges[1:])[:, None] - 1] = np.nan
    return Window(weights=cells, queries=row_edges, keys=key_edges)


def _strips(edges: list[int], width: int) -> list[tuple[int, int]]:
    """(first, last) rows of cells whose weights are in memory together."""
    strips, first = [], 0
    for last in range(1, len(edges)):
        if last == len(edges) - 1 or (edges[last + 1] - edges[first]) * width > STRIP:
            strips.append((first, last))
            first = last
    return strips


def _weights(
    softmaxes: Sequence[LayerArrays], head: int, queries: range, keys: range, branch: str | None
) -> np.ndarray:
    """Weights [query, key] of one head; the future is 0."""
    parts = [w for _, name, w in weights_by_keys(softmaxes, head, queries, keys) if branch in (None, name)]
    return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).numpy()


def _pooled(
    weights: np.ndarray, queries: range, keys: range, starts: tuple[list[int], list[int]], pool: Pool
) -> np.ndarray:
    """Weights [query, key] pooled into cells whose first rows and columns are `starts`."""
    rows, columns = starts
    if pool == "max":  # where patterns are mixed with other signs, the masked 0 may be more than what is there
        weights[np.array(keys) > np.array(queries)[:, None]] = -np.inf
        return np.maximum.reduceat(np.maximum.reduceat(weights, columns, 1), rows, 0)
    sizes = np.diff([*rows, len(weights)])[:, None]
    return np.add.reduceat(np.add.reduceat(weights, columns, 1), rows, 0) / sizes


def check_pool(pool: str) -> None:
    """Raise `UnknownName` for another way to pool."""
    if pool not in POOLS:
        raise UnknownName("pool", pool, POOLS)
