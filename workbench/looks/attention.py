"""Where every head of a model looks in one prompt, from 2 tokens to tens of thousands: an overview, then any window of it.

    seen = overview(model, ids)                      # pictures of all heads, their entropy, sinks and effective keys
    kept = keep(model, ids)                          # what a server holds: rotated queries and keys, log-sum-exps
    window(kept, 3, 1, slice(0, 256), slice(0, 256)) # exact weights; larger windows are pooled into tiles

Nothing here holds a T x T array. The attention is the model's own in every architecture: where a layer also sees other
layers' keys, a position receives what it receives in all sets of keys together; where patterns are mixed, it is the mixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName
from workbench.kernels.attention import attention_statistics
from workbench.kernels.joint import Softmax
from workbench.kernels.pooled import attention_window, bucket_edges, pooled_attention, pooled_maximum
from workbench.looks.reading import array, by_layer, chosen_positions, one_prompt
from workbench.metrics.attention import effective_keys, row_entropy, sink_mass, uniform_importance
from workbench.metrics.base import METRICS
from workbench.models.attention import Recipe
from workbench.models.hooked import HookedModel

POINTS = 512
"""Most numbers along an axis of what is meant to be sent: points of a profile, cells of a window."""
STRIP = 2**20
"""Weights of a window held at a time: 4 MiB, where a processor is quickest."""
Pool = Literal["mean", "max"]
POOLS = ("mean", "max")
ORDINARY = ("rot_q", "rot_k", "received", "row_entropy", "sink")
KEPT = ("rot_q", "rot_k", "lse")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Pictures and numbers of all heads."""

    tiles: np.ndarray
    """Pooled attention [layer, head, query bucket, key bucket]; the future is NaN."""
    edges: list[int]
    """First position of each bucket, and T."""
    received: np.ndarray
    """Attention received per position [layer, head, point], in queries: column sums, mean over a point's positions."""
    points: list[int]
    """First position of each point, and T."""
    statistics: pd.DataFrame
    """A row for each head: layer, head, row_entropy (nats), normalised_entropy, effective_keys, sink_mass."""
    uniform: dict[str, float]
    """The same statistics under uniform causal attention of this length."""
    uniform_received: np.ndarray
    """[point], received under uniform causal attention."""
    kinds: list[str]
    """What each layer's attention is; other than `one softmax` only where an architecture changes it."""


@torch.no_grad()
def overview(
    model: HookedModel,
    ids: Any,
    buckets: int = 64,
    *,
    pool: Pool = "mean",
    progress: Callable[[int, int], None] | None = None,
) -> Overview:
    """All layers and heads at once, from one run: pooled pictures, received attention, entropy, effective keys, sinks.

    `pool`: a cell of the pictures is the mean over its queries of the mass they send to all its keys (rows sum to 1), or the
    largest weight in it (`max`), which shows stripes that a mean hides. Costs one run and about two more passes over the
    attention: time O(L H T^2 d_head), memory O(T d_model) and the pictures. Raises `BadData` for a prompt that cannot be
    read, `UnknownName` for another pool, `WorkbenchError` where an observed model shows no attention. `progress` is told
    (layers done, all), and may raise to stop.
    """
    _check_pool(pool)
    found, recipes = one_prompt(model, ids), _recipes(model)
    T, n_layers = found.shape[1], model.config.n_layers
    edges, points = bucket_edges(T, buckets), bucket_edges(T, POINTS)
    tiles: dict[int, np.ndarray] = {}
    received: dict[int, np.ndarray] = {}
    rows: list[dict[str, Any]] = []

    def reduce(layer: int, tensors: dict[str, Tensor]) -> None:
        if layer in recipes:
            terms = _terms(recipes[layer], tensors)
            seen, kept = _statistics(terms), Kept(T=T, layers={layer: terms}, kinds={})
            heads = range(len(terms[0].lse))
            tiles[layer] = np.stack([window(kept, layer, h, most=buckets, pool=pool).weights for h in heads])
        else:
            q, k, *shown = (tensors[name] for name in _points(layer, *ORDINARY))
            seen = dict(zip(ORDINARY[2:], shown, strict=True))
            tiles[layer] = _tiles(q, k, buckets, pool)
        received[layer] = _pooled(array(seen["received"][0]), points)
        columns = {
            "row_entropy": row_entropy(seen["row_entropy"]),
            "normalised_entropy": row_entropy(seen["row_entropy"], normalised=True),
            "effective_keys": effective_keys(seen["row_entropy"]),
            "sink_mass": sink_mass(seen["sink"]),
        }
        numbers = {name: array(column[0]).tolist() for name, column in columns.items()}
        rows.extend(
            {"layer": layer, "head": h} | {n: c[h] for n, c in numbers.items()} for h in range(len(tiles[layer]))
        )
        if progress is not None:
            progress(len(tiles), n_layers)

    wanted = {n: _needs(recipes, n, ORDINARY) for n in range(n_layers)}
    _refuse_absent(model, wanted)
    by_layer(model, found, wanted, reduce)
    uniform = {n: METRICS[n].controls["uniform_causal"](T) for n in ("row_entropy", "effective_keys", "sink_mass")}
    return Overview(
        tiles=np.stack([tiles[n] for n in range(n_layers)]),
        edges=edges,
        received=np.stack([received[n] for n in range(n_layers)]),
        points=points,
        statistics=pd.DataFrame(rows).sort_values(["layer", "head"], ignore_index=True),
        uniform=uniform | {"normalised_entropy": 1.0},
        uniform_received=_pooled(array(T * uniform_importance(T)), points),
        kinds=[_kind(recipes.get(n)) for n in range(n_layers)],
    )


