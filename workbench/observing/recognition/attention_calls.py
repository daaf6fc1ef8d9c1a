"""Attention calls of a traced run: how each is called, rows of its queries, keys, values and output, and whether they fit.

A fused call is one attention. An eager attention is a product of queries and keys, a softmax, and a product with values. Two
softmaxes may be combined before that product (Differential Transformer, Ye et al. 2024, arXiv 2410.05258). A softmax by hand
is one that no call computes (exp, sum and division, as in Reformer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.hook_names import NULL, STATISTICS
from workbench.kernels.attention_and_its_statistics import AttentionStatistics, attention_statistics
from workbench.observing.interception.eager_attention_products import (
    ProductCall,
    arrange,
    as_written,
    attention_axes,
    pattern_order,
    softmax_axes,
)
from workbench.observing.interception.masks import CAUSAL, Modify, is_distribution, masked_statistics, visible_keys
from workbench.observing.interception.position_axes import BatchAxis, Beside, Positions
from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token
from workbench.observing.recognition.module_runs import Execution

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference from the reference, relative to the largest entry, at which an attention counts as the same computation."""
NO_DISTRIBUTION = (
    "the weights of the values are no distribution (entries below 0, NaN, or rows that sum to more than 1)"
)
NO_KEY = "a column of its softmax is no key (sink logits): a share of each row goes to no token, shown as null"
NO_TOKEN = "some of its keys are no tokens (registers, a prefix): a share of each row goes to them, shown as null"
BY_HAND = "by hand"
"""Kind of an attention whose softmax no call computes."""
UNREAD = "unread"
"""Kind of the placeholder for the attention of a block without a readable one."""
SEVERAL = "several"
"""Kind of all attentions of a block taken together."""
_RECENT = 4  # latest softmaxes and products that a product with values may belong to
_LEAST = 1e-30  # weights below this have no useful logarithm
_FEW_WEIGHTS = 0.25  # share of a causal triangle that must be above it


