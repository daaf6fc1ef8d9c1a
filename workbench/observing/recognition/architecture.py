"""The registered architecture of a decoder, from its value paths, output paths and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.observing.recognition.decoder_structure import DecoderStructure, LayerStructure
from workbench.observing.recognition.layer_outputs import CHANGED, GATE
from workbench.observing.recognition.least_squares import depth_weights, weights_by_token
from workbench.observing.recognition.value_paths import NEGLIGIBLE, TABLE, Source, ValuePath

_SAME = 1e-3  # coefficients this near are one published constant


class _Unknown(Exception):
    """The reason why a decoder has no registered architecture."""


Named = tuple[list[str], dict[str, Any]]
"""Names of shortcuts and their options."""


def recognize_architecture(structure: DecoderStructure, paths: Sequence[ValuePath]) -> tuple[str, dict[str, Any], str]:
    """Return name and options of a registered architecture and "", or "unknown", no options and the reason."""
    layers = structure.layers
    if not all(layer.is_read for layer in layers):
        return "unknown", {}, ""
    parts: list[str] = []
    options: dict[str, Any] = {}
    try:
        if not layers[0].has_stream and not layers[0].inline:
            raise _Unknown("the inputs and outputs of its blocks are no stream, so what is between them is unknown")
        own = next((i for i, layer in enumerate(layers) if len(layer.parts) > 1 and layer.z is None), None)
        if own is not None:
            raise _Unknown(f"block {own} has {len(layers[own].parts)} attentions, each with its own W_O")
        if not all(p.exact for p in paths):
            worst = max(paths, key=lambda p: p.residual)
            raise _Unknown(f"layer {worst.layer}: {worst.residual:.1e} of its {worst.into} is unexplained")
        values = _values([p for p in paths if p.into == "value"], layers)
        for names, more in (values, _outputs(paths, layers)):
            parts, options = parts + names, options | more
        for into in ("query", "key"):
            every = [p for p in paths if p.into == into]
            mixed = [p for p in every if abs(p.coefficients.get("own", 0.0)) > _SAME]
            if len(mixed) < len(every) and values[0] != ["cla"]:  # whose layers read another's keys too
                raise _Unknown(f"layers read another's {into} vectors; see value_paths()")
            if mixed:
                parts.append(f"residual_{into[0]}")
            if mixed and not any(p.is_normed for p in mixed):
                options |= _constant(f"lambda_{into[0]}1", [p.coefficients["first"] for p in mixed])
                options |= _constant(f"lambda_{into[0]}_own", [p.coefficients["own"] for p in mixed])
        names, more = _streams(structure)
        parts, options = parts + names, options | more
    except _Unknown as reason:
        return "unknown", {}, str(reason)
    return "+".join(parts) or "transformer", options, ""


def _values(values: Sequence[ValuePath], layers: Sequence[LayerStructure]) -> Named:
    """Name mixtures of values, by token or constant, and their options."""
    changed = [p for p in values if p.by_token or not _near(p.coefficients, {"own": 1.0})]
    if not changed:
        return [], {}
    if gated := [p for p in values if p.by_token]:
        kinds = {"table" if _is_table(s) else s for p in gated for s in p.coefficients}
        own = [(p.coefficients["own"], p.spread["own"]) for p in gated if "own" in p.coefficients]
        plain = len(own) == len(gated) and all(abs(c - 1) < _SAME and spread < _SAME for c, spread in own)
        if plain and len(changed) == len(gated) and kinds in ({"first", "own"}, {"table", "own"}):
            return ["satformer" if "first" in kinds else "gated_value_embedding"], {}
        if kinds == {"own"} and len({p.layer for p in gated}) == len(layers):
            weights = [weights_by_token(layer.attention.v, [layer.rows["own"]])[0][..., 0] for layer in layers]
            if all(bool((w > 0).all() and (w < 1).all()) for w in weights):
                squares = [layer.rows["own"].double().square().sum(-1) for layer in layers]
                missing = [r * (1 / w - 1) for r, w in zip(squares, weights, strict=True)]  # C, where w = r / (r + C)
                same = all(bool((c.std(0) < 1e-2 * c.mean(0)).all()) for c in missing)
                return ["value_scale" if same else "value_gate"], {}
        sources = list(dict.fromkeys(s for p in gated for s in p.coefficients if p.spread[s] > _SAME))
        looked_up = any(_is_table(s) for s in sources)
        known = " (as in nanochat's value embeddings)" if looked_up else ""
        known = known or " (as in SATFormer)" * ("first" in sources)
        of = " and ".join(str(s) if isinstance(s, str) else f"layer {s}" for s in sources)
        numbers = ", ".join(map(str, dict.fromkeys(p.layer for p in gated)))
        gates = f"gates on {of}{known}; see value_paths()"
        raise _Unknown(f"values are weighted by token in layers {numbers}: {gates}")
    unregistered = _Unknown("values are mixed in an unregistered way; see value_paths()")
    if looked_up_in := [p for p in values if any(_is_table(s) for s in p.coefficients)]:
        if not all(set(p.coefficients) <= {"own"} or abs(p.coefficients.get("first", 0.0)) < _SAME for p in values):
            raise unregistered
        replaced = all(abs(c) < _SAME for p in looked_up_in for s, c in p.coefficients.items() if not _is_table(s))
        return ["bank_of_values" if replaced else "value_embedding"], {}
    later = [p for p in changed if p.layer]
    shared = {p.layer: s for p in later for s in p.coefficients if s != "own" and _near(p.coefficients, {s: 1.0})}
    if len(shared) == len(later):
        k = [layer.attention.k for layer in layers]
        if all(torch.equal(k[i], k[0 if s == "first" else int(s)]) for i, s in shared.items()):
            return ["cla"], {}
        return ["svformer"], {"anchors": tuple(p.layer for p in values if p.layer not in shared)}
    if all(set(p.coefficients) <= {"first", "own"} and p.head is None for p in later):
        first = [p.coefficients.get("first", 0.0) for p in later]
        if all(abs(c) < NEGLIGIBLE for c in first):
            raise unregistered  # only scaled
        options: dict[str, Any] = _constant("lambda_v1", first)
        options |= _constant("lambda_own", [p.coefficients.get("own", 0.0) for p in later])
        if len(later) < len(layers) - 1:
            options["layers"] = tuple(p.layer for p in later)
        return ["resformer"], options
    if any(len(p.coefficients) > 2 for p in later) and all(p.head is None for p in later):
        return ["resformer_dense"], {}
    raise unregistered


def _outputs(paths: Sequence[ValuePath], layers: Sequence[LayerStructure]) -> Named:
    """Name additions to the attention's output, and gates before W_O if each number's is between 0 and 1 in all layers."""
    outputs = [p for p in paths if p.into == "output"]
    if combined := next((p for p in outputs if not {"first", "own"} & set(p.coefficients)), None):
        names = " and ".join(map(str, combined.coefficients))
        how = "weighs by token (gates)" if combined.by_token else "combines (differential attention)"
        raise _Unknown(f"what W_O reads {how} {names}; see value_paths()")
    pulls = [p.coefficients for p in outputs]
    if any(abs(c.get("first", 0.0) + c["own"]) > _SAME for c in pulls) or any(p.head is not None for p in outputs):
        raise _Unknown("something is added to the attention's output; see value_paths()")
    changed = [i for i, layer in enumerate(layers) if layer.changed == CHANGED]
    if changed:
        raise _Unknown(f"layer {changed[0]}: {CHANGED}")
    gates = [layer.rows["z"].double() / layer.attention.z.double() for layer in layers if layer.changed == GATE]
    gated = len(gates) == len(layers) and all(bool(((g > 0) & (g < 1) | g.isnan()).all()) for g in gates)
    options = _constant("neutreno_lambda", [c.get("first", 0.0) for c in pulls]) if pulls else {}
    return ["neutreno"] * bool(pulls) + ["gated_attention"] * gated, options


def _streams(structure: DecoderStructure) -> Named:
    """Name sums of earlier streams or outputs in the inputs of blocks.

    In Attention Residuals every sublayer and the final norm read a softmax over earlier outputs, alone or beside their sum (delta).
    """
    layers, arriving = structure.layers, structure.arriving
    for i, layer in enumerate(layers):
        if not (layer.adds or layer.adds_norms or layer.is_normed or layer.inline):
            raise _Unknown(f"what block {i} adds to its stream was not found")
    if any(layer.keeps != (1.0, 0.0) for layer in layers):
        raise _Unknown("blocks scale or drop the stream they read, or add the first block's input again")
    mixed = [s for s in arriving[:-1] if not s.is_plain]
    if not all(s.exact for s in mixed):
        left = max(s.residual for s in mixed)
        raise _Unknown(f"between blocks the stream changes: sums of earlier outputs leave {left:.1e} of it")
    inner = any(s is not None and s.exact and not s.is_plain for s in structure.between)
    if not inner and all(s.by_token is None for s in arriving):
        again = [s.weights for s in mixed if all(abs(w) < _SAME for w in s.weights[1:-1])]
        if len(again) < len(mixed):
            return ["denseformer"], {}
        if not again:
            return [], {}
        options = _constant("lambda_h1", [w[0] for w in again]) | _constant("lambda_h_own", [w[-1] for w in again])
        return ["residual_hidden"], options
    outputs, read = [layers[0].rows["in"]], list[Tensor]()
    for i, layer in enumerate(layers):
        after = layers[i + 1].rows["in"] if i + 1 < len(layers) else structure.last_stream
        for name, rows in (("attn_out", layer.rows.get("mid")), ("mlp_out", after)):
            if rows is None:
                raise _Unknown("streams are sums of earlier outputs by token, but the MLPs' inputs were not found")
            outputs.append(layer.rows[name])
            read.append(depth_weights(rows, outputs)[0])
    *before, last = read
    heads = {"depth_heads": last.shape[-2]} if last.shape[-2] > 1 else {}
    alike = (last[..., 1:-1] - last[..., 2:]).abs().amax((0, 1)) < _SAME  # outputs of one sum have one weight
    begins = [0, 1, *(i + 2 for i in range(len(alike)) if not alike[i])]
    if all(map(_is_softmax, read)):
        return ["attention_residuals"], heads
    if all(_is_softmax(w[..., [j for j in begins if j < w.shape[-1]]]) for w in read):
        return ["attention_residuals"], heads | {"depth_blocks": len(begins) - 1}
    if all(_is_softmax(w - 1) for w in before) and bool(((last - 1).abs() < _SAME).all()):
        return ["attention_residuals"], heads | {"depth_form": "delta"}
    constant = all(bool((w.std(0, correction=0) < _SAME).all()) for w in read)
    how = "with constant weights" if constant else "weighted by token"
    raise _Unknown(f"inputs of blocks or their MLPs are sums of earlier outputs, {how}; see value_paths()")


def _is_softmax(weights: Tensor) -> bool:
    return bool((weights > -_SAME).all() and ((weights.sum(-1) - 1).abs() < _SAME).all())


def _is_table(source: Source) -> bool:
    return str(source).startswith(TABLE)


def _near(one: Mapping[Source, float], other: Mapping[Source, float]) -> bool:
    return all(abs(one.get(k, 0.0) - other.get(k, 0.0)) < _SAME for k in {*one, *other})


def _constant(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return an option if all layers share its value."""
    mean = sum(values) / len(values)
    return {name: mean} if max(abs(v - mean) for v in values) < _SAME else {}