# ---- what is kept to answer windows later ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Term:
    """One softmax of a layer's attention: weight * softmax(q [K_1; ...] / sqrt(width)), rows normalised by `lse`."""

    weight: float
    queries: np.ndarray
    """Rotated, float32 [T, head, width]."""
    keys: list[np.ndarray]
    """Rotated, float32 [T, kv_head, width], of each set of keys."""
    branches: list[str]
    """Whose keys these are: `own`, `first`, `cross`, `cross.<layer>`."""
    lse: np.ndarray
    """float32 [head, T]."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What `window` answers from, without the model."""

    T: int
    layers: dict[int, list[Term]]
    kinds: dict[int, str]

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        terms = [t for layer in self.layers.values() for t in layer]
        return sum(a.nbytes for t in terms for a in (t.queries, *t.keys, t.lse))

    def branches(self, layer: int) -> list[str]:
        """Whose keys a layer sees."""
        return [b for term in self._layer(layer) for b in term.branches]

    def _layer(self, layer: int) -> list[Term]:
        if layer not in self.layers:
            raise UnknownName("layer", layer, map(str, self.layers))
        return self.layers[layer]


@torch.no_grad()
def keep(model: HookedModel, ids: Any, layers: Sequence[int] | None = None) -> Kept:
    """Rotated queries and keys and the rows' log-sum-exps of one run, as float32 arrays; of all layers or of some.

    4 T (d_model + d_key_value + H) bytes a layer, more where it sees other layers' keys. Costs one run and one pass over the
    attention. Raises `UnknownName` for a layer, else as `overview`.
    """
    found, recipes = one_prompt(model, ids), _recipes(model)
    chosen = range(model.config.n_layers) if layers is None else layers
    for n in chosen:
        if n not in range(model.config.n_layers):
            raise UnknownName("layer", n, map(str, range(model.config.n_layers)))
    kept: dict[int, list[Term]] = {}

    def reduce(layer: int, tensors: dict[str, Tensor]) -> None:
        if layer in recipes:
            kept[layer] = _terms(recipes[layer], tensors)
        else:
            q, k, lse = (tensors[name] for name in _points(layer, *KEPT))
            kept[layer] = [_term(Softmax(1.0, q, [k]), ["own"], lse)]

    needed = {n: _needs(recipes, n, KEPT) for n in chosen}
    _refuse_absent(model, needed)
    by_layer(model, found, needed, reduce)
    kinds = {n: _kind(recipes.get(n)) for n in chosen}
    return Kept(T=found.shape[1], layers={n: kept[n] for n in chosen}, kinds=kinds)


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
        """Whether each cell is one weight."""
        rows, columns = self.weights.shape
        return rows == self.queries[-1] - self.queries[0] and columns == self.keys[-1] - self.keys[0]


