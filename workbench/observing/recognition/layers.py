"""Where the tensors of a layer pass: its attentions' calls and projections, and its stream."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from workbench.observing.recognition.additions import Before, find_additions
from workbench.observing.recognition.blocks import INLINE, NUMBER, Block, number, stream_of
from workbench.observing.recognition.executions import MATRIX, Execution, rows_at
from workbench.observing.recognition.least_squares import fit_rotated
from workbench.observing.recognition.outputs import combination, find_output, find_output_of_addition
from workbench.observing.recognition.own_values import (
    OwnValues,
    find_own_values,
    own_beside_tables,
    product_rows,
    same_own_values,
)
from workbench.observing.recognition.projections import (
    Projection,
    TensorLocation,
    find_projection,
    run_index,
    same_projection,
)
from workbench.observing.recognition.structure import GATED, LayerStructure, Mixed, Part, Scope
from workbench.observing.recognition.trace import Trace, is_matrix
from workbench.observing.recognition.traced_attention import BY_HAND, UNREAD, TracedAttention, stacked
from workbench.observing.recognition.value_tables import ValueTables

_ROLES = {
    "fused": ("fused",),
    "eager": ("scores", "softmax", "values"),
    BY_HAND: ("scores", "values"),
}
"""What the calls are for that an attention is made of, by its kind."""
_KINDS = {"scores": "product", "values": "product"}
"""Kind of a call by what it is for, where that is another word."""


def recognize_layers(trace: Trace, blocks: list[Block], tables: ValueTables) -> list[LayerStructure]:
    """The layers of a traced run: each block's run with the attentions in it."""
    layers = [_layer(trace, attentions, block) for attentions, block in blocks]
    places = [(layer, block) for layer, (_, block) in zip(layers, blocks, strict=True)]
    _find_projections(trace, [(layer, block) for layer, block in places if layer.is_read], tables)
    before, first = Before(layers[0].rows["in"]), next((layer for layer in layers if layer.is_read), layers[0])
    for layer, block in places:
        inside = inside_of(trace, block)
        find_additions(trace, layer, block, inside, before)
        before.follow(layer)
        if layer.is_read:
            find_output_of_addition(trace, layer, inside, first.attention.v)
            _find_calls(trace, layer, block)
    return layers


def _layer(trace: Trace, attentions: list[TracedAttention], block: Execution) -> LayerStructure:
    inline = block.kind == INLINE
    streams = (block.inputs[0], block.outputs[0]) if inline else stream_of(trace, block)
    assert streams is not None
    run = sum(e.name == block.name and e.start < block.start for e in trace.executions)
    rows = {"in": streams[0].rows, "out": streams[1].rows}
    none = rows["in"].new_zeros(0)
    unread = TracedAttention(UNREAD, block, (), 0, 0, 1, none, none, none, none, "", exact=False)
    together = stacked(attentions) if attentions else unread
    parts = [Part(attention, {}) for attention in attentions]
    layer = LayerStructure(block.name, run, streams[0].path, streams[1].path, parts, together, rows=rows)
    if inline:
        inside = [e for e in inside_of(trace, block) if e.name != MATRIX]
        layer.inline = tuple(dict.fromkeys(e.name for e in inside))
        reader = next(e for e in inside if any(s is streams[0] for s in e.inputs))
        layer.stream = TensorLocation(reader.name, run_index(reader, inside), streams[0].path)
    return layer


def _find_calls(trace: Trace, layer: LayerStructure, block: Execution) -> None:
    """The innermost run of a module in which all calls of a layer's attentions are made, and which of its calls they are."""
    products = [e for e in inside_of(trace, block) if e.name == MATRIX]
    matrices = [products[location.run] for _, _, location in _matrices(layer)]
    around = [part.attention.within.stack() for part in layer.parts] + [e.parent.stack() for e in matrices if e.parent]
    shared = [e for e in around[0] if all(any(e is other for other in stack) for stack in around)]
    scope = shared[-1] if block.kind != INLINE else block
    if block.kind != INLINE:
        layer.scope = Scope(scope.name, run_index(scope, (block, *inside_of(trace, block))))
    counts = dict[str, int]()
    at: dict[int, tuple[str, int]] = {}
    for time, kind in trace.calls:
        if scope.start < time < scope.end:
            at[time] = kind, counts.get(kind, 0)
            counts[kind] = at[time][1] + 1
    for part in layer.parts:
        roles = _ROLES[part.attention.kind]
        part.calls = {at[time]: role for time, role in zip(part.attention.times, roles, strict=True)}
    within = [e for e in trace.executions if scope.start < e.start < scope.end]
    for owner, name, location in _matrices(layer):
        setattr(owner, name, replace(location, run=run_index(products[location.run], within)))


