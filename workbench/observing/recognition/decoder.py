"""A traced run read as a decoder: blocks, the layers in them, and both ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ObservedConfig
from workbench.observing.interception.tensor_layouts import TensorPath, get_at, tensors_of_output
from workbench.observing.interception.weights import full_weight
from workbench.observing.recognition.blocks import INLINE, find_blocks, first_reader, streams_of_block
from workbench.observing.recognition.executions import LOOKUP, Execution, rows_at, run_index
from workbench.observing.recognition.fits import EXACT, StreamSum, fit_norm, stream_sum, stream_sums
from workbench.observing.recognition.layers import mlp_width, recognize_layers
from workbench.observing.recognition.structure import (
    UNLIMITED,
    DecoderStructure,
    LayerStructure,
    LinearEnding,
    TensorLocation,
)
from workbench.observing.recognition.trace import Trace, is_matrix
from workbench.observing.recognition.value_paths import ValueTables, find_embedding, lookup_index

CONTEXT = (
    "max_position_embeddings", "n_positions", "block_size", "n_ctx", "max_seq_len", "max_seq_length", "context_length",
    "sequence_length", "max_len",
)  # fmt: skip
"""Names of settings for the longest input."""
SETTINGS = ("config", "cfg", "args", "hparams")
"""Attributes in which modules store their settings."""
NO_STREAM = "the stream was not found, so how logits follow from it is not known"
NO_NORM = "the head's input is no norm of the last stream (several streams, another part between them)"
NOT_LINEAR = (
    "the logits are not the head's product with its input: something follows it (a soft cap, a mixture of heads)"
)
_FEW = 48  # rows that decide how logits are made
_CAP = 1e-2  # a factor nearer to 1 than this is a soft cap that small logits hardly reach
_HEAD_ROWS = 8192  # rows of the head that are widened at a time
_End = tuple[Execution, TensorPath]
"""A tensor at either end of a decoder: its execution, and its path among the inputs or outputs."""


def recognize_decoder(trace: Trace, output: Any, blocks: str | Sequence[str] | None) -> DecoderStructure:
    """Read a trace as a decoder; raises `WorkbenchError` with the cause and the remedy if it cannot be observed."""
    runs = find_blocks(trace, blocks)
    first, last = runs[0][1], runs[-1][1]
    start = first.inputs[0] if first.kind == INLINE else (streams_of_block(trace, first) or first.inputs)[0]
    embed = find_embedding(trace, first, start.rows)
    tables = ValueTables(trace, embed)
    layers = recognize_layers(trace, runs, tables)
    has_stream = _pass_a_stream(layers)
    for layer in layers:
        layer.has_stream = has_stream
    width = layers[0].rows["in"].shape[1]
    # [batch, pos, d_vocab], [pos, batch, d_vocab], [batch * pos, d_vocab], or of the last position alone
    path = next(
        (
            path for path, x in tensors_of_output(output).items()
            if (x.ndim < 4 and path in trace.output_axes)
            or (x.ndim == 3 and x.is_floating_point() and x.shape[:2] == (trace.batch, 1))
        ),
        None,
    )  # fmt: skip
    logits = None if path is None else get_at(output, path)
    head = None if logits is None else _find_head(trace, last, width, logits)
    final = _find_final(trace, head, last, layers) if head is not None and has_stream else None
    if layers[-1].inline and has_stream:
        final = first_reader(trace, last, width)
    if embed is not None:
        table: Any = None if embed[0].name == LOOKUP else trace.module.get_submodule(embed[0].name)
        vocabulary = embed[0].size if table is None else int(table.weight.shape[0])
    else:
        vocabulary = int(logits.shape[-1]) if logits is not None else UNLIMITED
    if logits is not None and embed is not None and logits.shape[-1] == width != vocabulary:
        path = head = final = None  # hidden states of a module without a head
    predicted = 0 if path is None or logits is None else logits.shape[-1]
    last_stream = layers[-1].rows["out"] if final is None else rows_at(final[0].inputs, final[1])
    assert last_stream is not None
    axes = None if path is None else trace.output_axes.get(path)
    made = None if logits is None or axes is None else trace.positions.by_position(logits, axes)
    places = [(layer, block) for layer, (_, block) in zip(layers, runs, strict=True)]
    attended, block = next((place for place in places if place[0].is_read), places[0])
    attention, layout = attended.attention, trace.positions.layout
    layout = layout.turn() if start.axes.batch > start.axes.pos else layout
    config = ObservedConfig(
        n_layers=len(layers), d_model=width, n_heads=attention.heads, n_key_value_heads=attention.kv_heads,
        d_mlp=mlp_width(trace, attended, block), d_vocab=vocabulary, n_ctx=_context(trace, embed),
        head_width=attention.q.shape[-1] if attended.is_read else 0,
    )  # fmt: skip
    notes = ["positions are overwritten after they have passed: copies are handed out"] if trace.in_place else []
    if unread := [f"{i} ({layer.block})" for i, layer in enumerate(layers) if not layer.is_read]:
        seen = f"; seen: {', '.join(sorted(trace.other_calls))}" if trace.other_calls else ""
        notes.append(f"no attention that can be read in layers {', '.join(unread)}: only their streams are shown{seen}")
    outputs = _outputs_of(layers)
    value_widths = sorted({layer.attention.v.flatten(1).shape[1] for layer in layers if layer.is_read})
    return DecoderStructure(
        config, layers, _location(trace, embed), _location(trace, head), _location(trace, final), path, axes, predicted,
        trace.in_place, layout, [*notes, *([layout.words] if layout.words else [])],
        ending=_find_ending(trace, head, made, last_stream) if has_stream else NO_STREAM,
        tables={name: table for value_width in value_widths for name, table in tables.of(value_width).items()},
        arriving=stream_sums(
            [*(layer.rows["in"] for layer in layers), last_stream], [layer.rows["made"] for layer in layers], outputs
        ),
        last_stream=last_stream, between=_between(layers, outputs),
    )  # fmt: skip


# ---- streams ---------------------------------------------------------------------------------------------------------


def _pass_a_stream(layers: Sequence[LayerStructure]) -> bool:
    """Return whether the blocks' inputs and outputs are the stream: all add to it, or read the output of the one before.

    Else the part around an attention reads something else: the normed input, one of several streams.
    """
    if layers[0].inline or all(layer.adds for layer in layers):
        return all(layer.adds for layer in layers)
    pairs = list(pairwise(layers))
    return bool(pairs) and all(torch.equal(a.rows["out"], b.rows["in"]) for a, b in pairs)


def _outputs_of(layers: Sequence[LayerStructure]) -> list[list[Tensor]]:
    """Return what each layer's parts add; empty if that is unknown for one."""
    if not all(layer.adds and layer.keeps in ((1.0, 0.0), (0.0, 0.0)) for layer in layers):
        return []
    return [[layer.rows[n] for n in ("attn_out", "mlp_out") if n in layer.rows] for layer in layers]


