"""Which module is a block: the one around an attention whose input and output are a stream, or modules that share a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch

from workbench.errors import WorkbenchError
from workbench.observing.interception.tensor_paths import TensorPath
from workbench.observing.recognition.attention_calls import TracedAttention
from workbench.observing.recognition.module_runs import MATRIX, Execution, TracedTensor
from workbench.observing.recognition.traced_run import Trace

INLINE = "inline"
"""Kind of an execution that is a block without a module of its own."""
NUMBER = r"(?<![^.])\d+(?![^.])"
"""A component of a module's name that is a number."""
ENCODER_DECODER = "of an encoder and decoder observe the decoder alone: observe(module.get_decoder(), ids)"
Block = tuple[list[TracedAttention], Execution]
"""A run of a block and its readable attentions, in order."""


def find_blocks(trace: Trace, blocks: str | Sequence[str] | None) -> list[Block]:
    """Find the runs of blocks with their attentions, and the blocks between them without one.

    Raises `WorkbenchError` with the cause if no attention is readable, or if the blocks form several stacks.
    """
    prefixes = [blocks] if isinstance(blocks, str) else list(blocks or [])
    attentions = [
        a for a in trace.attentions
        if not prefixes or any(e.name == p or e.name.startswith(f"{p}.") for p in prefixes for e in a.within.stack())
    ]  # fmt: skip
    if not attentions:
        return _blocks_without_attention(trace, prefixes)
    attentions = [a for a in attentions if not a.is_aside] or attentions
    # drop unreadable attentions of other places (a pooling, another tower) if some place is readable
    place = {id(a): re.sub(r"\d+", "*", a.within.name) for a in attentions}
    roots = {place[id(a)].partition("*")[0] for a in attentions if not a.refusal}
    attentions = [a for a in attentions if any(place[id(a)].startswith(root) for root in roots if root)] or attentions
    if refused := next((a for a in attentions if a.refusal), None):
        advice = f"; {ENCODER_DECODER}" if is_encoder_decoder(trace.module) else ""
        raise WorkbenchError(f"attention in {_name(refused.within)} cannot be read: {refused.refusal}{advice}")
    if (inline := _inline_blocks(trace, attentions)) is not None:
        return [([a], block) for a, block in zip(attentions, inline, strict=True)]
    by_block: dict[int, Block] = {}
    for a in attentions:
        block = _block_of(trace, a, attentions)
        by_block.setdefault(id(block), ([], block))[0].append(a)
    for several, block in by_block.values():
        for name in ("q", "v"):
            if len(widths := sorted({getattr(a, name).shape[-1] for a in several})) > 1:
                raise WorkbenchError(
                    f"attentions in {_name(block)} have heads of {' and '.join(map(str, widths))} numbers: only heads of one "
                    "width can be joined"
                )
    stacks = {re.sub(r"\d+", "*", block.name.rpartition(".")[0]) for _, block in by_block.values()}
    if len(stacks) > 1:
        names = " and ".join(sorted(stacks))
        raise WorkbenchError(
            f"attention was seen in several stacks of blocks: {names}; observe one of the submodules, or name one as blocks="
        )
    return _with_unread(trace, list(by_block.values()))


def is_encoder_decoder(module: torch.nn.Module) -> bool:
    """Return whether a Hugging Face module has an encoder beside its decoder."""
    is_both = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    return is_both and getattr(module, "get_decoder", lambda: module)() is not module


