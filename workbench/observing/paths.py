"""Where effective values come from: least squares of them on own projections and on earlier layers' values.

The fit is in float64 over all sampled positions, heads and dimensions, so that a float32 model gives its coefficients to
1e-6. `residual` is the share of the target's norm that the fit leaves: about 1e-7 where a path is exact in float32, and
large where something else than these sources is in the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.observing.anatomy import Layer
from workbench.observing.fitting import EXACT, fit

Source = str | int  # `first`, `own`, or the layer whose own values are read
SEEN = 1e-6  # coefficients below this are none
_SAME = 1e-3  # coefficients this near are one published constant


@dataclass(frozen=True)
class Path:
    """One fitted way into a layer's values (or output): coefficients by source, for one head or all, and what is left."""

    layer: int
    into: str  # value, or output: what is added between attention and W_O
    coefficients: Mapping[Source, float]
    residual: float
    exact: bool
    head: int | None = None


def paths_of(layers: Sequence[Layer]) -> list[Path]:
    """Every layer's value path, and its output path where something is added to the attention's output."""
    owns = [layer.rows.get("own") for layer in layers]
    first = owns[0] if owns[0] is not None else layers[0].attention.v
    owns[0] = first
    found: list[Path] = []
    for i, layer in enumerate(layers):
        near: dict[Source, Tensor] = {}
        if i:
            near["first"] = first
        if (own := owns[i]) is not None:
            near["own"] = own
        far: dict[Source, Tensor] = {j: own for j, own in enumerate(owns[:i]) if j and own is not None}
        found += _best(i, "value", layer.attention.v, near, far)
        if (z := layer.rows.get("z")) is not None:
            added = z.double() - layer.attention.z.double()
            if float(added.norm()) > 10 * EXACT.get(z.dtype, 1e-2) * float(z.double().norm()):
                wide = z.shape[1] // layer.attention.v.shape[1]
                here: dict[Source, Tensor] = {
                    k: s for k, s in {"first": first, "own": layer.attention.v}.items() if i or k == "own"
                }
                repeated = {k: s.repeat_interleave(wide, dim=1) for k, s in here.items()}
                found += _best(i, "output", added.to(z.dtype), repeated, {})
    return found


def _best(
    layer: int, into: str, target: Tensor, near: Mapping[Source, Tensor], far: Mapping[Source, Tensor]
) -> list[Path]:
    """The simplest set of sources that explains a target [row, head, d_head]: near ones, all, or a set for each head."""
    tolerance = EXACT.get(target.dtype, 1e-2)
    near = {k: s for k, s in near.items() if s.shape == target.shape}
    every = near | {k: s for k, s in far.items() if s.shape == target.shape}
    values, residual = fit(target, list(near.values()))
    plain = Path(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance)
    if plain.exact:
        return [plain]
    values, residual = fit(target, list(every.values()))
    if residual < tolerance:
        kept = {k: s for (k, s), c in zip(every.items(), values, strict=True) if abs(c) > tolerance or k in near}
        values, residual = fit(target, list(kept.values()))
        return [Path(layer, into, dict(zip(kept, values, strict=True)), residual, residual < 2 * tolerance)]
    heads = []
    for head in range(target.shape[1]):
        values, residual = fit(target[:, head], [s[:, head] for s in near.values()])
        heads.append(Path(layer, into, dict(zip(near, values, strict=True)), residual, residual < tolerance, head))
    return heads if all(path.exact for path in heads) else [plain]