@torch.no_grad()
def window(
    kept: Kept,
    layer: int,
    head: int,
    queries: slice | None = None,
    keys: slice | None = None,
    *,
    most: int = POINTS,
    pool: Pool = "mean",
    branch: str | None = None,
) -> Window:
    """Attention of some neighbouring queries to some neighbouring keys, pooled where either are more than `most`.

    `mean`: mean over a cell's queries of the mass they send to all its keys, so rows over all keys sum to 1 at every depth
    of zoom; `max`: the largest weight in a cell. `branch`: to these keys alone (`Kept.branches`), None for all of them.
    Costs O(queries keys width) time; memory is a few times 4 MiB and the cells, or the weights behind a row of cells where
    those are more. Raises `UnknownName` for a layer, head, pool or branch, `BadData` for an empty window.
    """
    terms = kept._layer(layer)
    heads = len(terms[0].lse)
    if isinstance(head, bool) or head not in range(heads):
        raise UnknownName("head", head, map(str, range(heads)))
    _check_pool(pool)
    if branch is not None and branch not in kept.branches(layer):
        raise UnknownName("branch", branch, kept.branches(layer))
    if most < 1:
        raise BadData(f"most={most}: a window has at least one cell")
    rows, columns = chosen_positions(kept.T, queries), chosen_positions(kept.T, keys)
    row_edges = [rows.start + e for e in bucket_edges(len(rows), most)]
    key_edges = [columns.start + e for e in bucket_edges(len(columns), most)]
    weights = np.full((len(row_edges) - 1, len(key_edges) - 1), np.nan, dtype=np.float32)
    for first, last in _strips(row_edges, len(columns)):
        strip = range(row_edges[first], row_edges[last])
        seen = range(columns.start, min(columns.stop, strip.stop))
        if not seen:
            continue  # all of it is the future
        exact = _weights(terms, head, strip, seen, branch).numpy()
        if pool == "max":  # where patterns are mixed with other signs, 0 may be more than what is there
            exact[np.array(seen) > np.array(strip)[:, None]] = -np.inf
        edges = [e for e in key_edges if e < seen.stop]
        local = [e - seen.start for e in edges], [e - strip.start for e in row_edges[first:last]]
        weights[first:last, : len(edges)] = _cells(exact, *local, pool)
    future = np.array(key_edges[:-1]) > np.array(row_edges[1:])[:, None] - 1
    weights[future] = np.nan
    return Window(weights=weights, queries=row_edges, keys=key_edges)


def _check_pool(pool: str) -> None:
    if pool not in POOLS:
        raise UnknownName("pool", pool, POOLS)


def _strips(edges: list[int], width: int) -> list[tuple[int, int]]:
    """(first, last) rows of cells whose weights are held together."""
    found, first = [], 0
    for last in range(1, len(edges)):
        if last == len(edges) - 1 or (edges[last + 1] - edges[first]) * width > STRIP:
            found.append((first, last))
            first = last
    return found


