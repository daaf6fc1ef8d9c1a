"""Where the tensors of a layer pass: its projections, what W_O reads, and the outputs that are added to the stream."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from workbench.observing.interception.tensor_layouts import TensorPath
from workbench.observing.recognition.additions import find_additions
from workbench.observing.recognition.blocks import INLINE, NUMBER, is_stream, number, stream_of
from workbench.observing.recognition.least_squares import EXACT, fit_rotated
from workbench.observing.recognition.own_values import OwnValues, find_own_values, same_own_values
from workbench.observing.recognition.projections import (
    Projection,
    TensorLocation,
    find_projection,
    run_index,
    same_projection,
)
from workbench.observing.recognition.structure import LayerStructure
from workbench.observing.recognition.trace import (
    BY_HAND,
    MATRIX,
    UNREAD,
    Execution,
    Trace,
    TracedAttention,
    is_matrix,
    rows_at,
)
from workbench.observing.recognition.value_paths import explained

SHARE = "W_O reads a share of pattern x values, by head and position (a gate)"


def recognize_layers(trace: Trace, blocks: list[tuple[TracedAttention, Execution]]) -> list[LayerStructure]:
    """The layers of a traced run: each attention with the execution of the block that holds it."""
    layers = [_layer(trace, attention, block) for attention, block in blocks]
    _find_projections(
        trace, [(layer, block) for layer, (_, block) in zip(layers, blocks, strict=True) if layer.is_read]
    )
    for layer, (_, block) in zip(layers, blocks, strict=True):
        find_additions(trace, layer, block, inside_of(trace, block), layers[0].rows["in"])
    return layers


def _layer(trace: Trace, attention: TracedAttention, block: Execution) -> LayerStructure:
    inline = block.kind == INLINE
    streams = (block.inputs[0], block.outputs[0]) if inline else stream_of(trace, block)
    assert streams is not None
    kinds = {"fused": ["fused"], "eager": ["product", "softmax", "product"], BY_HAND: ["product"] * 2, UNREAD: []}[
        attention.kind
    ]
    calls = tuple(
        sum(block.start < t < time and kind == k for t, k in trace.calls)
        for time, kind in zip(attention.times, kinds, strict=True)
    )
    run = sum(e.name == block.name and e.start < block.start for e in trace.executions)
    rows = {"in": streams[0].rows, "out": streams[1].rows}
    layer = LayerStructure(block.name, run, streams[0].path, streams[1].path, attention, calls, rows=rows)
    if inline:
        inside = [e for e in inside_of(trace, block) if e.name != MATRIX]
        layer.inline = tuple(dict.fromkeys(e.name for e in inside))
        reader = next(e for e in inside if any(s is streams[0] for s in e.inputs))
        layer.stream = _location(reader, streams[0].path, inside)
    return layer


def inside_of(trace: Trace, block: Execution) -> list[Execution]:
    """Executions within that of a block."""
    return [e for e in trace.executions if block.start < e.start < block.end]


def _find_projections(trace: Trace, read: list[tuple[LayerStructure, Execution]]) -> None:
    """Find q, k and v where their numbers show them; a mixed value's projection is that of a block where it is plain."""
    plain = list[tuple[LayerStructure, OwnValues]]()
    for layer, block in read:
        before = [e for e in inside_of(trace, block) if e.end < layer.attention.times[-1]]
        layer.q = find_projection(before, layer.attention.q, starts=trace.starts)
        layer.k = find_projection(before, layer.attention.k, starts=trace.starts)
        if (own := find_own_values(trace.module, before, layer.attention.v)) is not None:
            layer.v = own.place
            plain.append((layer, own))
    for layer, block in read:
        if layer.v is None and plain:
            known, own = plain[0]
            inside = inside_of(trace, block)
            layer.v = same_own_values(trace.module, inside, own, partial(_renamed, was=known, now=layer))
        layer.latent = _latent(trace, layer, block)
        if layer.v is not None:
            layer.rows["own"] = layer.v.heads_in(_output_rows(trace, block, layer.v))
        layer.z = _output_projection(trace, layer, block, read[0][0].attention.v)
        if layer.z is not None:
            _compare_outputs(layer, read[0][0].attention.v)
    for name in ("q", "k") if read else ():
        _find_mixed(trace, read, name)


def _find_mixed(trace: Trace, read: list[tuple[LayerStructure, Execution]], name: str) -> None:
    """Queries or keys that no output holds, where they are the first layer's and their own, each times a number."""
    first, block = read[0]
    known: Projection | None = getattr(first, name)
    if known is None:
        return
    sources = known.heads_in(_output_rows(trace, block, known))
    for layer, block in read[1:]:
        own = None
        if getattr(layer, name) is None:
            own = same_projection(known, inside_of(trace, block), _renamed(known.module, first, layer))
        if own is not None:
            rows = own.heads_in(_output_rows(trace, block, own))
            pairs = [(getattr(at.attention, name), x) for at, x in ((first, sources), (layer, rows))]
            found = fit_rotated(*pairs, starts=trace.starts)
            if found is not None:
                layer.mixed[name] = found