def frame(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per layer and source: layer, source, coefficient, residual, head (where each has its own), into."""
    rows: list[dict[str, Any]] = [
        {"layer": p.layer, "source": s, "coefficient": c, "residual": p.residual, "head": p.head, "into": p.into}
        for p in paths for s, c in p.coefficients.items()
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["layer", "source", "coefficient", "residual", "head", "into"])
    return table.astype({"source": object, "head": "Int64"})


# ---- names -----------------------------------------------------------------------------------------------------------


def architecture_of(layers: Sequence[Layer], paths: Sequence[Path]) -> tuple[str, dict[str, Any], str]:
    """(name, options, what was seen in words): an architecture we know, `transformer`, or `unknown`."""
    values = [p for p in paths if p.into == "value"]
    outputs = [p for p in paths if p.into == "output"]
    parts: list[str] = []
    options: dict[str, Any] = {}
    if not all(p.exact for p in paths):
        worst = max(paths, key=lambda p: p.residual)
        return "unknown", {}, f"layer {worst.layer}: {worst.residual:.1e} of its {worst.into} is unexplained"
    if any(not _near(p.coefficients, {"own": 1.0}) for p in values):
        name, options = _value_name(values, layers)
        if name is None:
            return "unknown", {}, "values are mixed in a way of their own; see value_paths()"
        parts.append(name)
    if outputs:
        pulls = [p.coefficients for p in outputs]
        if any(abs(c.get("first", 0.0) + c["own"]) > _SAME for c in pulls) or any(p.head is not None for p in outputs):
            return "unknown", {}, "something is added to the attention's output; see value_paths()"
        parts.append("neutreno")
        options |= _constant("neutreno_lambda", [c.get("first", 0.0) for c in pulls])
    if (left := _averaged(layers)) is not None:
        if left > EXACT.get(layers[0].rows["in"].dtype, 1e-2):
            return "unknown", {}, f"between blocks the stream changes: sums of earlier outputs leave {left:.1e} of it"
        parts.append("denseformer")
    return "+".join(parts) or "transformer", options, ""


def _near(found: Mapping[Source, float], wanted: Mapping[Source, float]) -> bool:
    return all(abs(found.get(k, 0.0) - wanted.get(k, 0.0)) < _SAME for k in {*found, *wanted})


def _value_name(values: Sequence[Path], layers: Sequence[Layer]) -> tuple[str | None, dict[str, Any]]:
    later = [p for p in values if p.layer and not _near(p.coefficients, {"own": 1.0})]
    lent = {p.layer: s for p in later for s in p.coefficients if s != "own" and _near(p.coefficients, {s: 1.0})}
    if len(lent) == len(later):
        keys = {i: (layers[i].attention.k, layers[0 if s == "first" else int(s)].attention.k) for i, s in lent.items()}
        if all(torch.equal(*pair) for pair in keys.values()):
            return "cla", {}
        return "svformer", {"anchors": tuple(p.layer for p in values if p.layer not in lent)}
    if all(set(p.coefficients) <= {"first", "own"} and p.head is None for p in later):
        if all(abs(p.coefficients["first"]) < SEEN for p in later):
            return None, {}  # only scaled
        found: dict[str, Any] = _constant("lambda_v1", [p.coefficients["first"] for p in later])
        found |= _constant("lambda_own", [p.coefficients.get("own", 0.0) for p in later])
        return "resformer", found if len(later) == len(layers) - 1 else found | {
            "layers": tuple(p.layer for p in later)
        }
    if any(len(p.coefficients) > 2 for p in later) and all(p.head is None for p in later):
        return "resformer_dense", {}
    return None, {}


def _constant(name: str, values: Sequence[float]) -> dict[str, float]:
    """An option, where all layers share it."""
    mean = sum(values) / len(values)
    return {name: mean} if max(abs(v - mean) for v in values) < _SAME else {}


def _averaged(layers: Sequence[Layer]) -> float | None:
    """What weighted sums of the embedding and earlier blocks' outputs leave of the blocks' inputs; None where these are plain."""
    left = None
    for i, layer in enumerate(layers[1:], 1):
        rows = layer.rows["in"]
        if not torch.equal(rows, layers[i - 1].rows["out"]):
            sources = [layers[0].rows["in"], *(earlier.rows["out"] for earlier in layers[:i])]
            left = max(left or 0.0, fit(rows, sources)[1])
    return left