def _weights(terms: Sequence[Term], head: int, queries: range, keys: range, branch: str | None = None) -> Tensor:
    """Weights [query, key] of one head; the future is 0."""
    found = [w for name, w in _of_sets(terms, head, queries, keys) if branch in (None, name)]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _of_sets(terms: Sequence[Term], head: int, queries: range, keys: range) -> Iterator[tuple[str, Tensor]]:
    """(branch, weights [query, key]) of every set of keys of every softmax, with its softmax's weight."""
    rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
    for term in terms:
        q, lse = torch.from_numpy(term.queries[None, :, head, None]), torch.from_numpy(term.lse[None, head, None])
        for branch, found in zip(term.branches, term.keys, strict=True):
            k = torch.from_numpy(found[None, :, head * found.shape[1] // len(term.lse), None])
            weights = attention_window(q, k, lse, rows, columns)[0, 0]
            yield branch, weights if term.weight == 1.0 else weights.mul_(term.weight)


def _cells(weights: np.ndarray, keys: list[int], queries: list[int], pool: str) -> np.ndarray:
    """Weights [query, key] pooled into cells that begin at these queries and keys."""
    if pool == "max":
        return np.maximum.reduceat(np.maximum.reduceat(weights, keys, 1), queries, 0)
    sizes = np.diff([*queries, len(weights)])[:, None]
    return np.add.reduceat(np.add.reduceat(weights, keys, 1), queries, 0) / sizes


# ---- the attention of any architecture -------------------------------------------------------------------------------


def _recipes(model: HookedModel) -> dict[int, Recipe]:
    """How to make the attention of the layers that are no single softmax over their own keys."""
    return {recipe.layer: recipe for recipe in model.recipes()}


def _points(layer: int, *names: str) -> list[str]:
    return [f"blocks.{layer}.attn.hook_{name}" for name in names]


def _refuse_absent(model: HookedModel, needed: Mapping[int, Sequence[str]]) -> None:
    """Raise `BadData` in words where an observed model does not show what its maps are made of."""
    for layer, names in needed.items():
        if why := next((model.absent[name] for name in names if name in model.absent), None):
            raise BadData(f"this model's attention cannot be drawn: layer {layer} is {why}")


def _needs(recipes: Mapping[int, Recipe], layer: int, otherwise: Sequence[str]) -> list[str]:
    return sorted(recipes[layer].needs) if layer in recipes else _points(layer, *otherwise)


def _tiles(q: Tensor, k: Tensor, buckets: int, pool: Pool) -> np.ndarray:
    """Pooled attention [head, query bucket, key bucket] of one softmax, the future NaN."""
    found = array((pooled_attention if pool == "mean" else pooled_maximum)(q, k, buckets=buckets)[0])
    found[:, np.triu(np.ones(found.shape[1:], dtype=bool), 1)] = np.nan
    return found


def _kind(recipe: Recipe | None) -> str:
    """What a layer's attention is, in words."""
    if recipe is None:
        return "one softmax"
    names = " and ".join(b for softmax in _branches(recipe) for b in softmax)
    return {
        "sets": f"one softmax over the keys of {names}",
        "mixture": f"a weighted sum of the softmaxes of {names}",
        "softmax": f"one softmax of the mixed scores of {recipe.joint.branch} and own",
    }[str(recipe.joint.attends(recipe.layer))]


def _term(softmax: Softmax, branches: list[str], lse: Tensor | None = None) -> Term:
    """One softmax as it is kept; a query's log-sum-exp over several sets of keys is that of the sets' own."""
    if lse is None:
        lse = torch.stack([attention_statistics(softmax.q, k, k)[1].lse for k in softmax.keys]).logsumexp(0)
    arranged = [array(x[0]) for x in (softmax.q, *softmax.keys)]
    return Term(weight=softmax.weight, queries=arranged[0], keys=arranged[1:], branches=branches, lse=array(lse[0]))


def _terms(recipe: Recipe, tensors: Mapping[str, Tensor]) -> list[Term]:
    """The softmaxes of a layer that are no single one over its own keys."""
    read = {t: {j: tensors[name] for j, name in found.items()} for t, found in recipe.reads.items()}
    softmaxes = recipe.joint.softmaxes(recipe.layer, tensors[recipe.q], tensors[recipe.k], read)
    return [_term(s, names) for s, names in zip(softmaxes, _branches(recipe), strict=True)]


def _branches(recipe: Recipe) -> list[list[str]]:
    """Of each softmax, of each key set: `own`, `first`, `cross.2`, where its pattern's hook point stands."""
    stem = f"blocks.{recipe.layer}.attn."
    parts = [
        [pattern.removeprefix(stem).removesuffix("hook_pattern") for _, pattern in shown] for shown in recipe.shown
    ]
    return [[part.rstrip(".") or "own" for part in softmax] for softmax in parts]


def _statistics(terms: Sequence[Term]) -> dict[str, Tensor]:
    """received, row_entropy and sink [1, head, T] of such a layer, sets of keys folded as in the model's own."""
    heads, T = terms[0].lse.shape
    found = {name: torch.zeros(1, heads, T) for name in ("received", "row_entropy", "sink")}
    step = max(1, STRIP // T)
    for head, start in itertools.product(range(heads), range(0, T, step)):
        rows = range(start, min(start + step, T))
        sets: dict[int, Tensor] = {}
        for (i, _), (_, w) in zip(_places(terms), _of_sets(terms, head, rows, range(rows.stop)), strict=True):
            sets[i] = sets[i] + w if i in sets else w
        here = slice(rows.start, rows.stop)
        for w in sets.values():
            found["received"][0, head, : rows.stop] += w.sum(0)
            found["row_entropy"][0, head, here] += torch.special.entr(w).sum(-1)
            found["sink"][0, head, here] += w[:, 0]
    return found


def _places(terms: Sequence[Term]) -> list[tuple[int, str]]:
    return [pair for term in terms for pair in enumerate(term.branches)]


def _pooled(profile: np.ndarray, edges: list[int]) -> np.ndarray:
    """Means over the positions [..., T] of each bucket."""
    return (np.add.reduceat(profile, edges[:-1], -1) / np.diff(edges)).astype(np.float32)