def _between(layers: Sequence[LayerStructure], outputs: Sequence[Sequence[Tensor]]) -> list[StreamSum | None]:
    """Fit the MLP's input in every layer to the streams and outputs so far; None for an unknown input."""
    sums: list[StreamSum | None] = []
    for i, layer in enumerate(layers):
        if "mid" not in layer.rows:
            sums.append(None)
            continue
        first, attended = layers[0].rows["in"], layer.rows["attn_out"]
        streams = [first, *(earlier.rows["made"] for earlier in layers[:i]), layer.rows["in"] + attended]
        known = [first, *(x for some in outputs[:i] for x in some), attended] if outputs else []
        sums.append(stream_sum(layer.rows["mid"], streams, known))
    return sums


# ---- ends ------------------------------------------------------------------------------------------------------------


def _location(trace: Trace, end: _End | None) -> TensorLocation | None:
    if end is None:
        return None
    entry, path = end
    axes = next(t.axes for t in (*entry.inputs, *entry.outputs) if t.path == path)
    if entry.name == LOOKUP:
        return TensorLocation(LOOKUP, lookup_index(trace, entry), path, axes=axes, parameter=entry.kind)
    return TensorLocation(entry.name, run_index(entry, trace.executions), path, axes=axes)


def _find_head(trace: Trace, block: Execution, width: int, logits: Tensor) -> _End | None:
    """Find the last matrix after the blocks with an input as wide as the stream and an output as wide as the logits."""
    for entry in reversed(trace.executions):
        if entry.start > block.end and is_matrix(trace, entry):
            stream = next((t for t in entry.inputs if t.rows.shape[1] == width), None)
            if stream is not None and any(t.rows.shape[1] == logits.shape[-1] for t in entry.outputs):
                return entry, stream.path
    return None