def _latent(trace: Trace, layer: LayerStructure, block: Execution) -> TensorLocation | None:
    """The compressed state that a block's values are projected from: what their matrix reads, narrower than what it makes."""
    if layer.v is None or layer.v.module == MATRIX:
        return None
    inside = inside_of(trace, block)
    entry = [e for e in inside if e.name == layer.v.module][layer.v.run]
    widest, made = layer.rows["in"].shape[1], _output_rows(trace, block, layer.v).shape[1]
    if not is_matrix(trace, entry) or len(entry.inputs) != 1 or not is_stream(trace, entry.inputs[0]):
        return None
    narrow = entry.inputs[0].rows.shape[1] < min(widest, made)
    return _location(entry, entry.inputs[0].path, inside) if narrow else None


def _renamed(name: str, was: LayerStructure, now: LayerStructure) -> str:
    if not now.inline:
        return now.block + name.removeprefix(was.block)
    return re.sub(NUMBER, str(number(now.inline[0])), name, count=1)


def _output_rows(trace: Trace, block: Execution, location: TensorLocation) -> Tensor:
    entry = [e for e in inside_of(trace, block) if e.name == location.module][location.run]
    rows = rows_at(entry.outputs, location.path)
    assert rows is not None
    return rows


def _output_projection(trace: Trace, layer: LayerStructure, block: Execution, first: Tensor) -> TensorLocation | None:
    """The input of W_O: of the matrix after the attention that reads its heads, or them and something of the values.

    Inside the module that attends it may also read what no fit explains (a gate, a norm), but nothing from before it.
    """
    inside, attention = inside_of(trace, block), layer.attention
    before = [t.rows for e in inside if e.start < attention.times[-1] for t in e.inputs]
    for entry in inside:
        if entry.start < attention.times[-1] or not is_matrix(trace, entry):
            continue
        flat = attention.z.flatten(1).shape
        read = next((t for t in entry.inputs if t.rows.shape == flat and len(t.shape) == 3), None)
        if read is None:
            continue
        heads = read.rows.unflatten(1, attention.z.shape[1:])
        in_attention = attention.within.start > block.start and attention.within.holds(entry.start)
        in_attention = in_attention and not any(torch.equal(read.rows, x) for x in before if x.shape == read.rows.shape)
        if in_attention or explained(heads, attention.z, attention.v, first):
            layer.rows["z"] = heads
            return _location(entry, read.path, inside)
    return None


def _compare_outputs(layer: LayerStructure, first: Tensor) -> None:
    """Note where W_O reads something else than pattern times values; a sink that takes its share there is one of the rows'.

    A sink s among the scores leaves a head's output times sigmoid(lse - s).
    """
    heads, attention = layer.rows["z"].double(), layer.attention
    if explained(layer.rows["z"], attention.z, attention.v, first):
        return
    z, slack = attention.z.double(), 10 * EXACT.get(attention.z.dtype, 1e-2)
    share = (heads * z).sum(-1) / z.square().sum(-1).clamp_min(1e-300)
    if float((heads - share[..., None] * z).norm()) > slack * float(heads.norm()):
        layer.changed = "W_O reads more than pattern x values: something changes the heads' outputs (a gate, a norm)"
        return
    layer.changed = SHARE
    if attention.lse is not None:
        lse, sharpest = attention.lse.double(), (share - 0.5).abs().argmin(0, keepdim=True)
        sink = (lse - share.logit(1e-12)).gather(0, sharpest)
        if bool(((lse - sink).sigmoid() - share).abs().max() < slack):
            layer.changed = "a sink takes its share of every row after the attention, through the log-sum-exp"
            attention.exact, attention.is_distribution, attention.note = False, False, layer.changed


def _location(entry: Execution, path: TensorPath, among: list[Execution]) -> TensorLocation:
    return TensorLocation(entry.name, run_index(entry, among), path)


def mlp_width(trace: Trace, layer: LayerStructure, block: Execution) -> int:
    """Width of the hidden layer of a layer's MLP, 0 where it was not found."""
    if layer.mlp_out is None:
        return 0
    stream = layer.rows["in"].shape[1]
    for entry in reversed([e for e in inside_of(trace, block) if e.name.startswith(layer.mlp_out.module)]):
        width = entry.inputs[0].rows.shape[1] if entry.inputs else 0
        if width and is_matrix(trace, entry) and any(t.rows.shape[1] == stream for t in entry.outputs):
            return width
    return 0
