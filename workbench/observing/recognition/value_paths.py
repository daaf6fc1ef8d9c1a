"""Sources of effective values: tables looked up by token id, and fits to own values, earlier layers' values and tables.

The embedding is the lookup whose vectors explain the first block's input, up to a norm, a scale and added position vectors. All
other lookups by the same ids are tables of values. They may be embeddings, parts of a wide table, indexed parameters, or narrow
tables behind a projection (low rank).

Coefficients are constants if constants fit, else weights by token and head (gates), reported by mean and spread. Fits are in
float64 over all sampled positions, heads and dimensions, so that a float32 model gives its coefficients to 1e-6. `residual` is the
share of the target's norm that the fit leaves: about 1e-7 for a path that is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.observing.interception.tensor_paths import TensorPath
from workbench.observing.recognition.decoder_structure import GATED, LayerStructure, Table
from workbench.observing.recognition.least_squares import EXACT, SLACK, StreamSum, fit, weights_by_token
from workbench.observing.recognition.module_runs import LOOKUP, MATRIX, Execution, TracedTensor
from workbench.observing.recognition.traced_run import Trace, is_matrix

Source = str | int
"""`first`, `own`, the layer whose own values are read, or `table NAME` for the module that looks values up."""
TABLE = "table "
_FEW = 8  # rows that decide which tables may take part
NEGLIGIBLE = 1e-6  # coefficients below this are zero
LARGEST = 0.1
"""Largest residual of a path. Beyond it coefficients are those of whatever correlates with the sources.

True paths leave 1e-7 (float32) to 2e-2 (bfloat16). Other values (gates, norms, unseen tables) leave 0.2 or more.
"""
UNEXPLAINED = "unexplained"
"""Source in tables of values that no path explains."""
Embedding = tuple[Execution, TensorPath]
_EXPLAINED = 0.05
"""Least share of a stream's variance that its embedding explains: ten times what chance gives with 192 rows or more."""


def find_embedding(trace: Trace, block: Execution, stream: Tensor) -> Embedding | None:
    """Find the lookup by token id before the blocks that explains most of the stream [row, d_model], or the only one."""
    modules = [
        (e, s) for e in trace.executions for s in e.outputs
        if e.reads_tokens and e.start < block.start and len(s.shape) > 1 and is_matrix(trace, e)
    ]  # fmt: skip
    bare = [
        (e, s) for e in trace.lookups for s in e.outputs
        if e.reads_tokens and e.kind and e.start < block.start and not any(m.holds(e.start) for m, _ in modules)
    ]  # fmt: skip
    tables = [*modules, *bare]
    wide = [t for t in tables if t[1].rows.shape[1] == stream.shape[1]] or tables
    if len(wide) > 1:
        shares = [_explained(s.rows, stream, trace.rows % trace.length) for _, s in wide]
        wide = [t for t, share in zip(wide, shares, strict=True) if share == max(shares) > _EXPLAINED]
    return next(((e, s.path) for e, s in wide), None)


def _explained(vectors: Tensor, stream: Tensor, positions: Tensor) -> float:
    """Return the share of a normed stream's variance that normed vectors explain, less each position's mean if positions repeat."""
    if vectors.shape[1] != stream.shape[1]:
        return 0.0
    x, y = (z.double() / z.double().norm(dim=1, keepdim=True).clamp_min(1e-300) for z in (vectors, stream))
    repeated = positions.bincount()[positions] > 1
    if int(repeated.sum()) < len(positions) // 2:
        positions, repeated = torch.zeros_like(positions), torch.ones_like(repeated)
    x, y, positions = x[repeated], y[repeated], positions[repeated]
    counts = positions.bincount()
    sums = (z.new_zeros(len(counts), z.shape[1]).index_add_(0, positions, z) for z in (x, y))
    x, y = (z - (total / counts.clamp_min(1)[:, None])[positions] for z, total in zip((x, y), sums, strict=True))
    size = float(y.square().sum())
    return float(((x * y).sum(0).square() / x.square().sum(0).clamp_min(1e-300)).sum()) / size if size else 0.0


