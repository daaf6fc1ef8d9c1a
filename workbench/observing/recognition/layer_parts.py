"""Layers of a traced run: the places of their attention calls, projections, W_O, and additions to the stream."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from workbench.observing.interception.call_sites import CallSite, Line, lines_within
from workbench.observing.recognition.attention_calls import BY_HAND, UNREAD, TracedAttention, stacked
from workbench.observing.recognition.decoder_structure import (
    GATED,
    CallScope,
    LayerStructure,
    Mixed,
    Part,
    Projection,
    TensorLocation,
)
from workbench.observing.recognition.find_blocks import INLINE, NUMBER, Block, block_number, streams_of_block
from workbench.observing.recognition.layer_outputs import EarlierStreams, find_additions, find_output, fit_combination
from workbench.observing.recognition.least_squares import fit_rotated
from workbench.observing.recognition.module_runs import MATRIX, Execution, rows_at, run_index
from workbench.observing.recognition.projections import (
    OwnValues,
    find_own_values,
    find_projection,
    own_beside_tables,
    product_rows,
    same_own_values,
    same_projection,
)
from workbench.observing.recognition.routers import find_router
from workbench.observing.recognition.traced_run import Trace, is_matrix
from workbench.observing.recognition.value_paths import ValueTables

_ROLES = {"fused": ("fused",), "eager": ("scores", "softmax", "values"), BY_HAND: ("scores", "values")}
"""Roles of the calls of an attention, by its kind."""


def recognize_layers(trace: Trace, blocks: list[Block], tables: ValueTables) -> list[LayerStructure]:
    """Return the layers of a traced run, one for each block's run with its attentions."""
    places: list[tuple[LayerStructure, Execution]] = []
    for attentions, block in blocks:
        inline = block.kind == INLINE
        streams = (block.inputs[0], block.outputs[0]) if inline else streams_of_block(trace, block)
        assert streams is not None
        rows = {"in": streams[0].rows, "out": streams[1].rows}
        none = rows["in"].new_zeros(0)
        unread = TracedAttention(UNREAD, block, (), 0, 0, 1, none, none, none, none, "", exact=False)
        layer = LayerStructure(
            block.name, run_index(block, trace.executions), streams[0].path, streams[1].path,
            [Part(attention, {}) for attention in attentions], stacked(attentions) if attentions else unread,
            rows=rows, axes=(streams[0].axes, streams[1].axes),
        )  # fmt: skip
        if inline:
            inside = [e for e in inside_of(trace, block) if e.name != MATRIX]
            layer.inline = tuple(dict.fromkeys(e.name for e in inside))
            reader = next(e for e in inside if any(s is streams[0] for s in e.inputs))
            layer.stream = TensorLocation.of(reader, streams[0], inside)
            layer.caller = block.parent.name if block.parent else ""
        places.append((layer, block))
    read = [(layer, block) for layer, block in places if layer.is_read]
    _find_projections(trace, read, tables)
    for name in ("q", "k") if read and all(len(layer.parts) == 1 for layer, _ in read) else ():
        _find_mixed(trace, read, name)
    before = EarlierStreams(places[0][0].rows["in"])
    for layer, block in places:
        find_additions(trace, layer, block, inside_of(trace, block), before)
        before.follow(layer)
        layer.router = find_router(inside_of(trace, block))
        if layer.is_read:
            _find_calls(trace, layer, block)
    return [layer for layer, _ in places]


def inside_of(trace: Trace, block: Execution) -> list[Execution]:
    """Return the executions within a block's."""
    return [e for e in trace.executions if block.start < e.start < block.end]