def _find_final(trace: Trace, head: _End, block: Execution, layers: Sequence[LayerStructure]) -> _End | None:
    """Find the final norm's input if it is another sum of earlier streams than the output of the last block."""
    last, first = layers[-1].rows["out"], layers[0].rows["in"]
    read, outputs = rows_at(head[0].inputs, head[1]), _outputs_of(layers)
    for entry in trace.executions:
        if block.end < entry.start and entry.end < head[0].start:
            feeds_head = any(read is not None and torch.equal(t.rows, read) for t in entry.outputs)
            stream = next((t for t in entry.inputs if t.rows.shape == last.shape), None)
            if feeds_head and stream is not None:
                streams = [first, *(layer.rows["made"] for layer in layers)]
                known = [first, *(x for some in outputs for x in some)] if outputs else []
                is_sum = not torch.equal(stream.rows, last) and stream_sum(stream.rows, streams, known).exact
                return (entry, stream.path) if is_sum else None
    return None


def _find_ending(trace: Trace, head: _End | None, made: Tensor | None, stream: Tensor) -> LinearEnding | str:
    """Fit logits [position, d_vocab] to the last stream [row, d_model] through a norm and the head; else return the reason."""
    if head is None or made is None:
        return "no matrix after the blocks makes logits of every position"
    read, few = rows_at(head[0].inputs, head[1]), slice(_FEW)
    assert read is not None
    stream, read, logits = stream[few], read[few], made[trace.rows[few]]
    weight = full_weight(trace.module.get_submodule(head[0].name))
    if (norm := fit_norm(stream, read)) is None:
        return NO_NORM
    transposed = weight.shape != (logits.shape[1], read.shape[1])
    matrix = weight.T if transposed else weight
    if matrix.shape != (logits.shape[1], read.shape[1]):
        return NOT_LINEAR
    wide = torch.promote_types(read.dtype, torch.float32)
    products = torch.cat([read.to(wide) @ rows.to(wide).T for rows in matrix.split(_HEAD_ROWS)], dim=1).double()
    seen = logits.double()
    part, rest = products - products.mean(0), seen - seen.mean(0)
    size = float(part.square().sum())
    factor = float((part * rest).sum()) / size if size else 1.0
    tolerance = EXACT.get(logits.dtype, 1e-2)
    if tolerance < abs(factor - 1) < _CAP:
        return NOT_LINEAR
    factor = 1.0 if abs(factor - 1) <= tolerance else factor
    bias = (seen - factor * products).mean(0)
    left = float((factor * products + bias - seen).norm())
    if left > tolerance * float(torch.maximum(seen.norm(), products.norm())):
        return NOT_LINEAR
    adds = float(bias.norm()) * len(seen) ** 0.5 > tolerance * float(seen.norm())
    return LinearEnding(norm, factor, bias if adds else None, transposed)


def _context(trace: Trace, embed: _End | None) -> int:
    """Return the longest input, from the module's settings or its table of positions."""
    settings = [getattr(trace.module, name, None) for name in SETTINGS]
    settings += [getattr(some, "text_config", None) for some in settings]
    for some in (*settings, trace.module):
        for name in CONTEXT:
            value = some.get(name) if isinstance(some, dict) else getattr(some, name, None)
            if isinstance(value, int) and value >= trace.length:
                return value
    token = embed[0].name if embed is not None else None
    tables = [
        part.num_embeddings for name, part in trace.module.named_modules()
        if isinstance(part, nn.Embedding) and name != token and re.search("pos|wpe", f"{name} {type(part).__name__}".lower())
    ]  # fmt: skip
    return min((t for t in tables if t >= trace.length), default=UNLIMITED)
