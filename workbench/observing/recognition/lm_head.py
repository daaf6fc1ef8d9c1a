"""Both ends of a foreign model: the table that reads the tokens, the final norm, the head, and how logits follow from the stream."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.observing.interception.sharded_weights import full_weight
from workbench.observing.interception.tensor_paths import TensorPath
from workbench.observing.recognition.decoder_structure import UNLIMITED, LayerStructure, LinearEnding, TensorLocation
from workbench.observing.recognition.least_squares import EXACT, fit_norm, stream_sum
from workbench.observing.recognition.module_runs import LOOKUP, Execution, rows_at, run_index
from workbench.observing.recognition.traced_run import Trace, is_matrix
from workbench.observing.recognition.value_paths import lookup_index

CONTEXT = (
    "max_position_embeddings", "n_positions", "block_size", "n_ctx", "max_seq_len", "max_seq_length", "context_length",
    "sequence_length", "max_len",
)  # fmt: skip
"""Names of settings for the longest input."""
SETTINGS = ("config", "cfg", "args", "hparams")
"""Attributes in which modules store their settings."""
NO_NORM = "the head's input is no norm of the last stream (several streams, another part between them)"
NOT_LINEAR = (
    "the logits are not the head's product with its input: something follows it (a soft cap, a mixture of heads)"
)
_FEW = 48  # rows that decide how logits are made
_CAP = 1e-2  # a factor nearer to 1 than this is a soft cap that small logits hardly reach
_HEAD_ROWS = 8192  # rows of the head that are widened at a time
End = tuple[Execution, TensorPath]
"""A tensor at either end of a decoder: its execution, and its path among the inputs or outputs."""


def end_location(trace: Trace, end: End | None) -> TensorLocation | None:
    """Return where the tensor at an end of the decoder passes; None without one."""
    if end is None:
        return None
    entry, path = end
    axes = next(t.axes for t in (*entry.inputs, *entry.outputs) if t.path == path)
    if entry.name == LOOKUP:
        return TensorLocation(LOOKUP, lookup_index(trace, entry), path, axes=axes, parameter=entry.kind)
    return TensorLocation(entry.name, run_index(entry, trace.executions), path, axes=axes)


def find_head(trace: Trace, block: Execution, width: int, logits: Tensor) -> End | None:
    """Find the last matrix after the blocks with an input as wide as the stream and an output as wide as the logits."""
    for entry in reversed(trace.executions):
        if entry.start > block.end and is_matrix(trace, entry):
            stream = next((t for t in entry.inputs if t.rows.shape[1] == width), None)
            if stream is not None and any(t.rows.shape[1] == logits.shape[-1] for t in entry.outputs):
                return entry, stream.path
    return None


def find_final_norm(
    trace: Trace, head: End, block: Execution, layers: Sequence[LayerStructure], outputs: Sequence[Sequence[Tensor]]
) -> End | None:
    """Find the final norm's input if it is another sum of earlier streams than the output of the last block.

    `outputs` are those of each layer's parts; empty if they are unknown.
    """
    last, first = layers[-1].rows["out"], layers[0].rows["in"]
    read = rows_at(head[0].inputs, head[1])
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


def find_ending(trace: Trace, head: End | None, made: Tensor | None, stream: Tensor) -> LinearEnding | str:
    """Fit logits [position, d_vocab] to the last stream [row, d_model] through a norm and the head; else return the reason."""
    if head is None or made is None:
        return "no matrix after the blocks makes logits of every position"
    read, few = rows_at(head[0].inputs, head[1]), slice(_FEW)
    assert read is not None
    stream, read, logits = stream[few], read[few], made[trace.rows[few]]
    weight = full_weight(trace.module.get_submodule(head[0].name))
    if (norm := fit_norm(stream, read)) is None:
        return NO_NORM
    if any(time > head[0].end and shape[-1:] == logits.shape[1:] for time, shape in trace.tanhs):
        return NOT_LINEAR  # a soft cap, which small logits do not show
    transposed = weight.shape != (logits.shape[1], read.shape[1])
    matrix = weight.T if transposed else weight
    if matrix.shape != (logits.shape[1], read.shape[1]):
        return NOT_LINEAR
    wide = torch.promote_types(read.dtype, torch.float32)
    products = torch.cat([read.to(wide) @ rows.to(wide).T for rows in matrix.split(_HEAD_ROWS)], dim=1).double()
    seen = logits.double()
    free = (seen != seen[0]).any(0)  # of tokens whose logits no mask sets to one number
    part, rest = ((x - x.mean(0))[:, free] for x in (products, seen))
    size = float(part.square().sum())
    factor = float((part * rest).sum()) / size if size else 1.0
    tolerance = EXACT.get(logits.dtype, 1e-2)
    # all logits together show a factor more precisely than one
    noise = 2 * torch.finfo(logits.dtype).eps * float((part * seen[:, free]).norm()) / size if size else 0.0
    near = min(tolerance, max(1e-5, tolerance / 10, noise))
    if near < abs(factor - 1) < _CAP:
        return NOT_LINEAR
    factor = 1.0 if abs(factor - 1) <= near else factor
    bias = (seen - factor * products).mean(0)
    made_here, unbiased = factor * products[:, free], (seen - bias)[:, free]
    left, most = float((made_here - unbiased).norm()), max(float(x[:, free].norm()) for x in (seen, products))
    capped = tolerance > 1e-3 and _flattening(made_here.flatten(), unbiased.flatten()) > tolerance / 5
    if not left <= tolerance * most or capped:
        return NOT_LINEAR
    adds = not bias.isfinite().all() or float(bias.norm()) * len(seen) ** 0.5 > tolerance * float(seen.norm())
    return LinearEnding(norm, factor, bias if adds else None, transposed)


def _flattening(x: Tensor, y: Tensor) -> float:
    """Return how far the ratio y / x differs between the largest 1 % of entries and the smaller half, as under a soft cap.

    Half precision hides it in each entry, but not in their mean.
    """
    size = x.abs()
    largest, small = size.topk(max(1, len(x) // 100)).indices, size <= size.median()
    top, low = (float((x[at] * y[at]).sum() / x[at].square().sum().clamp_min(1e-300)) for at in (largest, small))
    return abs(top / low - 1) if low else 0.0


def longest_input(trace: Trace, embed: End | None) -> int:
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
