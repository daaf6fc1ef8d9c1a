"""What a module is made of, read from one traced run: blocks, stream, attention, projections, embedding, head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ObservedConfig
from workbench.observing.blocks import NUMBER, chosen_blocks, number, reads, stream_of, streamed
from workbench.observing.fitting import explained
from workbench.observing.layouts import Path, find, get
from workbench.observing.masks import CAUSAL
from workbench.observing.projections import Projection, Tap, alike, run_of, search
from workbench.observing.tracing import MATRIX, Attention, Execution, Trace, rows_at

CONTEXT = (
    "max_position_embeddings", "n_positions", "block_size", "n_ctx", "max_seq_len", "max_seq_length", "context_length",
    "sequence_length", "max_len",
)  # fmt: skip
UNLIMITED = 2**30


@dataclass
class Layer:
    """One run of a block: where its parts stand."""

    block: str
    run: int  # which of the block's runs, where one is run several times
    stream_in: Path
    stream_out: Path
    attention: Attention
    calls: tuple[int, ...]  # which of the block's fused calls, or of its products, softmaxes and products
    q: Projection | None = None
    k: Projection | None = None
    v: Projection | None = None
    z: Tap | None = None  # what W_O multiplies
    attn_out: Tap | None = None
    mlp_out: Tap | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)
    loose: tuple[str, ...] = ()  # parts that run in it, where the block itself is no part
    stream: Tap | None = None  # there: what first reads the stream
    streams: bool = True  # whether the stream was found

    @property
    def statistics(self) -> bool:
        """Whether attention statistics can be given exactly."""
        return self.attention.exact or self.attention.kind == "eager"

    @property
    def bilinear(self) -> bool:
        """Whether softmax of q . k under the causal mask alone is the pattern, so that it can be rebuilt from them."""
        return self.attention.exact and self.attention.mask == CAUSAL


@dataclass
class Anatomy:
    """All of it, and the words for what was found and what not."""

    config: ObservedConfig
    layers: list[Layer]
    embed: Tap | None
    head: Tap | None
    final: Tap | None  # what the final norm reads, where that is not the last block's output
    logits: Path | None
    in_place: bool
    notes: list[str]


def anatomy(trace: Trace, output: Any, blocks: str | Sequence[str] | None) -> Anatomy:
    """Read a trace; raises `WorkbenchError` naming what cannot be observed and what to do."""
    chosen = chosen_blocks(trace, blocks)
    layers = [_layer(trace, found, block) for found, block in chosen]
    _projections(trace, layers, [block for _, block in chosen])
    inside = [block for _, block in chosen]
    for layer, block in zip(layers, inside, strict=True):
        _additions(trace, layer, block)
    known = all(layer.attn_out is not None for layer in layers if layer.loose)
    for layer in layers:
        layer.streams = known or not layer.loose
    logits = find(output, lambda x: _is_logits(x, trace))
    width = layers[0].rows["in"].shape[1]
    embed = _embedding(trace, inside[0], width)
    head = _head(trace, inside[-1], width, get(output, logits) if logits is not None else None)
    final = _final(trace, head, inside[-1], layers[-1]) if head is not None else None
    if layers[-1].loose:
        final = reads(trace, inside[-1], width) if known else None
    vocabulary = _vocabulary(trace.module, embed, get(output, logits) if logits is not None else None)
    if logits is not None and embed is not None and get(output, logits).shape[-1] == width != vocabulary:
        logits = head = final = None  # hidden states of a module without a head
    notes = ["positions are written over after they have passed: copies are handed out"] if trace.in_place else []
    first = layers[0].attention
    config = ObservedConfig(
        n_layers=len(layers),
        d_model=width,
        n_heads=first.heads,
        n_key_value_heads=first.kv_heads,
        d_mlp=_mlp_width(trace, layers[0], inside[0]),
        d_vocab=vocabulary,
        n_ctx=_context(trace, embed, width),
        head_width=first.q.shape[-1],
    )
    return Anatomy(
        config, layers, _tap(trace, embed), _tap(trace, head), _tap(trace, final), logits, trace.in_place, notes
    )


def _tap(trace: Trace, found: tuple[Execution, Path] | None) -> Tap | None:
    return None if found is None else Tap(found[0].name, run_of(found[0], trace.executions), found[1])


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layer(trace: Trace, attention: Attention, block: Execution) -> Layer:
    loose = block.kind == "loose"
    streams = (block.given[0], block.made[0]) if loose else stream_of(trace, block)
    assert streams is not None
    same = {"fused": ["fused"], "eager": ["product", "softmax", "product"]}[attention.kind]
    calls = tuple(
        sum(block.start < t < time and kind == k for t, k in trace.calls)
        for time, kind in zip(attention.times, same, strict=True)
    )
    run = sum(e.name == block.name and e.start < block.start for e in trace.executions)
    rows = {"in": streams[0].rows, "out": streams[1].rows}
    layer = Layer(block.name, run, streams[0].path, streams[1].path, attention, calls, rows=rows)
    if loose:
        inside = [e for e in inside_of(trace, block) if e.name != MATRIX]
        layer.loose = tuple(dict.fromkeys(e.name for e in inside))
        reader = next(e for e in inside if any(s is streams[0] for s in e.given))
        layer.stream = Tap(reader.name, run_of(reader, inside), streams[0].path)
    return layer


def inside_of(trace: Trace, block: Execution) -> list[Execution]:
    """Executions within that of a block."""
    return [e for e in trace.executions if block.start < e.start < block.end]


# ---- projections -----------------------------------------------------------------------------------------------------


def _projections(trace: Trace, layers: list[Layer], blocks: list[Execution]) -> None:
    """Find q, k and v where their numbers show them; a mixed value's projection is that of a block where it is plain."""
    for layer, block in zip(layers, blocks, strict=True):
        before = [e for e in inside_of(trace, block) if e.end < layer.attention.times[-1]]
        layer.v = search(before, layer.attention.v)
        layer.q = search(before, layer.attention.q, starts=trace.starts)
        layer.k = search(before, layer.attention.k, starts=trace.starts)
    known = next(((layer.v, layer) for layer in layers if layer.v is not None), None)
    for layer, block in zip(layers, blocks, strict=True):
        if layer.v is None and known is not None:
            layer.v = alike(known[0], inside_of(trace, block), _renamed(known[0].module, known[1], layer))
        if layer.v is not None:
            layer.rows["own"] = layer.v.of(_made(trace, block, layer.v))
        layer.z = _output_projection(trace, layer, block, layers[0].attention.v)


