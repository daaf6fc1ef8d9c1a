"""A traced run read as a decoder: blocks, then what is in them, then both ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ObservedConfig
from workbench.observing.interception.positions import Axes, Layout
from workbench.observing.interception.tensor_layouts import TensorPath, get_at, tensors_of_output
from workbench.observing.interception.weights import whole
from workbench.observing.recognition.blocks import INLINE, chosen_blocks, first_reader, stream_of
from workbench.observing.recognition.ending import LinearEnding, find_ending
from workbench.observing.recognition.executions import LOOKUP, Execution, rows_at
from workbench.observing.recognition.layers import mlp_width, recognize_layers
from workbench.observing.recognition.projections import TensorLocation, run_index
from workbench.observing.recognition.stream_sums import StreamSum, stream_sum, stream_sums
from workbench.observing.recognition.structure import UNLIMITED, DecoderStructure, LayerStructure, Table
from workbench.observing.recognition.trace import Trace, is_matrix
from workbench.observing.recognition.value_tables import Embedding, ValueTables, find_embedding, lookup_index

CONTEXT = (
    "max_position_embeddings", "n_positions", "block_size", "n_ctx", "max_seq_len", "max_seq_length", "context_length",
    "sequence_length", "max_len",
)  # fmt: skip
"""Names of settings that say how long an input may be."""
_FEW = 48  # rows that tell a sum of streams from anything else
NO_STREAM = "the stream was not found, so what makes the logits of it is not known"
SETTINGS = ("config", "cfg", "args", "hparams")
"""Attributes in which modules keep their settings."""


def recognize_decoder(trace: Trace, output: Any, blocks: str | Sequence[str] | None) -> DecoderStructure:
    """Read a trace; raises `WorkbenchError` naming what cannot be observed and what to do."""
    chosen = chosen_blocks(trace, blocks)
    first, last = chosen[0][1], chosen[-1][1]
    start = first.inputs[0] if first.kind == INLINE else (stream_of(trace, first) or first.inputs)[0]
    embed = find_embedding(trace, first, start.rows)
    tables = ValueTables(trace, embed)
    layers = recognize_layers(trace, chosen, tables)
    streams_known = _pass_a_stream(layers)
    for layer in layers:
        layer.has_stream = streams_known
    width = layers[0].rows["in"].shape[1]
    path = next((path for path, x in tensors_of_output(output).items() if _is_logits(path, x, trace)), None)
    logits = None if path is None else get_at(output, path)
    head = None if logits is None else _find_head(trace, last, width, logits)
    final = _find_final(trace, head, last, layers) if head is not None and streams_known else None
    if layers[-1].inline and streams_known:
        final = first_reader(trace, last, width)
    vocabulary = _vocabulary_of(trace.module, embed, logits)
    if logits is not None and embed is not None and logits.shape[-1] == width != vocabulary:
        path = head = final = None  # hidden states of a module without a head
    predicted = 0 if path is None or logits is None else logits.shape[-1]
    last_stream = layers[-1].rows["out"] if final is None else rows_at(final[0].inputs, final[1])
    assert last_stream is not None
    streams, outputs = [*(layer.rows["in"] for layer in layers), last_stream], _outputs_of(layers)
    starts, reads, ends = (_location(trace, end) for end in (embed, head, final))
    places = [(layer, block) for layer, (_, block) in zip(layers, chosen, strict=True)]
    attended, block = next((place for place in places if place[0].is_read), places[0])
    attention, layout = attended.attention, _layout(trace, start.axes)
    config = ObservedConfig(
        n_layers=len(layers), d_model=width, n_heads=attention.heads, n_key_value_heads=attention.kv_heads,
        d_mlp=mlp_width(trace, attended, block), d_vocab=vocabulary, n_ctx=_context_of(trace, embed),
        head_width=attention.q.shape[-1] if attended.is_read else 0,
    )  # fmt: skip
    axes = None if path is None else trace.output_axes.get(path)
    return DecoderStructure(
        config, layers, starts, reads, ends, path, axes, predicted, trace.in_place, layout, _notes(trace, layers, layout),
        ending=_ending(trace, head, logits, axes, last_stream) if streams_known else NO_STREAM,
        tables=_tables_of_values(tables, layers), last_stream=last_stream, between=_between(layers, outputs),
        arriving=stream_sums(streams, [layer.rows["made"] for layer in layers], outputs),
    )  # fmt: skip


def _layout(trace: Trace, axes: Axes) -> Layout:
    """The trace's layout, with positions first where the first block's stream has them."""
    layout = trace.positions.layout
    return layout.turn() if axes.batch > axes.pos else layout


def _notes(trace: Trace, layers: Sequence[LayerStructure], layout: Layout) -> list[str]:
    """What is unusual, in words."""
    notes = ["positions are written over after they have passed: copies are handed out"] if trace.in_place else []
    if unread := [f"{i} ({layer.block})" for i, layer in enumerate(layers) if not layer.is_read]:
        seen = f"; seen: {', '.join(sorted(trace.other_calls))}" if trace.other_calls else ""
        notes.append(f"no attention that can be read in layers {', '.join(unread)}: only their streams are shown{seen}")
    return [*notes, *([layout.words] if layout.words else [])]


def _outputs_of(layers: Sequence[LayerStructure]) -> list[list[Tensor]]:
    """What each layer's parts add, where that is known of all."""
    if not all(layer.adds and layer.keeps in ((1.0, 0.0), (0.0, 0.0)) for layer in layers):
        return []
    return [[layer.rows[n] for n in ("attn_out", "mlp_out") if n in layer.rows] for layer in layers]