class EagerAxes(NamedTuple):
    """Axes of the tensors of an eager attention: letters and orders of `ProductCall.arranged`, the last two axes (pos, d_head)."""

    first: int  # which operand of the first product is q
    q: str
    k: str
    which: int  # which operand of the second product is the pattern
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
    times: tuple[int, ...]  # of its call, or of its products and softmax
    heads: int
    kv_heads: int
    repeats: int  # how often the call repeats each key-value head
    q: Tensor  # [row, head, d_head], scaled so that a score is q . k / sqrt(d_head)
    k: Tensor  # [row, kv_head, d_head]
    v: Tensor  # [row, kv_head, d_value]
    z: Tensor  # [row, head, d_value]
    mask: str
    refusal: str = ""  # why it cannot be read at all
    exact: bool = True  # whether softmax(q k) v under the mask equals its output
    scale: float = 1.0  # score over q . k, of an eager attention
    note: str = ""
    is_aside: bool = False  # whether its queries are no positions, so that it is not the block's attention
    is_distribution: bool = True  # whether the weights of the values are >= 0 with rows that sum to at most 1
    lse: Tensor | None = None  # [row, head], where the reference equals its output
    axes: Any = None  # `EagerAxes` of an eager attention
    beside: Beside = (0, 0)  # number of keys before and after those of the tokens
    softmax_beside: Beside = (0, 0)  # the same of the columns of an eager attention's softmax
    chosen: tuple[int, ...] = ()  # heads of an eager attention's softmax that are its own; empty for all
    is_combined: bool = False  # whether its pattern is combined with another before it multiplies the values
    parts: tuple[TracedAttention, ...] = ()  # of several attentions: each one
    batch_axes: Mapping[str, BatchAxis] = field(default_factory=dict)  # by role of the call, where heads come first

    @property
    def each(self) -> tuple[TracedAttention, ...]:
        """The attentions that it joins, or itself."""
        return self.parts or (self,)

    @property
    def has_null(self) -> bool:
        """True if a share of some rows goes to no token."""
        return any(any(a.beside) or any(a.softmax_beside) for a in self.each)

    @property
    def is_read(self) -> bool:
        """True for a readable attention."""
        return self.kind != UNREAD

    @property
    def has_statistics(self) -> bool:
        """True if attention statistics are exact."""
        return all(a.is_read and a.is_distribution and (a.exact or a.kind == "eager") for a in self.each)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the exact attention statistics."""
        null = (NULL,) if all(a.has_null for a in self.each) else ()
        return (*STATISTICS, *null) if self.has_statistics else ()

    @property
    def squares(self) -> tuple[str, ...]:
        """Names of its activations over queries and keys. The scores of a softmax by hand are no tensor."""
        if not self.has_statistics:
            return ()
        return ("pattern",) if any(a.kind == BY_HAND for a in self.each) else ("attn_scores", "pattern")

    @property
    def pattern_from_qk(self) -> bool:
        """True if the pattern is the softmax of q . k under the causal mask alone."""
        return all(a.is_read and a.exact and a.mask == CAUSAL and not a.has_null for a in self.each)


class SoftmaxCall(NamedTuple):
    """A softmax that may belong to an attention: its time, scores and pattern [..., query, key], and the product before it."""

    time: int  # 0: by hand
    scores: Tensor
    pattern: Tensor
    product: tuple[int, ProductCall]
    key: str  # letter of its own axis in the product's result
    letters: str = ""  # of its axes in the module, its own axis last; empty where they are [..., query, key]
    order: str = ""  # of these letters in scores and pattern: (lead, query, key)
    batch: BatchAxis | None = None  # which axis holds the sequences in the module, if known

    def beside(self, used: Tensor) -> Beside | None:
        """Count the columns before and after the ones that multiply the values; None if these belong to another softmax."""
        extra = self.pattern.shape[-1] - used.shape[-1]
        for before in dict.fromkeys((0, extra)) if extra >= 0 else ():
            part = self.pattern.narrow(-1, before, used.shape[-1])
            if part.numel() == used.numel() and torch.equal(used.reshape(part.shape), part.to(used.dtype)):
                return before, extra - before
        return None

    @as_written
    def factor(self, scores: Tensor, allowed: Tensor, q: Tensor, k: Tensor) -> float | None:
        """Fit its scores [batch, head, query, key] as one factor times q . k; None if they are not."""
        if self.time:
            return score_factor(scores, allowed, q, k)
        wide = torch.promote_types(q.dtype, torch.float32)
        if scores.shape[1] != q.shape[2]:
            return None
        dots = torch.einsum("bihd,bjhd->bhij", q.to(wide), repeated(k.to(wide), q.shape[2]))
        return _row_factor(scores, dots, allowed & (scores > scores.new_tensor(_LEAST).log()), q.dtype)


def softmax_by_hand(
    call: ProductCall, products: Sequence[tuple[int, ProductCall, Tensor]], length: int
) -> SoftmaxCall | None:
    """Find a softmax that no call computes in a product with values.

    Its rows are distributions, and their logarithms are one factor times an earlier product, up to a constant per row.
    """
    for weights in call.operands:
        if weights.shape[-2:] != (length, length) or length < 2 or not weights.is_floating_point():
            continue
        slack = max(1e-4, 8 * torch.finfo(weights.dtype).eps)
        if not is_distribution(weights) or not (weights.sum(-1, dtype=torch.float32) - 1).abs().max() <= slack:
            continue
        logs = weights.to(torch.promote_types(weights.dtype, torch.float32)).log()
        seen = logs > logs.new_tensor(_LEAST).log()
        if not float(seen.sum()) > _FEW_WEIGHTS * length * (length + 1) / 2 * seen[..., 0, 0].numel():
            continue
        for time, before, out in reversed(products):
            adds = getattr(before.function, "__name__", "") == "baddbmm"  # to q . k
            if out.shape == weights.shape and not adds and _row_factor(logs, out, seen, out.dtype) is not None:
                return SoftmaxCall(0, logs, weights, (time, before), before.letters[2][-1])
    return None


def _row_factor(logs: Tensor, dots: Tensor, seen: Tensor, dtype: torch.dtype) -> float | None:
    """Fit logarithms of weights as one factor times dots, up to a constant per row; None beyond the tolerance of `dtype`."""
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(seen, z.double(), 0.0) for z in (dots, logs))
    x, y = (torch.where(seen, z - z.sum(-1, keepdim=True) / count, 0.0) for z in (x, y))
    size = float(x.square().sum())
    if not size:
        return None
    factor = float((x * y).sum()) / size
    left, top = float((x * factor - y).abs().max()), float(torch.where(seen, logs, 0.0).abs().max())
    return factor if left <= TOLERANCE.get(dtype, 1e-2) * max(top, 1.0) else None


@dataclass(frozen=True)
class EagerCall:
    """An eager attention: its softmax, the product with values, which of that product's operands is the pattern, its output."""

    softmax: SoftmaxCall
    time: int  # of the product with values
    call: ProductCall
    which: int
    out: Tensor
    positions: Positions
    chosen: tuple[int, ...] = ()  # its heads of the softmax, whose other half it is combined with; empty for all
    is_combined: bool = False  # whether its pattern is combined with another before it multiplies the values

    @property
    def used(self) -> Tensor:
        """The weights of the values, [..., query, key] if they are a pattern."""
        order = pattern_order(self.call, self.which, self.positions.rows, self.positions.columns)
        return self.call.operands[self.which] if order is None else self.call.arranged(self.which, order)

    @property
    def cut(self) -> Beside:
        """Number of the softmax's columns before and after those that multiply the values."""
        return self.softmax.beside(self.used) or (0, 0)

    @property
    def axes(self) -> tuple[tuple[int, str, str], tuple[str, str, str]] | None:
        """Which operand of the first product is q, and the orders of the axes; None if they are no attention's."""
        at = self.positions
        return attention_axes(self.softmax.product[1], self.call, self.which, at.rows, at.columns, self.softmax.key)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the output, each [..., pos, d_head]."""
        assert self.axes is not None
        (first, q_order, k_order), (_, v_order, z_order) = self.axes
        scores = self.softmax.product[1]
        q, k = scores.arranged(first, q_order), scores.arranged(1 - first, k_order)
        v, z = self.call.arranged(1 - self.which, v_order), arrange(self.out, self.call.letters[2], z_order)
        return q, k, v, z

    def describe(self, attention: TracedAttention, scale: float | None) -> None:
        """Set the axes of an attention, and note scores of another form, a changed pattern, and columns that are no keys."""
        assert self.axes is not None
        roles = {"scores": self.softmax.product[1].batch, "softmax": self.softmax.batch, "values": self.call.batch}
        attention.batch_axes = {role: batch for role, batch in roles.items() if batch is not None and batch.is_inner}
        attention.axes = EagerAxes(*self.axes[0], self.which, *self.axes[1], self.softmax.letters, self.softmax.order)
        attention.chosen, attention.is_combined = self.chosen, self.is_combined
        altered = not self.is_combined and self.softmax.beside(self.used) is None
        attention.exact &= scale is not None and not altered
        if scale is None:
            attention.note = "scores are not a multiple of q . k (a bias, a cap): no rot_q and rot_k"
        if altered:
            attention.note = (
                "the pattern changes after its softmax; statistics are of the weights that multiply the values"
            )
        if not is_distribution(self.softmax.pattern if self.is_combined else self.used):
            attention.is_distribution, attention.note = False, NO_DISTRIBUTION
        elif attention.has_null:
            attention.note = NO_KEY if any(self.cut) else NO_TOKEN


class EagerCalls:
    """The latest products and softmaxes of a run, which later products may complete to attentions."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.products: list[tuple[int, ProductCall, Tensor]] = []
        self.softmaxes: list[SoftmaxCall] = []

    def softmax(self, scores: Tensor, pattern: Tensor, axis: int, time: int, batch: BatchAxis | None = None) -> None:
        """Record a softmax over positions, its axis moved to the end from `axis`, if an earlier product may be its scores."""
        at, rows = self.positions, scores.numel() // scores.shape[-1]
        widths = range(at.columns, scores.shape[-1] + 1)
        for t, call, out in reversed(self.products):
            calls = [
                SoftmaxCall(time, arrange(scores, *axes), arrange(pattern, *axes), (t, call), axes[1][-1], *axes, batch)
                for axes in softmax_axes(call, scores.shape, axis, at.rows, at.columns)
            ]
            if len(calls) > 1:  # last the one whose unmasked scores are nearest to a multiple of the product
                misfits = []
                for each in calls:
                    pair = each.scores, arrange(out, call.letters[2], each.order)
                    target, source = (torch.where(visible_keys(each.scores), x.double(), 0.0) for x in pair)
                    misfits.append(fit(target, [source])[1])
                calls = [calls[i] for i in torch.tensor(misfits).argsort(descending=True, stable=True).tolist()]
            plain = scores.shape[-2] == at.columns and out.numel() == rows * out.shape[-1] and out.shape[-1] in widths
            if not calls and plain:
                calls = [SoftmaxCall(time, scores, pattern, (t, call), call.letters[2][-1], batch=batch)]
            if calls:
                recent = sorted({each.time for each in self.softmaxes})[1 - _RECENT :]
                self.softmaxes = [*(each for each in self.softmaxes if each.time in recent), *calls]
                return

    def product(self, call: ProductCall, out: Tensor, time: int) -> list[EagerCall]:
        """Return the attentions whose values a product multiplies: none, one, or two whose patterns are combined."""
        attentions = self._attentions(call, out, time) if self.softmaxes else []
        taken = max((each.softmax.time for each in attentions), default=0)
        self.softmaxes = [each for each in self.softmaxes if each.time > taken]
        if not attentions and (softmax := softmax_by_hand(call, self.products, self.positions.columns)) is not None:
            which = 0 if call.operands[0] is softmax.pattern else 1
            attentions = [EagerCall(softmax, time, call, which, out, self.positions)]
        self.products = [*self.products[1 - _RECENT :], (time, call, out)]
        return attentions

    def _attentions(self, call: ProductCall, out: Tensor, time: int) -> list[EagerCall]:
        """Find the softmax that is an operand of a product, else two in a combination, else the latest one, changed."""
        queries, last = self.positions.columns, self.softmaxes[-1]
        orders = {i: o for i in (0, 1) if (o := pattern_order(call, i, self.positions.rows, queries)) is not None}
        for which in orders:
            for softmax in reversed(self.softmaxes):
                attention = EagerCall(softmax, time, call, which, out, self.positions)
                if attention.axes is not None and softmax.beside(attention.used) is not None:
                    return [attention]
        for which, order in orders.items():
            used = call.arranged(which, order)
            if used.shape[-1] != queries or order[-1] != call.letters[which][-1]:  # the sum must run over the keys
                continue
            attentions = [
                EagerCall(s, time, call, which, out, self.positions, heads, True) for s, heads in self._combined(used)
            ]
            if not attentions and used.numel() == last.pattern.numel() // last.pattern.shape[-1] * queries:
                attentions = [EagerCall(last, time, call, which, out, self.positions)]
            if all(each.axes is not None for each in attentions):
                return attentions
        return []

    def _combined(self, used: Tensor) -> list[tuple[SoftmaxCall, tuple[int, ...]]]:
        """Find two softmaxes, or two halves of one's heads, whose rows sum to a pattern's with one weight per row."""

        def heads_of(pattern: Tensor) -> Tensor:
            return pattern.reshape(self.positions.rows, -1, *pattern.shape[-2:])

        target, size = heads_of(used), used.shape[-1]
        fitting = [s for s in self.softmaxes if s.pattern.shape[-1] == size == s.scores.shape[-1]]
        for one, other in combinations([s for s in fitting if s.pattern.numel() == used.numel()], 2):
            if one.time != other.time and _spans(target, [heads_of(one.pattern), heads_of(other.pattern)]):
                return [(one, ()), (other, ())]
        for softmax in (s for s in fitting if s.pattern.numel() == 2 * used.numel()):
            heads, n = heads_of(softmax.pattern), target.shape[1]
            for halves in ((range(0, 2 * n, 2), range(1, 2 * n, 2)), (range(n), range(n, 2 * n))):
                if _spans(target, [heads[:, list(half)] for half in halves]):
                    return [(softmax, tuple(half)) for half in halves]
        return []