def _with_unread(trace: Trace, blocks: list[Block]) -> list[Block]:
    """Add the blocks of the same list without a readable attention (state spaces, custom kernels), in their order."""
    lists = {block.name.rpartition(".")[0] for _, block in blocks}
    numbered = all(block.name.rpartition(".")[2].isdigit() for _, block in blocks)
    known, like = {id(block): attentions for attentions, block in blocks}, streams_of_block(trace, blocks[0][1])
    if numbered and len(lists) > 1:
        return blocks
    if not numbered:  # attention parts of blocks whose streams are not seen: add parts of that name under other numbers
        names = {re.sub(NUMBER, "*", b.name, count=1) for _, b in blocks if block_number(b.name) is not None}
        alike = [e for e in trace.executions if re.sub(NUMBER, "*", e.name, count=1) in names]
        other = [(known.get(id(e), []), e) for e in alike if streams_of_block(trace, e)]
        return other if len(other) > len(blocks) else blocks
    parents = {id(e.parent) for e in trace.executions if e.name != MATRIX}
    every = []
    for entry in trace.executions:
        prefix, _, last = entry.name.rpartition(".")
        if id(entry) in known:
            every.append((known[id(entry)], entry))
        elif prefix in lists and last.isdigit() and id(entry) in parents:  # a norm or a matrix has no parts
            streams = streams_of_block(trace, entry)
            weights = any(True for _ in trace.module.get_submodule(entry.name).parameters())
            if weights and streams and like and streams[0].shape == like[0].shape:
                every.append(([], entry))
    return every