def _between(layers: Sequence[LayerStructure], outputs: Sequence[Sequence[Tensor]]) -> list[StreamSum | None]:
    """What the MLP of each layer reads, None where that was not found."""
    found: list[StreamSum | None] = []
    for i, layer in enumerate(layers):
        if "mid" not in layer.rows:
            found.append(None)
            continue
        first, attended = layers[0].rows["in"], layer.rows["attn_out"]
        stood = [first, *(earlier.rows["made"] for earlier in layers[:i]), layer.rows["in"] + attended]
        known = [first, *(x for some in outputs[:i] for x in some), attended] if outputs else []
        found.append(stream_sum(layer.rows["mid"], stood, known))
    return found


def _tables_of_values(tables: ValueTables, layers: Sequence[LayerStructure]) -> dict[str, Table]:
    """Tables by token id, other than the embedding, whose rows are as wide as the values of a layer."""
    widths = sorted({layer.attention.v.flatten(1).shape[1] for layer in layers if layer.is_read})
    return {name: table for width in widths for name, table in tables.of(width).items()}


def _ending(
    trace: Trace, head: tuple[Execution, TensorPath] | None, logits: Tensor | None, axes: Axes | None, stream: Tensor
) -> LinearEnding | str:
    """What makes the logits of the last stream [row, d_model]; why that is not known, in words."""
    made = None if logits is None or axes is None else trace.positions.by_position(logits, axes)
    if head is None or made is None:
        return "no matrix after the blocks makes logits of every position"
    read, few = rows_at(head[0].inputs, head[1]), slice(_FEW)
    assert read is not None
    return find_ending(stream[few], read[few], made[trace.rows[few]], whole(trace.module.get_submodule(head[0].name)))


def _pass_a_stream(layers: Sequence[LayerStructure]) -> bool:
    """Whether what blocks read and return is the stream: they add to it, or each reads what the one before returned.

    Else the part around an attention reads and returns something else: the normed input, one of several streams.
    """
    if layers[0].inline or all(layer.adds for layer in layers):
        return all(layer.adds for layer in layers)
    pairs = list(pairwise(layers))
    return bool(pairs) and all(torch.equal(a.rows["out"], b.rows["in"]) for a, b in pairs)


def _location(trace: Trace, end: tuple[Execution, TensorPath] | None) -> TensorLocation | None:
    if end is None:
        return None
    entry, path = end
    axes = next(t.axes for t in (*entry.inputs, *entry.outputs) if t.path == path)
    if entry.name == LOOKUP:
        return TensorLocation(LOOKUP, lookup_index(trace, entry), path, axes=axes, parameter=entry.kind)
    return TensorLocation(entry.name, run_index(entry, trace.executions), path, axes=axes)


def _is_logits(path: TensorPath, x: Tensor, trace: Trace) -> bool:
    """[batch, pos, d_vocab], of the last position alone, [pos, batch, d_vocab] or [batch * pos, d_vocab]."""
    if x.ndim == 3 and x.is_floating_point() and x.shape[:2] == (trace.batch, 1):
        return True
    return x.ndim < 4 and path in trace.output_axes


def _find_head(trace: Trace, block: Execution, width: int, logits: Tensor) -> tuple[Execution, TensorPath] | None:
    """The last matrix after the blocks that reads the stream and makes as many numbers as there are logits."""
    for entry in reversed(trace.executions):
        if entry.start > block.end and is_matrix(trace, entry):
            stream = next((t for t in entry.inputs if t.rows.shape[1] == width), None)
            if stream is not None and any(t.rows.shape[1] == logits.shape[-1] for t in entry.outputs):
                return entry, stream.path
    return None


def _find_final(
    trace: Trace, head: tuple[Execution, TensorPath], block: Execution, layers: Sequence[LayerStructure]
) -> tuple[Execution, TensorPath] | None:
    """The final norm's input, where it is another sum of what was made before than the output of the last block."""
    last, first = layers[-1].rows["out"], layers[0].rows["in"]
    read, outputs = rows_at(head[0].inputs, head[1]), _outputs_of(layers)
    for entry in trace.executions:
        if block.end < entry.start and entry.end < head[0].start:
            feeds_head = any(read is not None and torch.equal(t.rows, read) for t in entry.outputs)
            stream = next((t for t in entry.inputs if t.rows.shape == last.shape), None)
            if feeds_head and stream is not None:
                stood = [first, *(layer.rows["made"] for layer in layers)]
                known = [first, *(x for some in outputs for x in some)] if outputs else []
                is_sum = not torch.equal(stream.rows, last) and stream_sum(stream.rows, stood, known).exact
                return (entry, stream.path) if is_sum else None
    return None


def _vocabulary_of(module: nn.Module, embed: Embedding | None, logits: Tensor | None) -> int:
    """How many token ids can be read: the embedding's vectors; the logits' width where there is no embedding."""
    if embed is not None:
        table: Any = None if embed[0].name == LOOKUP else module.get_submodule(embed[0].name)
        return embed[0].size if table is None else int(table.weight.shape[0])
    return int(logits.shape[-1]) if logits is not None else UNLIMITED


def _context_of(trace: Trace, embed: tuple[Execution, TensorPath] | None) -> int:
    """Longest input, from the module's settings or its table of positions."""
    kept = [getattr(trace.module, name, None) for name in SETTINGS]
    kept += [getattr(settings, "text_config", None) for settings in kept]
    for settings in (*kept, trace.module):
        for name in CONTEXT:
            value = settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
            if isinstance(value, int) and value >= trace.length:
                return value
    token = embed[0].name if embed is not None else None
    tables = [
        part.num_embeddings for name, part in trace.module.named_modules()
        if isinstance(part, nn.Embedding) and name != token and re.search("pos|wpe", f"{name} {type(part).__name__}".lower())
    ]  # fmt: skip
    return min((t for t in tables if t >= trace.length), default=UNLIMITED)
