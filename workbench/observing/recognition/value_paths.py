"""Where effective values come from: least squares of them on own projections, earlier layers' values and tables by token id.

Coefficients are constants where constants explain the values; else a weight for each token and head (gates), where that does,
told by its mean and its spread.

The fit is in float64 over all sampled positions, heads and dimensions, so that a float32 model gives its coefficients to
1e-6. `residual` is the share of the target's norm that the fit leaves: about 1e-7 where a path is exact in float32, and
large where the values hold more than these sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token
from workbench.observing.recognition.stream_sums import StreamSum
from workbench.observing.recognition.structure import GATED, Combination, LayerStructure, Table

Source = (
    str | int
)  # `first`, `own`, the layer whose own values are read, or `table NAME`: the module that looks values up
TABLE = "table "
_FEW = 8  # rows that tell which tables may take part
NEGLIGIBLE = 1e-6  # coefficients below this are zero
LARGEST = 0.1
"""A fit that leaves more of the target's norm is no path: its coefficients are those of whatever correlates with the sources.

True paths leave 1e-7 (float32) to 2e-2 (bfloat16). What is none (gates, norms, tables that were not seen) leaves 0.2 or more.
"""
UNEXPLAINED = "unexplained"
"""Source of what no path explains, in tables."""


@dataclass(frozen=True)
class ValuePath:
    """One fitted value path of a layer: coefficients by source, for one head or all, and what the fit leaves."""

    layer: int
    into: str  # value, output (what is added between attention and W_O), query or key (before their rotation), stream
    coefficients: Mapping[Source, float]
    residual: float
    exact: bool
    head: int | None = None
    spread: Mapping[Source, float] = field(default_factory=dict)
    """Standard deviation over tokens, where weights depend on them; the coefficients are then means."""

    is_normed: bool = False
    """Whether a norm follows, so that coefficients are known but for a factor: they sum to 1."""

    @property
    def by_token(self) -> bool:
        """Whether its weights depend on the token."""
        return bool(self.spread)


def explained(heads: Tensor, z: Tensor, v: Tensor, first: Tensor) -> bool:
    """Whether head outputs [row, head, d_head] are the attention's, plus at most a sum of its and the first layer's values."""
    tolerance = EXACT.get(heads.dtype, 1e-2)
    if heads.shape != z.shape:
        return False
    added = heads.double() - z.double()
    if float(added.norm()) <= 10 * tolerance * float(heads.double().norm()):
        return True
    if v.shape != first.shape or v.shape[2] != z.shape[2]:
        return False
    return fit(added, [x.repeat_interleave(z.shape[1] // v.shape[1], dim=1) for x in (v, first)])[1] < 10 * tolerance


def fit_value_paths(layers: Sequence[LayerStructure], tables: Mapping[str, Table]) -> list[ValuePath]:
    """Every layer's value path, and its output path where something is added to the attention's output."""
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
            elif (j := _same(layers, i, short)) is not None:
                paths.append(ValuePath(i, into, {"first" if j == 0 else j: 1.0}, 0.0, exact=True))
        near: dict[Source, Tensor] = {name: first} if i > start else {}
        if (own := owns[i]) is not None:
            near["own"] = own
        far: dict[Source, Tensor] = {j: own for j, own in enumerate(owns[:i]) if j > start and own is not None}
        # a first layer whose values hold more than its matrices make has no sources: nothing of them is explained
        looked_up: dict[Source, Tensor] = {
            TABLE + n: table.rows.view(target.shape)
            for n, table in tables.items() if table.rows.shape == (target := layer.attention.v).flatten(1).shape
        }  # fmt: skip
        paths += _fit_simplest(i, "value", layer.attention.v, near, far, looked_up)
        if layer.combination is not None:
            paths += _combined(i, layer.combination)
        elif (z := layer.rows.get("z")) is not None and z.shape == layer.attention.z.shape:
            added = z.double() - layer.attention.z.double()
            if float(added.norm()) > 10 * EXACT.get(z.dtype, 1e-2) * float(z.double().norm()):
                wide = z.shape[1] // layer.attention.v.shape[1]
                here: dict[Source, Tensor] = {name: first} if i > start else {}
                here["own"] = layer.attention.v
                repeated = {k: s.repeat_interleave(wide, dim=1) for k, s in here.items()}
                added_paths = _fit_simplest(i, "output", added.to(z.dtype), repeated, {}, {})
                paths += [path for path in added_paths if path.coefficients]  # else `changed` says what W_O reads
    return paths


def _same(layers: Sequence[LayerStructure], i: int, name: str) -> int | None:
    """The earliest layer whose queries or keys a layer reads as they are."""
    rows = [getattr(layer.attention, name) for layer in layers[: i + 1]]
    return next((j for j in range(i) if layers[j].is_read and torch.equal(rows[j], rows[i])), None)


def _combined(layer: int, found: Combination) -> list[ValuePath]:
    """What W_O reads of several attentions, for all heads where they have the same weights."""
    same = bool((found.weights - found.weights[:1]).abs().max() < 1e-5 * found.weights.abs().max())
    paths = []
    for head in [None] if same else range(len(found.weights)):
        weights, spread = (
            dict[Source, float](zip(found.names, x[head or 0].tolist(), strict=True))
            for x in (found.weights, found.spread)
        )
        by_token = found.kind == GATED
        paths.append(
            ValuePath(
                layer,
                "output",
                weights,
                found.residual,
                exact=True,
                head=head,
                spread=spread if by_token else {},
            )
        )
    return paths


def fit_streams(arriving: Sequence[StreamSum], layers: Sequence[LayerStructure]) -> list[ValuePath]:
    """What blocks and the final norm (layer L) read, where that is a sum of several streams or outputs."""
    outputs = [
        "embed",
        *(f"{n}_{x}" for n, s in enumerate(layers) for x in ("attn_out", "mlp_out") if getattr(s, x) is not None),
    ]
    paths = []
    for layer, read in enumerate(arriving):
        if read.exact and not read.is_plain:
            stood = ["embed", *(f"block.{n}" for n in range(layer - 1)), "own"]
            names = stood if read.by_token is None else outputs[: len(read.weights)]
            weights: dict[Source, float] = dict(zip(names, read.weights, strict=True))
            spread: dict[Source, float] = dict(zip(names, read.spread, strict=False))
            paths.append(ValuePath(layer, "stream", weights, read.residual, exact=True, spread=spread))
    return paths


def _fit_simplest(
    layer: int, into: str, target: Tensor, near: Mapping[Source, Tensor], far: Mapping[Source, Tensor],
    tables: Mapping[Source, Tensor],
) -> list[ValuePath]:  # fmt: skip
    """The simplest that explains a target [row, head, d_head]: constants of near sources, of all, of a table beside the near
    ones, a set of constants for each head, weights for each token.
    """
    tolerance = EXACT.get(target.dtype, 1e-2)
    near = {k: s for k, s in near.items() if s.shape == target.shape}
    tables = _which_may(target, near, tables)
    every = near | {k: s for k, s in far.items() if s.shape == target.shape}
    values, residual = fit(target, list(near.values()))
    plain = ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance)
    if plain.exact:
        return [plain]
    for some in (every, *(_before_own(near, {k: t}) for k, t in tables.items())):
        values, residual = fit(target, list(some.values()))
        if residual < tolerance:
            kept = {k: s for (k, s), c in zip(some.items(), values, strict=True) if abs(c) > tolerance or k in near}
            values, residual = fit(target, list(kept.values()))
            return [ValuePath(layer, into, dict(zip(kept, values, strict=True)), residual, residual < 2 * tolerance)]
    heads = []
    for head in range(target.shape[1]):
        values, residual = fit(target[:, head], [s[:, head] for s in near.values()])
        heads.append(ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance, head))
    if all(path.exact for path in heads):
        return heads
    by_token = _fit_by_token(layer, target, near, {**far, **tables}) if into == "value" else []
    return by_token or [plain if plain.residual <= LARGEST else replace(plain, coefficients={})]


def _which_may(target: Tensor, near: Mapping[Source, Tensor], tables: Mapping[Source, Tensor]) -> dict[Source, Tensor]:
    """The tables that explain a few rows of a target beside near sources, with weights for each token."""
    few = {k: s[:_FEW] for k, s in near.items()}
    if 2 * (len(few) + 1) > target.shape[-1]:
        return dict(tables)
    tolerance = 10 * EXACT.get(target.dtype, 1e-2)
    return {
        k: t for k, t in tables.items() if weights_by_token(target[:_FEW], [*few.values(), t[:_FEW]])[1] < tolerance
    }


def _before_own(near: Mapping[Source, Tensor], more: Mapping[Source, Tensor]) -> dict[Source, Tensor]:
    """Sources in their order: others, own last."""
    return {k: s for k, s in {**near, **more}.items() if k != "own"} | {k: s for k, s in near.items() if k == "own"}


def _fit_by_token(
    layer: int, target: Tensor, near: Mapping[Source, Tensor], others: Mapping[Source, Tensor]
) -> list[ValuePath]:
    """The fewest sources of which weights for each token and head explain a target [row, head, d_head]; empty where none do.

    Each vector has its own weights, so at most half as many sources are tried as it has numbers.
    """
    tolerance = EXACT.get(target.dtype, 1e-2)
    own: dict[Source, Tensor] = {k: s for k, s in near.items() if k == "own"}
    beside: dict[Source, Tensor] = {
        k: s for k, s in {**near, **others}.items() if k != "own" and s.shape == target.shape
    }
    sets: list[dict[Source, Tensor]] = [
        own,
        *({k: s} | own for k, s in beside.items()),
        *({k: s} for k, s in beside.items()),
    ]
    if "first" in beside:
        sets += [{"first": beside["first"], k: s} | own for k, s in beside.items() if k != "first"]
    for some in sets:
        if not some or 2 * len(some) > target.shape[-1]:
            continue
        weights, residual = weights_by_token(target, list(some.values()))
        if residual < tolerance:
            shared = float((weights - weights[:, :1]).abs().max()) < 10 * tolerance * float(weights.abs().max())
            each: list[int | None] = [None] if shared else list(range(target.shape[1]))
            return [_of_tokens(layer, weights[:, head or 0], list(some), residual, head) for head in each]
    return []


def _of_tokens(layer: int, weights: Tensor, names: Sequence[Source], residual: float, head: int | None) -> ValuePath:
    """Mean and spread of weights [row, source]."""
    mean, spread = ([float(x) for x in stat] for stat in (weights.mean(0), weights.std(0, correction=0)))
    coefficients, spreads = dict(zip(names, mean, strict=True)), dict(zip(names, spread, strict=True))
    return ValuePath(layer, "value", coefficients, residual, exact=True, head=head, spread=spreads)


class PathTable(pd.DataFrame):
    """A table with its numbers as they are, of which a notebook shows what is more than rounding."""

    def _repr_html_(self) -> str:
        shown = pd.DataFrame(self).dropna(axis=1, how="all").round(6)
        said = "no spread: a constant coefficient; " if "spread" in shown and shown["spread"].isna().any() else ""
        table = shown.to_html(index=False, na_rep="", float_format=lambda number: f"{number + 0.0:.4g}")  # -0 is 0
        return f"{table}<p>{said}rounded to 1e-6</p>"


def value_path_table(paths: Sequence[ValuePath]) -> PathTable:
    """One row per layer and source: layer, source, coefficient, spread (of weights by token), residual, head, into."""
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
    """Which layers read values that are not their own; empty where none does."""
    reads: dict[str, list[int]] = {}
    for path in (p for p in paths if p.into in ("value", "output")):
        for source, c in path.coefficients.items():
            if source != "own" and not str(source).startswith("attn.") and (path.by_token or abs(c) > NEGLIGIBLE):
                name = (
                    "the first layer" if source == "first" else f"layer {source}" if isinstance(source, int) else source
                )
                reads.setdefault(f"values of {name}", []).append(path.layer)
    layers = {what: sorted(set(of)) for what, of in reads.items()}
    return "; ".join(f"layer{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {what}" for what, of in layers.items())


def sharing_note(paths: Sequence[ValuePath]) -> str:
    """Which layers read nothing but another layer's values, and what replacing these means; empty where none does."""
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
    """What a layer's values are a mixture of: what hook points show of it."""

    sources: tuple[
        int, ...
    ] = ()  # layers whose own values are in its effective ones, or added beside them; itself aside
    table: str = ""  # module that looks values up by token id
    mixed: bool = False  # whether coefficients can be shown
    by_token: bool = False  # whether they are weights of each token and head
    order: tuple[Source, ...] = ()  # of these weights


def mixture_of(paths: Sequence[ValuePath], layer: int) -> Mixture:
    """What the values of a layer are a mixture of."""
    mine = [p for p in paths if p.layer == layer and p.exact]
    values = [p for p in mine if p.into == "value" and (p.head is None or p.by_token)]
    read = [s for p in values for s, c in p.coefficients.items() if s != "own" and (p.by_token or abs(c) > NEGLIGIBLE)]
    sources = {0 if s == "first" else s for s in read if s == "first" or isinstance(s, int)}
    outputs = [p.coefficients for p in mine if p.into == "output"]
    sources |= {0 for c in outputs if abs(c.get("first", 0.0)) > NEGLIGIBLE}
    table = next((s.removeprefix(TABLE) for s in read if isinstance(s, str) and s.startswith(TABLE)), "")
    mixed = any(p.layer == layer and p.into == "value" and set(p.coefficients) - {"own"} for p in paths)
    by_token = bool(table) or any(p.by_token for p in values)
    order = tuple(s for s in values[0].coefficients if s == "own" or s in read) if by_token else ()
    return Mixture(tuple(sorted(j for j in sources if isinstance(j, int))), table, mixed or by_token, by_token, order)
