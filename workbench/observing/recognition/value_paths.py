"""Where effective values come from: least squares of them on own projections and on earlier layers' values.

The fit is in float64 over all sampled positions, heads and dimensions, so that a float32 model gives its coefficients to
1e-6. `residual` is the share of the target's norm that the fit leaves: about 1e-7 where a path is exact in float32, and
large where the values hold more than these sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from workbench.observing.recognition.least_squares import EXACT, fit
from workbench.observing.recognition.structure import LayerStructure

Source = str | int  # `first`, `own`, or the layer whose own values are read
NEGLIGIBLE = 1e-6  # coefficients below this are zero


@dataclass(frozen=True)
class ValuePath:
    """One fitted value path of a layer: coefficients by source, for one head or all, and what the fit leaves."""

    layer: int
    into: str  # value, or output: what is added between attention and W_O
    coefficients: Mapping[Source, float]
    residual: float
    exact: bool
    head: int | None = None


def explained(heads: Tensor, z: Tensor, v: Tensor, first: Tensor) -> bool:
    """Whether head outputs [row, head, d_head] are the attention's, plus at most a sum of its and the first layer's values."""
    tolerance = EXACT.get(heads.dtype, 1e-2)
    added = heads.double() - z.double()
    if float(added.norm()) <= 10 * tolerance * float(heads.double().norm()):
        return True
    if v.shape != first.shape or v.shape[2] != z.shape[2]:
        return False
    return fit(added, [x.repeat_interleave(z.shape[1] // v.shape[1], dim=1) for x in (v, first)])[1] < 10 * tolerance


def fit_value_paths(layers: Sequence[LayerStructure]) -> list[ValuePath]:
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
        near: dict[Source, Tensor] = {name: first} if i > start else {}
        if (own := owns[i]) is not None:
            near["own"] = own
        far: dict[Source, Tensor] = {j: own for j, own in enumerate(owns[:i]) if j > start and own is not None}
        # a first layer whose values hold more than its matrices make has no sources: nothing of them is explained
        paths += _fit_simplest(i, "value", layer.attention.v, near, far)
        if (z := layer.rows.get("z")) is not None:
            added = z.double() - layer.attention.z.double()
            if float(added.norm()) > 10 * EXACT.get(z.dtype, 1e-2) * float(z.double().norm()):
                wide = z.shape[1] // layer.attention.v.shape[1]
                here: dict[Source, Tensor] = {name: first} if i > start else {}
                here["own"] = layer.attention.v
                repeated = {k: s.repeat_interleave(wide, dim=1) for k, s in here.items()}
                paths += _fit_simplest(i, "output", added.to(z.dtype), repeated, {})
    return paths


def _fit_simplest(
    layer: int, into: str, target: Tensor, near: Mapping[Source, Tensor], far: Mapping[Source, Tensor]
) -> list[ValuePath]:
    """The simplest set of sources that explains a target [row, head, d_head]: near ones, all, or a set for each head."""
    tolerance = EXACT.get(target.dtype, 1e-2)
    near = {k: s for k, s in near.items() if s.shape == target.shape}
    every = near | {k: s for k, s in far.items() if s.shape == target.shape}
    values, residual = fit(target, list(near.values()))
    plain = ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance)
    if plain.exact:
        return [plain]
    values, residual = fit(target, list(every.values()))
    if residual < tolerance:
        kept = {k: s for (k, s), c in zip(every.items(), values, strict=True) if abs(c) > tolerance or k in near}
        values, residual = fit(target, list(kept.values()))
        return [ValuePath(layer, into, dict(zip(kept, values, strict=True)), residual, residual < 2 * tolerance)]
    heads = []
    for head in range(target.shape[1]):
        values, residual = fit(target[:, head], [s[:, head] for s in near.values()])
        heads.append(ValuePath(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance, head))
    return heads if all(path.exact for path in heads) else [plain]


def value_path_table(paths: Sequence[ValuePath]) -> pd.DataFrame:
    """One row per layer and source: layer, source, coefficient, residual, head (where each has its own), into."""
    rows: list[dict[str, Any]] = [
        {"layer": p.layer, "source": s, "coefficient": c, "residual": p.residual, "head": p.head, "into": p.into}
        for p in paths for s, c in p.coefficients.items()
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["layer", "source", "coefficient", "residual", "head", "into"])
    return table.astype({"source": object, "head": "Int64"})


def sharing_note(paths: Sequence[ValuePath]) -> str:
    """Which layers read nothing but another layer's values, and what replacing these means; empty where none does."""
    readers: dict[int, list[int]] = {}
    for path in paths:
        read = {0 if s == "first" else s for s, c in path.coefficients.items() if abs(c) > NEGLIGIBLE}
        if path.into == "value" and path.exact and len(read) == 1 and "own" not in read:
            readers.setdefault(int(read.pop()), []).append(path.layer)
    if not readers:
        return ""
    pairs = "; ".join(f"{', '.join(map(str, dict.fromkeys(them)))} those of {j}" for j, them in sorted(readers.items()))
    return f"layers read another's values ({pairs}): a change of its own_v reaches them all, one of v a single layer's attention"


def value_sources(paths: Sequence[ValuePath], layer: int) -> tuple[int, ...]:
    """Layers whose own values are in the effective values of a layer, itself aside."""
    mine = [p for p in paths if p.layer == layer and p.exact]
    values = [p.coefficients for p in mine if p.into == "value" and p.head is None]
    sources = {0 if s == "first" else s for c in values for s, x in c.items() if s != "own" and abs(x) > NEGLIGIBLE}
    outputs = [p.coefficients for p in mine if p.into == "output"]
    sources |= {0 for c in outputs if abs(c.get("first", 0.0)) > NEGLIGIBLE}
    return tuple(sorted(j for j in sources if isinstance(j, int)))


def is_mixture(paths: Sequence[ValuePath], layer: int) -> bool:
    """Whether the effective values of a layer are fitted by more than its own."""
    return any(p.layer == layer and p.into == "value" and set(p.coefficients) - {"own"} for p in paths)