def _spans(target: Tensor, parts: list[Tensor]) -> bool:
    """Return whether each row [..., key] is a weighted sum of the rows of two parts, and not a multiple of one alone."""
    exact = EXACT.get(target.dtype, 1e-2)
    alone = any(weights_by_token(target, [part])[1] <= exact for part in parts)
    return not alone and weights_by_token(target, parts)[1] <= exact


def stacked(attentions: list[TracedAttention]) -> TracedAttention:
    """Join several attentions of one block, their heads one after the other."""
    if len(attentions) == 1:
        return attentions[0]
    q, z = (torch.cat([getattr(a, name) for a in attentions], dim=1) for name in ("q", "z"))
    widened = len({a.heads // a.kv_heads for a in attentions}) > 1  # then each head gets a key-value head of its own
    k, v = (
        torch.cat([x.repeat_interleave(a.heads // x.shape[1] if widened else 1, dim=1) for a, x in each], dim=1)
        for each in ([(a, a.k) for a in attentions], [(a, a.v) for a in attentions])
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


def chosen_heads(x: Tensor, chosen: tuple[int, ...], axis: int = 2) -> Tensor:
    """Select an attention's own heads in a tensor with all heads of its softmax."""
    if not chosen or x.shape[axis] != 2 * len(chosen):
        return x
    return x.index_select(axis, torch.tensor(chosen, device=x.device))


def with_chosen_heads(x: Tensor, part: Tensor, chosen: tuple[int, ...], axis: int = 2) -> Tensor:
    """Replace an attention's own heads in a tensor with all heads of its softmax."""
    if x.shape == part.shape:
        return part
    return x.index_copy(axis, torch.tensor(chosen, device=x.device), part)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [batch, pos, kv_head, d_head] to one for each of `heads` heads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


@as_written
def score_factor(scores: Tensor, allowed: Tensor, q: Tensor, k: Tensor) -> float | None:
    """Fit scores [batch, head, query, key] as one factor times q . k where they are not masked; None if they are not."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    top = torch.zeros((), dtype=torch.double)
    sums = torch.zeros(2, dtype=torch.double)
    group = q.shape[2] // k.shape[2]
    if scores.shape[1] != q.shape[2]:
        return None
    pairs = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2]) if allowed[b, h].any()]
    dots = [(q[b, :, h].to(dtype) @ k[b, :, h // group].to(dtype).T).double() for b, h in pairs]
    for dot, (b, h) in zip(dots, pairs, strict=True):
        allowed_dots, score = dot[allowed[b, h]], scores[b, h][allowed[b, h]].double()
        sums += torch.stack([(allowed_dots * score).sum(), allowed_dots.square().sum()]).cpu()
        top = torch.maximum(top, score.abs().max().cpu())
    if not sums[1]:
        return None
    factor = float(sums[0] / sums[1])
    worst = max(
        float((dot * factor - scores[b, h].double())[allowed[b, h]].abs().max())
        for dot, (b, h) in zip(dots, pairs, strict=True)
    )
    return factor if worst <= TOLERANCE.get(q.dtype, 1e-2) * max(float(top), 1e-6) else None


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Any, causal: bool, kind: str, modify: Modify | None = None,
    beside: Beside = (0, 0),
) -> tuple[Tensor, AttentionStatistics] | None:  # fmt: skip
    """Return output and statistics of softmax(q k) v under a mask of some `kind`; None for a mask that cannot be read."""
    if kind == CAUSAL and not any(beside):
        return causal_attention(q, k, v, scale)
    if isinstance(mask, Tensor) and not kind.startswith("a mask of type"):
        return masked_statistics(q, k, v, scale=scale, mask=mask, causal=causal, modify=modify, beside=beside)
    return None


def near(expected: Tensor, statistics: AttentionStatistics, z: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an output equals the reference's up to the rounding of `dtype`, for queries that see some key."""
    wide, sees = torch.promote_types(z.dtype, torch.float32), (statistics.lse > -torch.inf).transpose(1, 2)
    expected, z = (x[sees].to(wide) for x in (expected, z))
    return bool((expected - z).abs().max() <= TOLERANCE.get(dtype, 1e-2) * z.abs().max().clamp_min(1e-20))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Any]:
    """`attention_statistics` in the type of v, with any width of its heads."""
    wide, own = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    z, statistics = attention_statistics(q.to(v.dtype), k.to(v.dtype), v, scale=scale)
    return z[..., :own], statistics