def _find_projections(trace: Trace, read: list[tuple[LayerStructure, Execution]], tables: ValueTables) -> None:
    """Find q, k and v by their numbers; mixed values have the projection of a block with plain ones, or one beside a table."""
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
    for layer, block in read:
        inside = inside_of(trace, block)
        for n, part in enumerate(layer.parts):
            v = part.attention.v
            if part.v is None and n in plain:
                known, own = plain[n]
                part.v = same_own_values(trace.module, inside, own, partial(_renamed, was=known, now=layer))
            if part.v is None and (some := tables.of(v.flatten(1).shape[1])):
                before = [e for e in inside if e.end < part.attention.times[-1]]
                part.v = own_beside_tables(trace.module, before, v, [table.rows for table in some.values()])
            if part.v is not None:
                part.own = part.v.heads_in(_output_rows(inside, part.v))
            if part.v is not None and part.v.module != MATRIX:
                # the compressed state behind values: the matrix's input, if narrower than the stream and the matrix's output
                entry = [e for e in inside if e.name == part.v.module][part.v.run]
                narrow = min(layer.rows["in"].shape[1], _output_rows(inside, part.v).shape[1])
                if is_matrix(trace, entry) and len(entry.inputs) == 1 and entry.inputs[0].rows.shape[1] < narrow:
                    part.latent = TensorLocation.of(entry, entry.inputs[0], inside)
        owns = [part.own for part in layer.parts if part.own is not None]
        if len(owns) == len(layer.parts):  # side by side, with as many heads as the layer's effective values have
            together = layer.attention
            each = [part.attention for part in layer.parts]
            repeats = [together.kv_heads * one.heads // (together.heads * one.kv_heads) for one in each]
            wide = [own.repeat_interleave(n, dim=1) for own, n in zip(owns, repeats, strict=True)]
            layer.rows["own"] = torch.cat(wide, dim=1)
        find_output(trace, layer, inside, read[0][0].attention.v, block)


def _find_mixed(trace: Trace, read: list[tuple[LayerStructure, Execution]], name: str) -> None:
    """Find queries or keys that are a sum of the first layer's and their own, or a norm of it with a known ratio of weights."""
    first, block = read[0]
    place: Projection | None = getattr(first.parts[0], name)
    if place is not None:
        source = place.heads_in(_output_rows(inside_of(trace, block), place))
        for layer, block in read[1:]:
            inside, own = inside_of(trace, block), None
            if getattr(layer.parts[0], name) is None:
                own = same_projection(place, inside, _renamed(place.module, first, layer))
            if own is not None:
                rows = own.heads_in(_output_rows(inside, own))
                pairs = [(getattr(at.attention, name), x) for at, x in ((first, source), (layer, rows))]
                if (mixture := fit_rotated(*pairs, starts=trace.starts)) is not None:
                    layer.mixed[name] = Mixed(*mixture)
    known: OwnValues | None = None
    for layer, block in read:
        part, inside = layer.parts[0], inside_of(trace, block)
        place = getattr(part, name)
        heads = getattr(part.attention, name) if place is None else place.heads_in(_output_rows(inside, place))
        before = [e for e in inside if e.end < part.attention.times[-1]]
        plain = find_own_values(trace.module, before, heads)
        if known is None:
            if plain is None:
                return
            known, first, source = plain, layer, product_rows(trace.module, before, plain, heads.shape[1])
        elif plain is None and name not in layer.mixed and heads.shape == source.shape:
            own = same_own_values(trace.module, before, known, partial(_renamed, was=first, now=layer))
            sources = [] if own is None else [source, own.heads_in(_output_rows(inside, own))]
            combined = fit_combination(heads, ("first", "own"), sources) if sources else None
            if combined is not None and combined.kind != GATED:
                a, b = (combined.weights.mean(0) / combined.weights.mean(0).sum()).tolist()
                layer.mixed[name] = Mixed(a, b, combined.residual, True)


def _renamed(name: str, was: LayerStructure, now: LayerStructure) -> str:
    """Return the name of the module in one layer that a module of another corresponds to."""
    if not now.inline:
        return now.block + name.removeprefix(was.block)
    return re.sub(NUMBER, str(block_number(now.inline[0])), name, count=1)


def _output_rows(inside: list[Execution], location: TensorLocation) -> Tensor:
    rows = rows_at([e for e in inside if e.name == location.module][location.run].outputs, location.path)
    assert rows is not None
    return rows


def _find_calls(trace: Trace, layer: LayerStructure, block: Execution) -> None:
    """Find the innermost run of a module that contains all calls of a layer's attentions, and which of its calls they are."""
    products = [e for e in inside_of(trace, block) if e.name == MATRIX]
    owners: list[tuple[LayerStructure | Part, str]] = [(part, name) for part in layer.parts for name in ("q", "k", "v")]
    owners += [(layer, name) for name in ("z", "attn_out", "mlp_out")]
    bare = [(owner, name, at) for owner, name in owners if (at := getattr(owner, name)) and at.module == MATRIX]
    around = [part.attention.within.stack() for part in layer.parts]
    around += [e.parent.stack() for e in (products[at.run] for _, _, at in bare) if e.parent]
    shared = [e for e in around[0] if all(any(e is other for other in stack) for stack in around)]
    scope = shared[-1] if block.kind != INLINE else block
    if block.kind != INLINE:
        layer.scope = CallScope(scope.name, run_index(scope, (block, *inside_of(trace, block))))
    runner = scope.parent if block.kind == INLINE and scope.parent else scope
    calls = [
        (time, kind, lines_within(frames, runner.frame))
        for time, kind, frames in (
            *trace.calls, *((e.start, MATRIX, e.frames) for e in trace.executions if e.name == MATRIX)
        )
        if scope.start < time < scope.end
    ]  # fmt: skip
    totals, counts = Counter(call[1:] for call in calls), Counter[tuple[str, tuple[Line, ...]]]()
    sites = {}
    for time, kind, lines in calls:
        sites[time] = CallSite(kind, lines, counts[kind, lines], totals[kind, lines])
        counts[kind, lines] += 1
    for part in layer.parts:
        roles = _ROLES[part.attention.kind]
        part.calls = {sites[time]: role for time, role in zip(part.attention.times, roles, strict=True)}
    for owner, name, location in bare:
        setattr(owner, name, replace(location, site=sites[products[location.run].start]))


def mlp_width(trace: Trace, layer: LayerStructure, block: Execution) -> int:
    """Return the width of the hidden layer of a layer's MLP; 0 if unknown."""
    if layer.mlp_out is None:
        return 0
    inside, stream = inside_of(trace, block), layer.rows["in"].shape[1]
    if layer.mlp_out.module == MATRIX:
        made = layer.rows["mlp_out"] / layer.mlp_out.factor
        bare = [e for e in inside if e.name == MATRIX and e.inputs]
        return next((e.inputs[0].rows.shape[1] for e in bare if any(torch.equal(t.rows, made) for t in e.outputs)), 0)
    for entry in reversed([e for e in inside if e.name.startswith(layer.mlp_out.module)]):
        width = entry.inputs[0].rows.shape[1] if entry.inputs else 0
        if width and is_matrix(trace, entry) and any(t.rows.shape[1] == stream for t in entry.outputs):
            return width
    return 0
