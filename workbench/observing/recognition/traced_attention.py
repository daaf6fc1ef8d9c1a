"""Attentions of a traced run: how each is called, where, and rows of what it reads and makes.

A fused call is one as it stands. Written step by step, an attention is put together of a product of queries and keys, a softmax
and a product with values; what multiplies the values may also be a combination of two softmaxes (differential attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.names import NULL, STATISTICS
from workbench.observing.interception.masks import CAUSAL, is_distribution, visible
from workbench.observing.interception.positions import BatchAxis, Beside, Positions
from workbench.observing.interception.product_calls import (
    ProductCall,
    arrange,
    attention_axes,
    pattern_order,
    softmax_axes,
)
from workbench.observing.recognition.executions import Execution
from workbench.observing.recognition.least_squares import EXACT, weights_by_token
from workbench.observing.recognition.seen_softmax import SeenSoftmax, softmax_by_hand

NO_DISTRIBUTION = (
    "what multiplies the values is no distribution (entries below 0, NaN, or rows that sum to more than 1)"
)
NO_KEY = "a column of its softmax is no key (sink logits): a share of each row goes to no token, shown as null"
NO_TOKEN = "some of its keys are no tokens (registers, a prefix): a share of each row goes to them, shown as null"
BY_HAND = "by hand"
"""Kind of an attention whose softmax is written out."""
UNREAD = "unread"
"""Kind of what stands for the attention of a block that shows none."""
SEVERAL = "several"
"""Kind of what stands for all attentions of a block together."""
_KEPT = 4  # softmaxes and products that a product of values may belong to


class EagerAxes(NamedTuple):
    """How tensors of an eager attention lie in its calls: letters and orders of `ProductCall.arranged`, the last two axes (pos, d_head)."""

    first: int  # which operand of the first product q is
    q: str
    k: str
    which: int  # which operand of the second product the pattern is
    pattern: str
    v: str
    z: str
    softmax: str  # letters of the softmax's axes, its own last; empty where they are [..., query, key]
    square: str  # their order


@dataclass
class TracedAttention:
    """One attention of the traced run, or several of one block with their heads one after the other."""

    kind: str  # fused, eager, `BY_HAND`, `SEVERAL` or `UNREAD`
    within: Execution
    times: tuple[int, ...]  # of its call, or of the products and softmax
    heads: int
    kv_heads: int
    repeats: int  # how often each key-value head is repeated in the call
    q: Tensor  # [row, head, d_head], in units in which a score is q . k / sqrt(d_head)
    k: Tensor  # [row, kv_head, d_head]
    v: Tensor  # [row, kv_head, d_value]
    z: Tensor  # [row, head, d_value]
    mask: str
    refusal: str = ""  # why it cannot be read at all
    exact: bool = True  # whether softmax(q k) v under the mask gives its output
    scale: float = 1.0  # score over q . k, of an eager attention
    note: str = ""
    is_aside: bool = (
        False  # whether its queries are no positions, so that it is something else than the block's attention
    )
    is_distribution: bool = True  # whether what multiplies the values is >= 0 with rows that sum to at most 1
    lse: Tensor | None = None  # [row, head], where the reference gives its output
    axes: Any = None  # `EagerAxes` of an eager attention
    beside: Beside = (0, 0)  # keys before and after those of the tokens
    softmax_beside: Beside = (0, 0)  # columns of an eager attention's softmax before and after those of the tokens
    chosen: tuple[int, ...] = ()  # of an eager attention's softmax, which heads it is; empty for all
    is_combined: bool = False  # whether its pattern multiplies the values in a combination with another's
    parts: tuple[TracedAttention, ...] = ()  # of several: each
    batch_axes: Mapping[str, BatchAxis] = field(
        default_factory=dict
    )  # where heads stand first, by what the call is for

    @property
    def has_null(self) -> bool:
        """Whether something else than tokens gets a share of each row."""
        return any(self.beside) or any(self.softmax_beside) or any(part.has_null for part in self.parts)

    @property
    def is_read(self) -> bool:
        """Whether it is one at all."""
        return self.kind != UNREAD

    @property
    def has_statistics(self) -> bool:
        """Whether attention statistics can be given exactly."""
        if self.parts:
            return all(part.has_statistics for part in self.parts)
        return self.is_read and self.is_distribution and (self.exact or self.kind == "eager")

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the attention statistics that can be given exactly."""
        if self.parts:
            return tuple(name for name in self.parts[0].statistics if all(name in p.statistics for p in self.parts))
        null = (NULL,) if self.has_null else ()
        return (*STATISTICS, *null) if self.has_statistics else ()

    @property
    def squares(self) -> tuple[str, ...]:
        """Names of what it shows over queries and keys: the scores of a softmax that is written out are no tensor of its own."""
        if not self.has_statistics:
            return ()
        if self.parts:
            return tuple(name for name in self.parts[0].squares if all(name in p.squares for p in self.parts))
        return ("pattern",) if self.kind == BY_HAND else ("attn_scores", "pattern")

    @property
    def pattern_from_qk(self) -> bool:
        """Whether softmax of q . k under the causal mask alone is the pattern, so that it can be rebuilt from them."""
        if self.parts:
            return all(part.pattern_from_qk for part in self.parts)
        return self.is_read and self.exact and self.mask == CAUSAL and not self.has_null