class ValueTables:
    """Tables by token id other than the embedding, in parts of a requested width."""

    def __init__(self, trace: Trace, embed: Embedding | None) -> None:
        self.looked_up: dict[str, tuple[Execution, TracedTensor, Tensor, Any]] = {}  # lookup, vectors, rows, projection
        self.trace = trace
        self._parts: dict[int, dict[str, Table]] = {}
        embedding = None if embed is None else embed[0].kind if embed[0].name == LOOKUP else embed[0].name
        for run, entry in enumerate(trace.lookups):
            name = entry.parent.name if entry.parent and entry.kind == f"{entry.parent.name}.weight" else entry.kind
            is_embedding = embed is not None and (
                entry is embed[0] or embed[0].holds(entry.start) or name == embedding
            )  # fmt: skip
            if entry.reads_tokens and name and not is_embedding:
                for seen in entry.outputs:
                    if name in self.looked_up and not _same(self.looked_up[name][2], seen.rows):
                        name = f"{name}, lookup {run}"  # another part of one parameter
                    self.looked_up.setdefault(name, (entry, seen, seen.rows, None))
                    for projected, rows, through in _projected(trace, entry, name, seen.rows):
                        self.looked_up.setdefault(projected, (entry, seen, rows, through))

    def of(self, width: int) -> dict[str, Table]:
        """Return tables with rows of a width, by name; parts of wider ones are named by their columns."""
        if width not in self._parts:
            self._parts[width] = {
                name if rows.shape[1] == width else f"{name}[{start}:{start + width}]": Table(
                    entry.kind, lookup_index(self.trace, entry), rows[:, start : start + width], slice(start, start + width),
                    seen.axes, through,
                )
                for name, (entry, seen, rows, through) in self.looked_up.items() if rows.shape[1] % width == 0
                for start in range(0, rows.shape[1], width)
            }  # fmt: skip
        return self._parts[width]


def lookup_index(trace: Trace, entry: Execution) -> int:
    """Count the earlier lookups in the same parameter."""
    return sum(e.kind == entry.kind and e.start < entry.start for e in trace.lookups)