def _matrices(layer: LayerStructure) -> list[tuple[LayerStructure | Part, str, TensorLocation]]:
    """Bare products that a layer is made of: its queries, keys and values, W_O, and what it adds to its stream."""
    owners: list[tuple[LayerStructure | Part, str]] = [(part, name) for part in layer.parts for name in ("q", "k", "v")]
    owners += [(layer, name) for name in ("z", "attn_out", "mlp_out")]
    places = [(owner, name, getattr(owner, name)) for owner, name in owners]
    return [(owner, name, at) for owner, name, at in places if at is not None and at.module == MATRIX]


def inside_of(trace: Trace, block: Execution) -> list[Execution]:
    """Executions within that of a block."""
    return [e for e in trace.executions if block.start < e.start < block.end]


def _find_projections(trace: Trace, read: list[tuple[LayerStructure, Execution]], tables: ValueTables) -> None:
    """Find q, k and v where their numbers show them; a mixed value's projection is that of a block where it is plain."""
    plain = dict[int, tuple[LayerStructure, OwnValues]]()  # by number of the attention in its block
    for layer, block in read:
        for n, part in enumerate(layer.parts):
            attention = part.attention
            before = [e for e in inside_of(trace, block) if e.end < attention.times[-1]]
            part.q = find_projection(before, attention.q, starts=trace.starts)
            part.k = find_projection(before, attention.k, starts=trace.starts)
            if (own := find_own_values(trace.module, before, attention.v)) is not None:
                part.v = own.place
                plain.setdefault(n, (layer, own))
    first = read[0][0] if read else None
    for layer, block in read:
        inside = inside_of(trace, block)
        for n, part in enumerate(layer.parts):
            if part.v is None and n in plain:
                known, own = plain[n]
                part.v = same_own_values(trace.module, inside, own, partial(_renamed, was=known, now=layer))
            if part.v is None and (some := tables.of(part.attention.v.flatten(1).shape[1])):
                before = [e for e in inside if e.end < part.attention.times[-1]]
                looked_up = [table.rows for table in some.values()]
                beside = own_beside_tables(trace.module, before, part.attention.v, looked_up)
                part.v = None if beside is None else beside.place
            part.latent = _latent(trace, layer, part, block)
            if part.v is not None:
                part.own = part.v.heads_in(_output_rows(trace, block, part.v))
        owns = [part.own for part in layer.parts if part.own is not None]
        if len(owns) == len(layer.parts) and (own_values := beside_each_other(layer, owns)) is not None:
            layer.rows["own"] = own_values
        assert first is not None
        find_output(trace, layer, inside, first.attention.v, block)
    for name in ("q", "k") if read and all(len(layer.parts) == 1 for layer, _ in read) else ():
        _find_mixed(trace, read, name)
        _find_mixed_and_normed(trace, read, name)


def beside_each_other(layer: LayerStructure, owns: list[Tensor]) -> Tensor | None:
    """Own values [row, kv_head, d_head] of all a layer's attentions, their heads as those of its effective values."""
    repeats = [
        layer.attention.kv_heads * part.attention.heads // (layer.attention.heads * part.attention.kv_heads)
        for part in layer.parts
    ]
    return torch.cat([own.repeat_interleave(n, dim=1) for own, n in zip(owns, repeats, strict=True)], dim=1)