@dataclass(frozen=True)
class EagerCall:
    """An attention written step by step: its softmax, the product of values, which of its operands the pattern is, what it made."""

    seen: SeenSoftmax
    time: int  # of the product of values
    call: ProductCall
    which: int
    out: Tensor
    positions: Positions
    chosen: tuple[
        int, ...
    ] = ()  # of the softmax's heads, half of which are combined with the other half; empty for all
    is_combined: bool = False  # whether its pattern multiplies the values in a combination with another's

    @property
    def used(self) -> Tensor:
        """What multiplies the values, [..., query, key] where it is a pattern."""
        order = pattern_order(self.call, self.which, self.positions.rows, self.positions.columns)
        return self.call.operands[self.which] if order is None else self.call.arranged(self.which, order)

    @property
    def cut(self) -> Beside:
        """How many of the softmax's columns before and after those that multiply the values do not."""
        return self.seen.beside(self.used) or (0, 0)

    @property
    def axes(self) -> tuple[tuple[int, str, str], tuple[str, str, str]] | None:
        """Which operand of the first product q is, and the orders of the axes; None where they are no attention's."""
        at = self.positions
        return attention_axes(self.seen.product[1], self.call, self.which, at.rows, at.columns, self.seen.key)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [..., pos, d_head]."""
        assert self.axes is not None
        (first, q_order, k_order), (_, v_order, _) = self.axes
        scores = self.seen.product[1]
        return (
            scores.arranged(first, q_order),
            scores.arranged(1 - first, k_order),
            self.call.arranged(1 - self.which, v_order),
        )

    @property
    def made(self) -> Tensor:
        """What the product of values made, [..., pos, d_head]."""
        assert self.axes is not None
        return arrange(self.out, self.call.letters[2], self.axes[1][2])

    def describe(self, attention: TracedAttention, scale: float | None) -> None:
        """Note what is unusual in it: the factor of its scores, what is done to its pattern, columns that are no keys."""
        assert self.axes is not None
        roles = {"scores": self.seen.product[1].batch, "softmax": self.seen.batch, "values": self.call.batch}
        attention.batch_axes = {role: batch for role, batch in roles.items() if batch is not None and batch.is_inner}
        attention.axes = EagerAxes(*self.axes[0], self.which, *self.axes[1], self.seen.letters, self.seen.order)
        attention.chosen, attention.is_combined = self.chosen, self.is_combined
        altered = not self.is_combined and self.seen.beside(self.used) is None
        attention.exact &= scale is not None and not altered
        if scale is None:
            attention.note = "scores are not a multiple of q . k (a bias, a cap): no rot_q and rot_k"
        if altered:
            attention.note = "the pattern is changed after its softmax; statistics are of what multiplies the values"
        if not is_distribution(self.seen.pattern if self.is_combined else self.used):
            attention.is_distribution, attention.note = False, NO_DISTRIBUTION
        elif attention.has_null:
            attention.note = NO_KEY if any(self.cut) else NO_TOKEN


class EagerCalls:
    """The latest products and softmaxes of a run, for the attentions they are steps of."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.products: list[tuple[int, ProductCall, Tensor]] = []
        self.softmaxes: list[SeenSoftmax] = []

    def softmax(self, scores: Tensor, pattern: Tensor, axis: int, time: int, batch: BatchAxis | None = None) -> None:
        """Note a softmax over the positions, its axis moved to the end from `axis`, where a product before it may have made its scores."""
        at, rows = self.positions, scores.numel() // scores.shape[-1]
        widths = range(at.columns, scores.shape[-1] + 1)
        for t, call, out in reversed(self.products):
            seen = [
                SeenSoftmax(time, arrange(scores, *axes), arrange(pattern, *axes), (t, call), axes[1][-1], *axes, batch)
                for axes in softmax_axes(call, scores.shape, axis, at.rows, at.columns)
            ]  # where the sizes allow several, the one whose scores are most nearly a multiple of the product comes last
            if len(seen) > 1:
                seen.sort(key=lambda each: -_misfit(each, arrange(out, call.letters[2], each.order)))
            if (
                not seen
                and scores.shape[-2] == at.columns
                and out.numel() == rows * out.shape[-1]
                and out.shape[-1] in widths
            ):
                seen = [SeenSoftmax(time, scores, pattern, (t, call), call.letters[2][-1], batch=batch)]
            if seen:
                recent = sorted({each.time for each in self.softmaxes})[1 - _KEPT :]
                self.softmaxes = [*(each for each in self.softmaxes if each.time in recent), *seen]
                return

    def product(self, call: ProductCall, out: Tensor, time: int) -> list[EagerCall]:
        """The attentions that a product gives the values of: one, two whose patterns it combines, or none."""
        found = list(self._attended(call, out, time)) if self.softmaxes else []
        taken = max((each.seen.time for each in found), default=0)
        self.softmaxes = [each for each in self.softmaxes if each.time > taken]
        if not found and (seen := softmax_by_hand(call, self.products, self.positions.columns)) is not None:
            found = [EagerCall(seen, time, call, 0 if call.operands[0] is seen.pattern else 1, out, self.positions)]
        self.products = [*self.products[1 - _KEPT :], (time, call, out)]
        return found

    def _attended(self, call: ProductCall, out: Tensor, time: int) -> Iterator[EagerCall]:
        """The softmax that multiplies the values as it is, else two of which a combination does, else the last one, altered."""
        queries, last = self.positions.columns, self.softmaxes[-1]
        orders = {i: o for i in (0, 1) if (o := pattern_order(call, i, self.positions.rows, queries)) is not None}
        patterns = {i: call.arranged(i, order) for i, order in orders.items()}
        for which in patterns:
            for seen in reversed(self.softmaxes):
                found = EagerCall(seen, time, call, which, out, self.positions)
                if found.axes is not None and seen.beside(found.used) is not None:
                    yield found
                    return
        for which, used in ((i, x) for i, x in patterns.items() if x.shape[-1] == queries):
            if orders[which][-1] != call.letters[which][-1]:  # what is summed over must be the keys
                continue
            combined = [
                EagerCall(s, time, call, which, out, self.positions, chosen, True) for s, chosen in self._combined(used)
            ]
            altered = used.numel() == last.pattern.numel() // last.pattern.shape[-1] * queries
            found_here = combined or ([EagerCall(last, time, call, which, out, self.positions)] if altered else [])
            if all(each.axes is not None for each in found_here):
                yield from found_here
                return

    def _combined(self, used: Tensor) -> list[tuple[SeenSoftmax, tuple[int, ...]]]:
        """Two softmaxes, or twice one with half of its heads, whose rows sum to those of a pattern, each times a number of the row."""
        target = self._heads(used)
        of_size = [
            s for s in self.softmaxes if s.pattern.shape[-1] == used.shape[-1] and s.scores.shape[-1] == used.shape[-1]
        ]
        for one, other in combinations([s for s in of_size if s.pattern.numel() == used.numel()], 2):
            if one.time != other.time and _spans(target, [self._heads(one.pattern), self._heads(other.pattern)]):
                return [(one, ()), (other, ())]
        for seen in (s for s in of_size if s.pattern.numel() == 2 * used.numel()):
            heads, n = self._heads(seen.pattern), target.shape[1]
            for halves in ((range(0, 2 * n, 2), range(1, 2 * n, 2)), (range(n), range(n, 2 * n))):
                if _spans(target, [heads[:, list(half)] for half in halves]):
                    return [(seen, tuple(half)) for half in halves]
        return []

    def _heads(self, pattern: Tensor) -> Tensor:
        return pattern.reshape(self.positions.rows, -1, *pattern.shape[-2:])


