"""Which part is a block: the one around an attention that reads and makes a stream, or parts that share a number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch

from workbench.errors import WorkbenchError
from workbench.observing.layouts import Path
from workbench.observing.tracing import MATRIX, Attention, Execution, Seen, Trace

NUMBER = r"(?<![^.])\d+(?![^.])"
"""A component of a part's name that is a number."""


def chosen_blocks(trace: Trace, blocks: str | Sequence[str] | None) -> list[tuple[Attention, Execution]]:
    """Each attention with the run of the block that holds it."""
    prefixes = [blocks] if isinstance(blocks, str) else list(blocks or [])
    found = [
        a for a in trace.attentions
        if not prefixes or any(e.name == p or e.name.startswith(f"{p}.") for p in prefixes for e in a.within.stack())
    ]  # fmt: skip
    if not found:
        raise WorkbenchError(_nothing(trace, prefixes))
    for attention in found:
        if attention.refusal:
            raise WorkbenchError(f"attention in {_name(attention.within)} cannot be read: {attention.refusal}")
    if (loose := _loose(trace, found)) is not None:
        return list(zip(found, loose, strict=True))
    pairs = [(a, _block_of(trace, a, found)) for a in found]
    stacks = Counter(
        re.sub(r"\d+", "*", block.name.rsplit(".", 1)[0] if "." in block.name else "") for _, block in pairs
    )
    if len(stacks) > 1:
        names = " and ".join(sorted(stacks))
        raise WorkbenchError(
            f"attention was seen in several stacks of blocks: {names}; observe one of the submodules, or name one as blocks="
        )
    return pairs


def _block_of(trace: Trace, attention: Attention, found: list[Attention]) -> Execution:
    """The outermost execution around an attention, and no other, that reads and makes a stream."""
    around = [e for e in attention.within.stack()[1:] if stream_of(trace, e)]
    alone = [e for e in around if sum(e.holds(a.times[-1]) for a in found) == 1]
    if alone:
        listed = [e for e in alone if e.name.rsplit(".", 1)[-1].isdigit()]
        return (listed or alone)[0]
    if not around:
        raise WorkbenchError(
            f"attention in {_name(attention.within)} is in no block: no part around it reads and makes a stream "
            f"[batch, pos, d_model]; make each block a submodule of its own"
        )
    several = [_name(a.within) for a in found if around[-1].holds(a.times[-1])]
    raise WorkbenchError(
        f"{_name(around[-1])} makes {len(several)} attention calls ({', '.join(several[:4])}); one per block can be read"
    )


def _loose(trace: Trace, found: list[Attention]) -> list[Execution] | None:
    """Blocks that are no parts themselves: runs of parts with one number in their names around each attention.

    None where the attentions are not all called from one place, or the numbers do not tell them apart.
    """
    within, blocks, width = found[0].within, list[Execution](), 0
    if any(a.within is not within for a in found) or len(found) < 2:
        return None
    mine = [e for e in trace.executions if e.parent is within and number(e.name) is not None]
    for attention in found:
        before = [e for e in mine if e.start < attention.times[0]]
        parts = [e for e in mine if before and number(e.name) == number(before[-1].name)]
        given = next((s for e in parts for s in e.given if streamed(trace, s)), None)
        if not parts or given is None or (blocks and parts[0].start < blocks[-1].end):
            return None
        stems = {re.split(NUMBER, e.name, maxsplit=1)[0] for e in parts}
        name = f"{stems.pop() if len(stems) == 1 else '*.'}{number(parts[0].name)}"
        end = max(parts[-1].end, attention.times[-1])
        blocks.append(Execution(name, "loose", within, parts[0].start - 1, end, [given]))
        width = given.rows.shape[1]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        last = reads(trace, block, width) if after is None else None
        found_there = after.given if after is not None else last[0].given if last is not None else block.given
        block.made = found_there[:1]
    return blocks


def number(name: str) -> int | None:
    """The first number among the components of a part's name."""
    match = re.search(NUMBER, name)
    return int(match[0]) if match else None


def reads(trace: Trace, block: Execution, width: int) -> tuple[Execution, Path] | None:
    """What first reads a tensor as wide as the stream after a block."""
    for entry in trace.executions:
        seen = next((s for s in entry.given if streamed(trace, s) and s.rows.shape[1] == width), None)
        if entry.start > block.end and seen is not None and entry.name != MATRIX:
            return entry, seen.path
    return None


def stream_of(trace: Trace, entry: Execution) -> tuple[Seen, Seen] | None:
    """The stream [batch, pos, d_model] that an execution reads and the one it makes, of one width."""
    for made in entry.made:
        for given in entry.given:
            if given.shape == made.shape and streamed(trace, made):
                return given, made
    return None


def streamed(trace: Trace, seen: Seen) -> bool:
    """Whether a tensor is [batch, pos, any]."""
    return len(seen.shape) == 3 and seen.shape[:2] == (trace.batch, trace.length)


def _nothing(trace: Trace, prefixes: list[str]) -> str:
    parts = [type(part).__name__ for part in trace.module.modules() if isinstance(part, torch.jit.ScriptModule)]
    if parts:
        return f"{parts[0]} is TorchScript, whose calls cannot be seen: observe the original Python module"
    if prefixes:
        seen = sorted({_name(a.within) for a in trace.attentions})
        return f"no attention was seen under {prefixes}; it was seen in {seen[:8] or 'no part at all'}"
    if trace.others:
        return (
            f"no attention was seen; {', '.join(sorted(trace.others))} was: that cannot be read; run the "
            "module with scaled_dot_product_attention or eager softmax attention (Hugging Face: attn_implementation='sdpa')"
        )
    return (
        "no attention was seen: no scaled_dot_product_attention, and no softmax over [..., pos, pos] between two matrix "
        "products (a custom kernel, a hand-written softmax or no attention at all); use scaled_dot_product_attention"
    )


def _name(entry: Execution) -> str:
    return entry.name or entry.kind
