"""A traced run read as a decoder: blocks, the layers in them, and both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from workbench.config import ObservedConfig
from workbench.observing.interception.tensor_paths import get_at, tensors_of_output
from workbench.observing.recognition.decoder_structure import UNLIMITED, DecoderStructure, LayerStructure
from workbench.observing.recognition.find_blocks import INLINE, find_blocks, first_reader, streams_of_block
from workbench.observing.recognition.layer_parts import mlp_width, recognize_layers
from workbench.observing.recognition.least_squares import StreamSum, stream_sum, stream_sums
from workbench.observing.recognition.lm_head import end_location, find_ending, find_final_norm, find_head, longest_input
from workbench.observing.recognition.module_runs import LOOKUP, rows_at
from workbench.observing.recognition.traced_run import Trace
from workbench.observing.recognition.value_paths import ValueTables, find_embedding

NO_STREAM = "the stream was not found, so how logits follow from it is not known"


def recognize_decoder(trace: Trace, output: Any, blocks: str | Sequence[str] | None) -> DecoderStructure:
    """Read a trace as a decoder; raises `WorkbenchError` with the cause and the remedy if it cannot be observed."""
    runs = find_blocks(trace, blocks)
    first, last = runs[0][1], runs[-1][1]
    start = first.inputs[0] if first.kind == INLINE else (streams_of_block(trace, first) or first.inputs)[0]
    embed = find_embedding(trace, first, start.rows)
    tables = ValueTables(trace, embed)
    layers = recognize_layers(trace, runs, tables)
    # all blocks add to the stream, or each reads the output of the one before; else their inputs are another tensor (a norm of it)
    has_stream = all(layer.adds for layer in layers)
    if not has_stream and not layers[0].inline and len(layers) > 1:
        has_stream = all(torch.equal(a.rows["out"], b.rows["in"]) for a, b in pairwise(layers))
    known = all(layer.adds and layer.keeps in ((1.0, 0.0), (0.0, 0.0)) for layer in layers)  # what their parts add
    outputs = [[layer.rows[n] for n in ("attn_out", "mlp_out") if n in layer.rows] for layer in layers] if known else []
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
    head = None if logits is None else find_head(trace, last, width, logits)
    final = find_final_norm(trace, head, last, layers, outputs) if head is not None and has_stream else None
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
    layout = replace(layout, turned=True) if start.axes.batch > start.axes.pos else layout
    config = ObservedConfig(
        n_layers=len(layers), d_model=width, n_heads=attention.heads, n_key_value_heads=attention.kv_heads,
        d_mlp=mlp_width(trace, attended, block), d_vocab=vocabulary, n_ctx=longest_input(trace, embed),
        head_width=attention.q.shape[-1] if attended.is_read else 0,
    )  # fmt: skip
    notes = ["positions are overwritten after they have passed: copies are handed out"] if trace.in_place else []
    if unread := [f"{i} ({layer.block})" for i, layer in enumerate(layers) if not layer.is_read]:
        seen = f"; seen: {', '.join(sorted(trace.other_calls))}" if trace.other_calls else ""
        notes.append(f"no attention that can be read in layers {', '.join(unread)}: only their streams are shown{seen}")
    value_widths = sorted({layer.attention.v.flatten(1).shape[1] for layer in layers if layer.is_read})
    return DecoderStructure(
        config, layers, end_location(trace, embed), end_location(trace, head), end_location(trace, final), path, axes, predicted,
        trace.in_place, layout, [*notes, *([layout.words] if layout.words else [])],
        ending=find_ending(trace, head, made, last_stream) if has_stream else NO_STREAM,
        tables={name: table for value_width in value_widths for name, table in tables.of(value_width).items()},
        arriving=stream_sums(
            [*(layer.rows["in"] for layer in layers), last_stream], [layer.rows["made"] for layer in layers], outputs
        ),
        last_stream=last_stream, between=_between(layers, outputs),
    )  # fmt: skip


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