def _projected(
    trace: Trace, lookup: Execution, name: str, rows: Tensor
) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Yield name, rows and function of the parts that read nothing but looked-up vectors, or outputs of such parts."""

    def through(steps: tuple[Callable[[Tensor], Any], ...], x: Tensor) -> Any:
        for step in steps:
            x = step(x)
        return x

    known: list[tuple[Tensor, tuple[Callable[[Tensor], Any], ...]]] = [(rows, ())]
    for entry in trace.executions:
        if entry.start < lookup.end or len(entry.inputs) != 1 or len(entry.outputs) != 1 or entry.outputs[0].path:
            continue
        earlier = next((steps for made, steps in known if _same(made, entry.inputs[0].rows)), None)
        made = entry.outputs[0].rows
        if earlier is None or any(_same(made, x) for x, _ in known):
            continue
        if entry.name != MATRIX:
            step, label = trace.module.get_submodule(entry.name).forward, entry.name
        elif entry.call is not None:
            call = entry.call
            tensors = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
            factors = [x if x._base is None else x._base for x in tensors]
            parameters = (n for n, p in trace.module.named_parameters() if any(p is x for x in factors))
            step, label = call.run, f"{name} @ {next(parameters, 'a matrix')}"
        else:
            continue
        known.append((made, (*earlier, step)))
        yield label, made, partial(through, known[-1][1])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@dataclass(frozen=True)
class ValuePath:
    """One fitted value path of a layer: coefficients by source, for one head or all, and the residual."""

    layer: int
    into: str  # value, output (added between attention and W_O), query or key (before their rotation), stream
    coefficients: Mapping[Source, float]
    residual: float
    exact: bool
    head: int | None = None
    spread: Mapping[Source, float] = field(default_factory=dict)
    """Standard deviations over tokens of weights by token; the coefficients are then means."""

    is_normed: bool = False
    """Return whether a norm follows, so that coefficients are known up to a factor: they sum to 1."""

    @property
    def by_token(self) -> bool:
        """True if its weights depend on the token."""
        return bool(self.spread)


def fit_value_paths(layers: Sequence[LayerStructure], tables: Mapping[str, Table]) -> list[ValuePath]:
    """Fit every layer's value path, its mixed queries and keys, and additions to the attention's output."""
    owns = [layer.rows.get("own") for layer in layers]
    start = next((i for i, layer in enumerate(layers) if layer.is_read), None)
    if start is None:
        return []
    first = layers[start].attention.v if (own := owns[start]) is None else own
    name: Source = start or "first"
    paths: list[ValuePath] = []
    for i, layer in enumerate(layers):
        if not layer.is_read:
            continue
        for short, into in (("q", "query"), ("k", "key")):
            if (mix := layer.mixed.get(short)) is not None:
                weights = {name: mix.first, "own": mix.own}
                paths.append(ValuePath(i, into, weights, mix.residual, exact=True, is_normed=mix.is_normed))
                continue
            rows = [getattr(each.attention, short) for each in layers[: i + 1]]
            same = (j for j in range(i) if layers[j].is_read and rows[j].equal(rows[i]))
            if (j := next(same, None)) is not None:  # the earliest layer with these queries or keys
                paths.append(ValuePath(i, into, {"first" if j == 0 else j: 1.0}, 0.0, exact=True))
        v = layer.attention.v
        near: dict[Source, Tensor] = {name: first} if i > start else {}
        if (own := owns[i]) is not None:
            near["own"] = own
        far: dict[Source, Tensor] = {j: own for j, own in enumerate(owns[:i]) if j > start and own is not None}
        # a first layer whose values hold more than its matrices make has no sources: nothing of them is explained
        looked_up: dict[Source, Tensor] = {
            TABLE + n: table.rows.view(v.shape) for n, table in tables.items() if table.rows.shape == v.flatten(1).shape
        }
        paths += _fit_simplest(i, "value", v, near, far, looked_up)
        if layer.combination is not None:
            names, weights_of, spread = layer.combination.names, layer.combination.weights, layer.combination.spread
            shared = bool((weights_of - weights_of[:1]).abs().max() < 1e-5 * weights_of.abs().max())
            paths += [
                ValuePath(
                    i, "output", dict(zip(names, weights_of[head or 0].tolist(), strict=True)),
                    layer.combination.residual, exact=True, head=head,
                    spread=dict(zip(names, spread[head or 0].tolist(), strict=True))
                    if layer.combination.kind == GATED else {},
                )
                for head in ([None] if shared else range(len(weights_of)))
            ]  # fmt: skip
        elif (z := layer.rows.get("z")) is not None and z.shape == layer.attention.z.shape:
            added, most = z.double() - layer.attention.z.double(), SLACK.get(z.dtype, 1e-2) * float(z.double().norm())
            if (size := float(added.norm())) > most:
                here: dict[Source, Tensor] = {**({name: first} if i > start else {}), "own": v}
                repeated = {k: s.repeat_interleave(z.shape[1] // v.shape[1], dim=1) for k, s in here.items()}
                added_paths = _fit_simplest(i, "output", added.to(z.dtype), repeated, {}, {})
                # rounding is that of z; where there are no coefficients, `changed` describes W_O's input
                paths += [replace(p, exact=p.exact or p.residual * size < most) for p in added_paths if p.coefficients]
    return paths


def fit_streams(arriving: Sequence[StreamSum], layers: Sequence[LayerStructure]) -> list[ValuePath]:
    """Return the inputs of blocks and of the final norm (layer L) that are sums of several streams or outputs."""
    outputs = [f"{n}_{x}" for n, s in enumerate(layers) for x in ("attn_out", "mlp_out") if getattr(s, x) is not None]
    paths = []
    for layer, read in enumerate(arriving):
        if read.exact and not read.is_plain:
            streams = ["embed", *(f"block.{n}" for n in range(layer - 1)), "own"]
            names = streams if read.by_token is None else ["embed", *outputs][: len(read.weights)]
            weights: dict[Source, float] = dict(zip(names, read.weights, strict=True))
            spread: dict[Source, float] = dict(zip(names, read.spread, strict=False))
            paths.append(ValuePath(layer, "stream", weights, read.residual, exact=True, spread=spread))
    return paths


def _fit_simplest(
    layer: int, into: str, target: Tensor, near: Mapping[Source, Tensor], far: Mapping[Source, Tensor],
    tables: Mapping[Source, Tensor],
) -> list[ValuePath]:  # fmt: skip
    """Fit a target [row, head, d_head] by the simplest sum: constants of near sources, layers, a table or heads, then weights by token."""
    tolerance = EXACT.get(target.dtype, 1e-2)
    near = {k: s for k, s in near.items() if s.shape == target.shape}
    if 2 * (len(near) + 1) <= target.shape[-1]:  # tables that explain a few rows, with weights for each token
        few = [s[:_FEW] for s in near.values()]
        tables = {
            k: t for k, t in tables.items() if weights_by_token(target[:_FEW], [*few, t[:_FEW]])[1] < 10 * tolerance
        }  # fmt: skip
    every = near | {k: s for k, s in far.items() if s.shape == target.shape}
    values, residual = fit(target, list(near.values()))
    plain = ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance)
    if plain.exact:
        return [plain]
    own: dict[Source, Tensor] = {k: s for k, s in near.items() if k == "own"}
    others = {k: s for k, s in near.items() if k != "own"}
    for some in (every, *({**others, k: t, **own} for k, t in tables.items())):
        values, residual = fit(target, list(some.values()))
        if residual < tolerance:
            used = {k: s for (k, s), c in zip(some.items(), values, strict=True) if abs(c) > tolerance or k in near}
            values, residual = fit(target, list(used.values()))
            return [ValuePath(layer, into, dict(zip(used, values, strict=True)), residual, residual < 2 * tolerance)]
    heads = []
    for head in range(target.shape[1]):
        values, residual = fit(target[:, head], [s[:, head] for s in near.values()])
        heads.append(ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance, head))
    if all(path.exact for path in heads):
        return heads
    by_token = _fit_by_token(layer, target, own, {**others, **far, **tables}) if into == "value" else []
    return by_token or [plain if plain.residual <= LARGEST else replace(plain, coefficients={})]


def _fit_by_token(
    layer: int, target: Tensor, own: Mapping[Source, Tensor], others: Mapping[Source, Tensor]
) -> list[ValuePath]:
    """Fit a target [row, head, d_head] by the fewest sources, at most d_head / 2, with weights by token and head; empty if none fit."""
    tolerance = EXACT.get(target.dtype, 1e-2)
    others = {k: s for k, s in others.items() if s.shape == target.shape}
    sets = [own, *({k: s, **own} for k, s in others.items()), *({k: s} for k, s in others.items())]
    if "first" in others:
        sets += [{"first": others["first"], k: s, **own} for k, s in others.items() if k != "first"]
    for some in sets:
        if not some or 2 * len(some) > target.shape[-1]:
            continue
        weights, residual = weights_by_token(target, list(some.values()))
        if residual < tolerance:
            shared = float((weights - weights[:, :1]).abs().max()) < 10 * tolerance * float(weights.abs().max())
            return [
                ValuePath(
                    layer, "value", dict(zip(some, w.mean(0).tolist(), strict=True)), residual, exact=True, head=head,
                    spread=dict(zip(some, w.std(0, correction=0).tolist(), strict=True)),
                )
                for head in ([None] if shared else range(target.shape[1])) for w in [weights[:, head or 0]]
            ]  # fmt: skip
    return []


class PathTable(pd.DataFrame):
    """A table with exact numbers, which a notebook shows rounded."""

    def _repr_html_(self) -> str:
        shown = pd.DataFrame(self).dropna(axis=1, how="all").round(6)
        note = "no spread: a constant coefficient; " if "spread" in shown and shown["spread"].isna().any() else ""
        table = shown.to_html(index=False, na_rep="", float_format=lambda number: f"{number + 0.0:.4g}")  # -0 is 0
        return f"{table}<p>{note}rounded to 1e-6</p>"


def value_path_table(paths: Sequence[ValuePath]) -> PathTable:
    """Return one row per layer and source: layer, source, coefficient, spread (of weights by token), residual, head, into."""
    rows: list[dict[str, Any]] = [
        {
            "layer": p.layer, "source": s, "coefficient": c, "spread": p.spread.get(s, float("nan")), "residual": p.residual,
            "head": p.head, "into": p.into,
        }
        for p in paths for s, c in (p.coefficients or {UNEXPLAINED: float("nan")}).items()
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["layer", "source", "coefficient", "spread", "residual", "head", "into"])
    return PathTable(table.astype({"source": object, "head": "Int64"}))


def paths_in_words(paths: Sequence[ValuePath]) -> str:
    """Describe which layers read values that are not their own; empty if none does."""
    reads: dict[str, list[int]] = {}
    for path in (p for p in paths if p.into in ("value", "output")):
        for source, c in path.coefficients.items():
            if source != "own" and not str(source).startswith("attn.") and (path.by_token or abs(c) > NEGLIGIBLE):
                layer = f"layer {source}" if isinstance(source, int) else source
                name = "the first layer" if source == "first" else layer
                reads.setdefault(f"values of {name}", []).append(path.layer)
    layers = {what: sorted(set(of)) for what, of in reads.items()}
    return "; ".join(f"layer{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {what}" for what, of in layers.items())


def sharing_note(paths: Sequence[ValuePath]) -> str:
    """Describe which layers read nothing but another layer's values, and what replacing these means; empty if none does."""
    readers: dict[int, list[int]] = {}
    for path in paths:
        read = {0 if s == "first" else s for s, c in path.coefficients.items() if abs(c) > NEGLIGIBLE}
        alone = len(read) == 1 and all(isinstance(source, int) for source in read)
        if path.into == "value" and path.exact and alone and not path.by_token:
            readers.setdefault(int(read.pop()), []).append(path.layer)
    if not readers:
        return ""
    pairs = "; ".join(f"{', '.join(map(str, dict.fromkeys(them)))} those of {j}" for j, them in sorted(readers.items()))
    return f"layers read another's values ({pairs}): a change of its own_v reaches them all, one of v a single layer's attention"