def _blocks_without_attention(trace: Trace, prefixes: list[str]) -> list[Block]:
    """Find the blocks of a module without attention: the outermost numbered parts that pass a stream on, each to the next."""
    script = next((part for part in trace.module.modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if script is None and not trace.other_calls:
        parents = {id(e.parent) for e in trace.executions if e.name != MATRIX}
        lists: dict[str, list[Execution]] = {}
        for entry in trace.executions:
            prefix, _, last = entry.name.rpartition(".")
            selected = not prefixes or any(entry.name.startswith(f"{p}.") for p in prefixes)
            if selected and last.isdigit() and id(entry) in parents and streams_of_block(trace, entry):
                lists.setdefault(prefix, []).append(entry)
        for blocks in sorted(lists.values(), key=lambda runs: len(runs[0].stack())):
            if _pass_on(trace, blocks):
                return [([], block) for block in blocks]
    calls = ", ".join(sorted(trace.other_calls))
    if script is not None:
        cure = "observe the original Python module"
        message = f"{type(script).__name__} is TorchScript, whose calls cannot be seen: {cure}"
    elif isinstance(trace.module, torch.fx.GraphModule):
        message = "this module is a graph (torch.export, torch.fx) without the model's blocks: observe the original Python module"
    elif prefixes:
        seen = sorted({_name(a.within) for a in trace.attentions})
        message = f"no attention was seen under {prefixes}; it was seen in {seen[:8] or 'no part at all'}"
    elif calls and all("extra columns" in call for call in trace.other_calls):
        message = (
            f"no attention was seen that can be read: {calls} was. A cache can be turned off "
            "(use_cache=False); keys with values that are no tokens (a prefix, registers) are not read: call it without them"
        )
    elif calls:
        message = (
            f"no attention was seen; {calls} was: that cannot be read; run the "
            "module with scaled_dot_product_attention or eager softmax attention (Hugging Face: attn_implementation='sdpa')"
        )
    else:
        message = (
            "no attention was seen: no scaled_dot_product_attention, and no softmax over [..., pos, pos] between two matrix "
            "products (a custom kernel, a hand-written softmax or no attention at all); use scaled_dot_product_attention"
        )
    raise WorkbenchError(message)


def _pass_on(trace: Trace, blocks: Sequence[Execution]) -> bool:
    """Return whether several parts pass a stream on, each to the next."""
    streams = [s for e in blocks if (s := streams_of_block(trace, e))]
    return len(streams) > 1 and all(torch.equal(a[1].rows, b[0].rows) for a, b in pairwise(streams))


def _block_of(trace: Trace, attention: TracedAttention, attentions: list[TracedAttention]) -> Execution:
    """Find the block around an attention: the outermost execution with a stream that holds this attention alone.

    If its list does not pass the stream on, or it holds others, take the innermost one of a list that does.
    """

    def in_passing_list(entry: Execution) -> bool:
        prefix, _, last = entry.name.rpartition(".")
        siblings = [e for e in trace.executions if e.name.rpartition(".")[0] == prefix]
        return last.isdigit() and _pass_on(trace, [e for e in siblings if e.name.rpartition(".")[2].isdigit()])

    around = [e for e in attention.within.stack()[1:] if streams_of_block(trace, e)]
    listed = [e for e in around if e.name.rsplit(".", 1)[-1].isdigit()]
    alone = [e for e in around if sum(e.holds(a.times[-1]) for a in attentions) == 1]
    first = next((e for e in alone if e in listed), alone[0] if alone else None)
    if first is not None and in_passing_list(first):
        return first
    passing = [e for e in listed if in_passing_list(e)]
    if passing or first or listed:
        return passing[-1] if passing else first or listed[-1]
    if not around:
        shapes = {t.shape for e in attention.within.stack()[1:] for t in e.inputs if len(t.shape) != 3}
        seen = f" (seen: {', '.join(map(str, sorted(shapes)[:3]))})" if shapes else ""
        raise WorkbenchError(
            f"attention in {_name(attention.within)} is in no block: no part around it reads and makes a stream "
            f"[batch, pos, d_model]. Make each block a submodule of its own; where it is one, have it take and return the "
            f"stream in that layout{seen}"
        )
    several = [_name(a.within) for a in attentions if around[-1].holds(a.times[-1])]
    raise WorkbenchError(
        f"{_name(around[-1])} makes {len(several)} attention calls ({', '.join(several[:4])}) and is no block of a list: keep blocks in "
        "a ModuleList"
    )


def _inline_blocks(trace: Trace, attentions: list[TracedAttention]) -> list[Execution] | None:
    """Find blocks without a module of their own: runs of modules with one number in their names around each attention; else None."""
    within, blocks, width = attentions[0].within, list[Execution](), 0
    if any(a.within is not within for a in attentions) or len(attentions) < 2:
        return None
    numbered = [e for e in trace.executions if e.parent is within and block_number(e.name) is not None]
    for attention in attentions:
        before = [e for e in numbered if e.start < attention.times[0]]
        parts = [e for e in numbered if before and block_number(e.name) == block_number(before[-1].name)]
        stream = next((s for e in parts for s in e.inputs if is_stream(trace, s)), None)
        if not parts or stream is None or (blocks and parts[0].start < blocks[-1].end):
            return None
        stems = {re.split(NUMBER, e.name, maxsplit=1)[0] for e in parts}
        name = f"{stems.pop() if len(stems) == 1 else '*.'}{block_number(parts[0].name)}"
        end = max(parts[-1].end, attention.times[-1])
        blocks.append(Execution(name, INLINE, within, parts[0].start - 1, end, [stream]))
        width = stream.rows.shape[1]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        reader = first_reader(trace, block, width) if after is None else None
        following = after or (block if reader is None else reader[0])
        block.outputs = following.inputs[:1]
    return blocks


def block_number(name: str) -> int | None:
    """Return the first number among the components of a module's name."""
    match = re.search(NUMBER, name)
    return int(match[0]) if match else None


def first_reader(trace: Trace, block: Execution, width: int) -> tuple[Execution, TensorPath] | None:
    """Find the first module after a block with an input as wide as the stream, and the path to that input."""
    for entry in trace.executions:
        stream = next((t for t in entry.inputs if is_stream(trace, t) and t.rows.shape[1] == width), None)
        if entry.start > block.end and stream is not None and entry.name != MATRIX:
            return entry, stream.path
    return None


def streams_of_block(trace: Trace, entry: Execution) -> tuple[TracedTensor, TracedTensor] | None:
    """Return the streams in and out of an execution: an input and an output [batch, pos, d_model] (or positions first)."""
    for output in entry.outputs:
        for read in entry.inputs:
            if read.shape == output.shape and is_stream(trace, output):
                return read, output
    return None


def is_stream(trace: Trace, tensor: TracedTensor) -> bool:
    """Return whether a tensor is [batch, pos, any] or [pos, batch, any], of all the module's positions."""
    shapes = trace.positions.shapes
    return len(tensor.shape) == 3 and (tensor.shape[:2] in shapes or tensor.shape[1::-1] in shapes)


def _name(entry: Execution) -> str:
    return entry.name or entry.kind