def _find_mixed(trace: Trace, read: list[tuple[LayerStructure, Execution]], name: str) -> None:
    """Queries or keys that no output holds, where they are the first layer's and their own, each times a number."""
    first, block = read[0]
    known: Projection | None = getattr(first.parts[0], name)
    if known is None:
        return
    sources = known.heads_in(_output_rows(trace, block, known))
    for layer, block in read[1:]:
        own = None
        if getattr(layer.parts[0], name) is None:
            own = same_projection(known, inside_of(trace, block), _renamed(known.module, first, layer))
        if own is not None:
            rows = own.heads_in(_output_rows(trace, block, own))
            pairs = [(getattr(at.attention, name), x) for at, x in ((first, sources), (layer, rows))]
            found = fit_rotated(*pairs, starts=trace.starts)
            if found is not None:
                layer.mixed[name] = Mixed(*found)


def _find_mixed_and_normed(trace: Trace, read: list[tuple[LayerStructure, Execution]], name: str) -> None:
    """Queries or keys that are a norm of the first layer's and their own: only the ratio of their weights is known, which sum to 1."""
    known, source = None, None
    for layer, block in read:
        part, inside = layer.parts[0], inside_of(trace, block)
        place: Projection | None = getattr(part, name)
        heads = getattr(part.attention, name) if place is None else place.heads_in(_output_rows(trace, block, place))
        before = [e for e in inside if e.end < part.attention.times[-1]]
        plain = find_own_values(trace.module, before, heads)
        if known is None:
            if plain is None:
                return
            known, first, source = plain, layer, product_rows(trace.module, before, plain, heads.shape[1])
        elif plain is None and name not in layer.mixed and source is not None:
            own = same_own_values(trace.module, before, known, partial(_renamed, was=first, now=layer))
            found = None
            if own is not None and heads.shape == source.shape:
                found = combination(heads, ("first", "own"), [source, own.heads_in(_output_rows(trace, block, own))])
            if found is not None and found.kind != GATED:
                a, b = (found.weights.mean(0) / found.weights.mean(0).sum()).tolist()
                layer.mixed[name] = Mixed(a, b, found.residual, True)


def _latent(trace: Trace, layer: LayerStructure, part: Part, block: Execution) -> TensorLocation | None:
    """The compressed state that a block's values are projected from: what their matrix reads, narrower than what it makes."""
    if part.v is None or part.v.module == MATRIX:
        return None
    inside = inside_of(trace, block)
    entry = [e for e in inside if e.name == part.v.module][part.v.run]
    widest, made = layer.rows["in"].shape[1], _output_rows(trace, block, part.v).shape[1]
    if not is_matrix(trace, entry) or len(entry.inputs) != 1:
        return None
    narrow = entry.inputs[0].rows.shape[1] < min(widest, made)
    return TensorLocation(entry.name, run_index(entry, inside), entry.inputs[0].path) if narrow else None


def _renamed(name: str, was: LayerStructure, now: LayerStructure) -> str:
    if not now.inline:
        return now.block + name.removeprefix(was.block)
    return re.sub(NUMBER, str(number(now.inline[0])), name, count=1)


def _output_rows(trace: Trace, block: Execution, location: TensorLocation) -> Tensor:
    entry = [e for e in inside_of(trace, block) if e.name == location.module][location.run]
    rows = rows_at(entry.outputs, location.path)
    assert rows is not None
    return rows


def mlp_width(trace: Trace, layer: LayerStructure, block: Execution) -> int:
    """Width of the hidden layer of a layer's MLP, 0 where it was not found."""
    if layer.mlp_out is None:
        return 0
    stream = layer.rows["in"].shape[1]
    if layer.mlp_out.module == MATRIX:
        made = layer.rows["mlp_out"] / layer.mlp_out.factor
        bare = [e for e in inside_of(trace, block) if e.name == MATRIX and e.inputs]
        return next((e.inputs[0].rows.shape[1] for e in bare if any(torch.equal(t.rows, made) for t in e.outputs)), 0)
    for entry in reversed([e for e in inside_of(trace, block) if e.name.startswith(layer.mlp_out.module)]):
        width = entry.inputs[0].rows.shape[1] if entry.inputs else 0
        if width and is_matrix(trace, entry) and any(t.rows.shape[1] == stream for t in entry.outputs):
            return width
    return 0