def _renamed(name: str, was: Layer, now: Layer) -> str:
    """The name of a part of one block in another."""
    if name == MATRIX:
        return name
    if not now.loose:
        return now.block + name.removeprefix(was.block)
    return re.sub(NUMBER, str(number(now.loose[0])), name, count=1)


def _made(trace: Trace, block: Execution, tap: Tap) -> Tensor:
    entry = [e for e in inside_of(trace, block) if e.name == tap.module][tap.run]
    rows = rows_at(entry.made, tap.path)
    assert rows is not None
    return rows


def _matrix(trace: Trace, entry: Execution) -> bool:
    if entry.name == MATRIX:
        return False
    weight = getattr(trace.module.get_submodule(entry.name), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _output_projection(trace: Trace, layer: Layer, block: Execution, first: Tensor) -> Tap | None:
    """The input of W_O: of the matrix after the attention that reads its heads, or them and something of the values.

    Inside the part that attends it may also read what no fit explains (a gate, a norm).
    """
    inside, attention = inside_of(trace, block), layer.attention
    for entry in inside:
        if entry.start < attention.times[-1] or not _matrix(trace, entry):
            continue
        seen = next(
            (s for s in entry.given if s.rows.shape == attention.z.flatten(1).shape and len(s.shape) == 3), None
        )
        if seen is None:
            continue
        heads = seen.rows.unflatten(1, attention.z.shape[1:])
        own = attention.within.start > block.start and attention.within.holds(entry.start)
        if own or explained(heads, attention.z, attention.v, first):
            layer.rows["z"] = heads
            return Tap(entry.name, run_of(entry, inside), seen.path)
    return None


def _additions(trace: Trace, layer: Layer, block: Execution) -> None:
    """Outputs that sum to what the block adds to its stream: the attention's, and the MLP's."""
    inside, target = inside_of(trace, block), layer.rows["out"].double() - layer.rows["in"].double()
    outputs = [
        (e, s) for e in sorted(inside, key=lambda e: (len(e.stack()), e.start)) for s in e.made
        if e.name != MATRIX and s.rows.shape == layer.rows["in"].shape and (len(s.shape) == 2 or streamed(trace, s))
    ]  # fmt: skip
    size = layer.rows["out"].double().abs().max()
    eps = torch.finfo(layer.rows["out"].dtype).eps * 32

    def sums(*parts: Tensor) -> bool:
        return bool((sum(p.double() for p in parts) - target).abs().max() <= eps * size)

    time = layer.attention.times[-1]
    ready = [(entry, seen) for entry, seen in outputs if entry.end > time]
    for entry, seen in ready:
        for other, more in outputs:
            apart = other.start > entry.end or other.end < entry.start
            if apart and sums(seen.rows, more.rows):
                pair = sorted([(entry, seen), (other, more)], key=lambda p: _distance(p[0], time))
                layer.attn_out, layer.mlp_out = (Tap(e.name, run_of(e, inside), s.path) for e, s in pair)
                return
    for entry, seen in ready:
        if sums(seen.rows):
            layer.attn_out = Tap(entry.name, run_of(entry, inside), seen.path)
            return


def _distance(entry: Execution, time: int) -> int:
    """How soon after an attention an execution begins; those that hold it first, those before it last."""
    return 0 if entry.holds(time) else entry.start - time if entry.start > time else 10**9


# ---- both ends -------------------------------------------------------------------------------------------------------


def _is_logits(x: Tensor, trace: Trace) -> bool:
    """[batch, pos, d_vocab], of the last position alone, or [batch * pos, d_vocab]."""
    flat = x.ndim == 2 and x.shape[0] == trace.batch * trace.length
    deep = x.ndim == 3 and x.shape[0] == trace.batch and x.shape[1] in (trace.length, 1)
    return x.is_floating_point() and (flat or deep)


def _embedding(trace: Trace, block: Execution, width: int) -> tuple[Execution, Path] | None:
    """The first leaf before the blocks that turns the tokens into vectors of the stream's width, else into any."""
    found = [
        (e, s.path) for e in trace.executions for s in e.made
        if e.reads_tokens and e.start < block.start and len(s.shape) == 3 and _matrix(trace, e)
    ]  # fmt: skip
    wide = [(e, path) for e, path in found if (rows := rows_at(e.made, path)) is not None and rows.shape[1] == width]
    return next(iter(wide or found), None)


def _head(trace: Trace, block: Execution, width: int, logits: Tensor | None) -> tuple[Execution, Path] | None:
    """The last matrix after the blocks that reads the stream and makes as many numbers as there are logits."""
    for entry in reversed(trace.executions):
        if logits is not None and entry.start > block.end and _matrix(trace, entry):
            given = next((s for s in entry.given if s.rows.shape[1] == width), None)
            if given is not None and any(s.rows.shape[1] == logits.shape[-1] for s in entry.made):
                return entry, given.path
    return None


def _final(trace: Trace, head: tuple[Execution, Path], block: Execution, layer: Layer) -> tuple[Execution, Path] | None:
    """The final norm's input, where it is not just what the last block made."""
    read = rows_at(head[0].given, head[1])
    for entry in trace.executions:
        if block.end < entry.start and entry.end < head[0].start:
            made = any(read is not None and torch.equal(s.rows, read) for s in entry.made)
            given = next((s for s in entry.given if s.rows.shape == layer.rows["out"].shape), None)
            if made and given is not None:
                return None if torch.equal(given.rows, layer.rows["out"]) else (entry, given.path)
    return None


def _vocabulary(module: nn.Module, embed: tuple[Execution, Path] | None, logits: Tensor | None) -> int:
    if embed is not None:
        table: Any = module.get_submodule(embed[0].name)
        return int(table.weight.shape[0])
    return int(logits.shape[-1]) if logits is not None else UNLIMITED


def _context(trace: Trace, embed: tuple[Execution, Path] | None, width: int) -> int:
    """Longest input, from the module's settings or its table of positions."""
    for holder in (getattr(trace.module, name, None) for name in ("config", "cfg", "args", "hparams")):
        for name in CONTEXT:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if isinstance(value, int) and value >= trace.length:
                return value
    for name in CONTEXT:
        value = getattr(trace.module, name, None)
        if isinstance(value, int) and value >= trace.length:
            return value
    token = embed[0].name if embed is not None else None
    tables = [
        part.num_embeddings for name, part in trace.module.named_modules()
        if isinstance(part, nn.Embedding) and name != token and re.search("pos|wpe", f"{name} {type(part).__name__}".lower())
    ]  # fmt: skip
    return min((t for t in tables if t >= trace.length), default=UNLIMITED)


def _mlp_width(trace: Trace, layer: Layer, block: Execution) -> int:
    if layer.mlp_out is None:
        return 0
    stream = layer.rows["in"].shape[1]
    for entry in reversed([e for e in inside_of(trace, block) if e.name.startswith(layer.mlp_out.module)]):
        given = entry.given[0].rows.shape[1] if entry.given else 0
        if given and _matrix(trace, entry) and any(s.rows.shape[1] == stream for s in entry.made):
            return given
    return 0