def _misfit(seen: SeenSoftmax, product: Tensor) -> float:
    """How far scores are from a multiple of a product [..., query, key], where they are not masked; relative."""
    kept = visible(seen.scores)
    x, y = (torch.where(kept, z.double(), 0.0) for z in (product, seen.scores))
    factor = (x * y).sum() / x.square().sum().clamp_min(1e-300)
    return float((x * factor - y).norm() / y.norm().clamp_min(1e-300))


def _spans(target: Tensor, parts: list[Tensor]) -> bool:
    """Whether each row [..., key] is a sum of those of the parts, each times a number, as only two of them can give it."""
    exact = EXACT.get(target.dtype, 1e-2)
    alone = any(weights_by_token(target, [part])[1] <= exact for part in parts)
    return not alone and weights_by_token(target, parts)[1] <= exact


def stacked(attentions: list[TracedAttention]) -> TracedAttention:
    """Several attentions of one block as one, their heads one after the other; one alone is itself."""
    if len(attentions) == 1:
        return attentions[0]
    widened = (
        len({a.heads // a.kv_heads for a in attentions}) > 1
    )  # else a key-value head would not be that of its heads
    q, z = (torch.cat([getattr(a, name) for a in attentions], dim=1) for name in ("q", "z"))
    k, v = (
        torch.cat([_of_each_head(a, getattr(a, name)) if widened else getattr(a, name) for a in attentions], dim=1)
        for name in ("k", "v")
    )
    lse = [a.lse for a in attentions if a.lse is not None]
    times = {t for a in attentions for t in a.times}
    return TracedAttention(
        SEVERAL, attentions[0].within, tuple(sorted(times)), q.shape[1], v.shape[1], 1, q, k, v, z,
        "; ".join(dict.fromkeys(a.mask for a in attentions)), exact=all(a.exact for a in attentions),
        note="; ".join(dict.fromkeys(a.note for a in attentions if a.note)),
        is_distribution=all(a.is_distribution for a in attentions),
        lse=torch.cat(lse, dim=1) if len(lse) == len(attentions) else None, parts=tuple(attentions),
    )  # fmt: skip


def _of_each_head(attention: TracedAttention, x: Tensor) -> Tensor:
    """Keys or values [row, head, d_head], one for each query head."""
    return x.repeat_interleave(attention.heads // x.shape[1], dim=1)


def chosen_heads(x: Tensor, chosen: tuple[int, ...], axis: int = 2) -> Tensor:
    """Of a tensor with all heads of a softmax those that are meant; others have as many heads as that already."""
    if not chosen or x.shape[axis] != 2 * len(chosen):
        return x
    return x.index_select(axis, torch.tensor(chosen, device=x.device))


def with_chosen_heads(whole: Tensor, part: Tensor, chosen: tuple[int, ...], axis: int = 2) -> Tensor:
    """The inverse: all heads, of which those that are meant are replaced."""
    if whole.shape == part.shape:
        return part
    return whole.index_copy(axis, torch.tensor(chosen, device=whole.device), part)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values [batch, pos, kv_head, d_head], one for each of so many heads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)
