"""The attention of one prompt: maps of single heads in any window, and an overview of all heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData, refuse_unknown
from workbench.hook_names import NULL
from workbench.kernels.attention_and_its_statistics import attention_statistics
from workbench.kernels.joint_and_null_softmax import Softmax, joint_statistics
from workbench.kernels.pooled_maps import attention_window, bucket_edges, pooled_attention, pooled_maximum
from workbench.metrics.attention_patterns import effective_keys, null_mass, row_entropy, sink_mass
from workbench.metrics.base import METRICS
from workbench.models.attention_layer import Recipe
from workbench.models.hooked import HookedModel
from workbench.prompts.prompt import PromptLike, array, by_layer, chosen_positions, single_prompt


@dataclass(frozen=True, kw_only=True)
class SoftmaxArrays:
    """One softmax of a layer's attention: weight * softmax(q [K_1; ...] / sqrt(width)), rows normalised by `lse`."""

    weight: float
    queries: np.ndarray  # rotated, float32 [T, head, width]
    keys: list[np.ndarray]  # rotated, float32 [T, kv_head, width], of each set of keys
    branches: list[str]  # source of the keys: `own`, `first`, `cross`, `cross.<layer>`
    lse: np.ndarray  # log-sum-exps of the rows, float32 [head, T]
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

    pattern: np.ndarray  # float32 [head, T, T]
    # float32 [head, T]: what of each row goes to no token and is missing in its sum; None where nothing does
    null: np.ndarray | None
    branches: tuple[str, ...] = ("own",)

    @property
    def heads(self) -> int:
        return len(self.pattern)

    def weights(self, head: int, rows: slice, columns: slice) -> Iterator[Tensor]:
        yield torch.from_numpy(self.pattern[head, rows, columns].copy())

    @classmethod
    def of(cls, layer: int, tensors: Mapping[str, Tensor]) -> PatternArrays:
        pattern, null = (tensors.get(name) for name in attention_hook_points(layer, ("pattern", NULL)))
        assert pattern is not None
        return cls(pattern=array(pattern[0]), null=None if null is None else array(null[0]))


LayerArrays = SoftmaxArrays | PatternArrays
MOST_BYTES = 2**31  # of the whole patterns of a model that are kept for its maps


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


MAX_CELLS = 512  # numbers along an axis of what is sent to a browser: points of a profile, cells of a window
STRIP = 2**20  # weights of a window in memory at a time: 4 MiB, where a processor is quickest
Pool = Literal["mean", "max"]
POOLS = ("mean", "max")
READ = ("rot_q", "rot_k", "lse")


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Queries, keys and statistics of one prompt, from which all its maps are drawn without the model."""

    T: int
    layers: list[list[LayerArrays]]  # the softmaxes of each layer

    def branches(self, layer: int) -> list[str]:
        """Return the sets of keys that a layer sees: `own`, `first`, `cross`, `cross.<layer>`. Raises `UnknownName` for a layer."""
        return [branch for softmax in self.softmaxes(layer) for branch in softmax.branches]

    def softmaxes(self, layer: int) -> list[LayerArrays]:
        """The softmaxes of a layer; raises `UnknownName` for another."""
        refuse_unknown("layer", layer, range(len(self.layers)))
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

    weights: np.ndarray  # float32 [row, column]; NaN where a cell holds nothing but the future
    queries: list[int]  # first query of each row, and the one behind the last row
    keys: list[int]  # first key of each column, and the one behind the last

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
    refuse_unknown("head", head, range(heads))
    check_pool(pool)
    refuse_unknown("branch", branch, (None, *inputs.branches(layer)))
    if most < 1:
        raise BadData(f"most={most}: a window has at least one cell")
    rows, columns = chosen_positions(inputs.T, queries), chosen_positions(inputs.T, keys)
    row_edges = [rows.start + e for e in bucket_edges(len(rows), most)]
    key_edges = [columns.start + e for e in bucket_edges(len(columns), most)]
    cells = np.full((len(row_edges) - 1, len(key_edges) - 1), np.nan, dtype=np.float32)
    first = 0
    for last in range(1, len(row_edges)):  # as many rows of cells as a strip holds
        if last < len(row_edges) - 1 and (row_edges[last + 1] - row_edges[first]) * len(columns) <= STRIP:
            continue
        strip = range(row_edges[first], row_edges[last])
        past = range(columns.start, min(columns.stop, strip.stop))
        if past:  # else all of it is the future
            starts = [e - strip.start for e in row_edges[first:last]]
            edges = [e - past.start for e in key_edges if e < past.stop]
            parts = [w for _, name, w in weights_by_keys(softmaxes, head, strip, past) if branch in (None, name)]
            weights = (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).numpy()
            if pool == "max":  # where patterns are mixed with other signs, the masked 0 may be more than what is there
                weights[np.array(past) > np.array(strip)[:, None]] = -np.inf
                pooled = np.maximum.reduceat(np.maximum.reduceat(weights, edges, 1), starts, 0)
            else:
                sums = np.add.reduceat(np.add.reduceat(weights, edges, 1), starts, 0)
                pooled = sums / np.diff([*starts, len(weights)])[:, None]
            cells[first:last, : len(edges)] = pooled
        first = last
    cells[np.array(key_edges[:-1]) > np.array(row_edges[1:])[:, None] - 1] = np.nan
    return Window(weights=cells, queries=row_edges, keys=key_edges)


def check_pool(pool: str) -> None:
    """Raise `UnknownName` for another way to pool."""
    refuse_unknown("pool", pool, POOLS)


OVERVIEW_POINTS = ("rot_q", "rot_k", "row_entropy", "sink")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Pictures and numbers of all heads."""

    tiles: np.ndarray  # pooled attention [layer, head, query bucket, key bucket]; the future is NaN
    edges: list[int]  # first position of each bucket, and T
    statistics: pd.DataFrame
    """A row for each head: layer, head, row_entropy (nats), normalised_entropy, effective_keys, sink_mass; null_mass where there is one."""
    uniform: dict[str, float]
    """The same statistics under uniform causal attention of this length; NaN if layers see different numbers of keys."""
    windows: list[int | None]  # latest keys that a query of each layer sees, None for all, 0 if unknown