@dataclass(frozen=True)
class Mixture:
    """The sources of a layer's values, for its hook points."""

    sources: tuple[int, ...] = ()  # other layers whose own values are in its effective ones, or added beside them
    table: str = ""  # module that looks values up by token id
    mixed: bool = False  # whether coefficients can be shown
    by_token: bool = False  # whether they are weights of each token and head
    order: tuple[Source, ...] = ()  # of these weights


def mixture_of(paths: Sequence[ValuePath], layer: int) -> Mixture:
    """Return the sources of a layer's values from fitted paths."""
    exact = [p for p in paths if p.layer == layer and p.exact]
    values = [p for p in exact if p.into == "value" and (p.head is None or p.by_token)]
    read = [s for p in values for s, c in p.coefficients.items() if s != "own" and (p.by_token or abs(c) > NEGLIGIBLE)]
    sources = {0 if s == "first" else s for s in read if s == "first" or isinstance(s, int)}
    outputs = [p.coefficients for p in exact if p.into == "output"]
    sources |= {0 for c in outputs if abs(c.get("first", 0.0)) > NEGLIGIBLE}
    table = next((s.removeprefix(TABLE) for s in read if isinstance(s, str) and s.startswith(TABLE)), "")
    mixed = any(p.layer == layer and p.into == "value" and set(p.coefficients) - {"own"} for p in paths)
    by_token = bool(table) or any(p.by_token for p in values)
    order = tuple(s for s in values[0].coefficients if s == "own" or s in read) if by_token else ()
    return Mixture(tuple(sorted(j for j in sources if isinstance(j, int))), table, mixed or by_token, by_token, order)