@torch.no_grad()
def attention_overview(
    model: HookedModel, prompt: PromptLike, buckets: int = 64, *, pool: Pool = "mean",
    progress: Callable[[int, int], None] | None = None,
) -> Overview:  # fmt: skip
    """All layers and heads at once, from one run: pooled pictures, entropy, effective keys, sinks.

    `pool`: a cell of the pictures is the mean over its queries of the attention to its keys (rows sum to 1). With `max` it is the
    largest weight, which shows stripes that a mean hides. Costs one run and about two more passes over the attention: time O(L H T^2
    d_head), memory O(T d_model) and the pictures. Raises `BadData` for a prompt that cannot be read and where an observed model shows
    no attention, `UnknownName` for another pool. `progress` is called with (layers done, all), and may raise to stop.
    """
    check_pool(pool)
    ids, recipes = single_prompt(model, prompt).ids, recipes_of(model)
    T, n_layers = ids.shape[1], model.config.n_layers
    tiles: dict[int, np.ndarray] = {}
    tables: dict[int, pd.DataFrame] = {}

    def reduce(layer: int, tensors: dict[str, Tensor]) -> None:
        rot_q, rot_k, entropy, sink, null = (
            tensors.get(name) for name in attention_hook_points(layer, (*OVERVIEW_POINTS, NULL))
        )
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
        columns: dict[str, Tensor] = {
            "row_entropy": row_entropy(entropy),
            "normalised_entropy": row_entropy(entropy, null, model.attention_window(layer), normalised=True),
            "effective_keys": effective_keys(entropy), "sink_mass": sink_mass(sink),
        }  # fmt: skip
        columns |= {} if null is None else {"null_mass": null_mass(null)}
        heads = {"layer": layer, "head": range(entropy.shape[1])}
        tables[layer] = pd.DataFrame(heads | {name: array(column[0]).tolist() for name, column in columns.items()})
        if progress is not None:
            progress(len(tiles), n_layers)

    by_layer(model, ids, needed_points(model, OVERVIEW_POINTS, T), reduce)
    windows = [model.attention_window(layer) for layer in range(n_layers)]
    one = windows[0] if len(set(windows)) == 1 else 0
    uniform = {n: METRICS[n].controls["uniform_causal"](T, one) for n in ("row_entropy", "effective_keys", "sink_mass")}
    return Overview(
        tiles=np.stack([tiles[n] for n in range(n_layers)]),
        edges=bucket_edges(T, buckets),
        statistics=pd.concat([tables[n] for n in range(n_layers)], ignore_index=True),
        uniform=uniform | {"normalised_entropy": 1.0},
        windows=windows,
    )


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
        weights = sum(w for *_, w in weights_by_keys(softmaxes, head, rows, range(rows.stop)))
        assert isinstance(weights, Tensor)
        entropy[0, head, rows.start : rows.stop] = torch.special.entr(weights).sum(-1)
        sink[0, head, rows.start : rows.stop] = weights[:, 0]
    return entropy, sink
