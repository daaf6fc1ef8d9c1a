"""A softmax as it passed in a traced run, and how one that is written out (exp, sum, division) is told from anything else.

Written out, it is seen where it multiplies the values: a matrix [..., pos, pos] whose rows are >= 0 and sum to 1, and whose
logarithm is one factor times q . k of the product before it, up to a number for each row. Nothing else is taken for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.observing.interception.masks import is_distribution
from workbench.observing.interception.positions import BatchAxis, Beside
from workbench.observing.interception.product_calls import ProductCall, as_written
from workbench.observing.recognition.attention_reference import TOLERANCE, score_factor

_LEAST = 1e-30  # weights below this have no logarithm to speak of
_FEW_WEIGHTS = 0.25  # of a causal triangle that must be above it


class SeenSoftmax(NamedTuple):
    """A softmax that may be an attention's: when (0: written out), what it read and made, the product before it with its time.

    Scores and pattern are [..., query, key].
    """

    time: int
    scores: Tensor
    pattern: Tensor
    product: tuple[int, ProductCall]
    key: str  # letter of its own axis in the product's result
    letters: str = ""  # of its axes in the module, its own axis last; empty where they are [..., query, key]
    order: str = ""  # of these letters, as scores and pattern are kept: (lead, query, key)
    batch: BatchAxis | None = None  # which axis holds the sequences in the module, where that is known

    def beside(self, used: Tensor) -> Beside | None:
        """How many of its columns before and after those that multiply the values do not; None where these are another's."""
        extra = self.pattern.shape[-1] - used.shape[-1]
        for before in dict.fromkeys((0, extra)) if extra >= 0 else ():
            part = self.pattern.narrow(-1, before, used.shape[-1])
            if part.numel() == used.numel() and torch.equal(used.reshape(part.shape), part.to(used.dtype)):
                return before, extra - before
        return None

    @as_written
    def factor(self, scores: Tensor, allowed: Tensor, q: Tensor, k: Tensor) -> float | None:
        """The factor between q . k and its scores [batch, head, query, key]; None where there is none."""
        if self.time:
            return score_factor(scores, allowed, q, k)
        wide = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[2] // k.shape[2]
        if scores.shape[1] != q.shape[2]:
            return None
        dots = torch.einsum("bihd,bjhd->bhij", q.to(wide), k.to(wide).repeat_interleave(group, dim=2))
        return _row_factor(scores, dots, allowed & (scores > _ln_least(scores)), q.dtype)


def softmax_by_hand(
    call: ProductCall, products: Sequence[tuple[int, ProductCall, Tensor]], length: int
) -> SeenSoftmax | None:
    """The softmax that a product of values may be under, where no call made it; None where that is not certain."""
    for weights in call.operands:
        if weights.shape[-2:] != (length, length) or length < 2 or not _sums_to_one(weights):
            continue
        logs = weights.to(torch.promote_types(weights.dtype, torch.float32)).log()
        for time, before, out in reversed(products):
            if (
                out.shape == weights.shape and getattr(before.function, "__name__", "") != "baddbmm"
            ):  # that adds to q . k
                seen = logs > _ln_least(logs)
                dense = float(seen.sum()) > _FEW_WEIGHTS * length * (length + 1) / 2 * seen[..., 0, 0].numel()
                if dense and _row_factor(logs, out, seen, out.dtype) is not None:
                    return SeenSoftmax(0, logs, weights, (time, before), before.letters[2][-1])
    return None


def _ln_least(x: Tensor) -> Tensor:
    return x.new_tensor(_LEAST).log()


def _sums_to_one(weights: Tensor) -> bool:
    """Whether all rows are distributions over what they see."""
    slack = max(1e-4, 8 * torch.finfo(weights.dtype).eps) if weights.is_floating_point() else 0.0
    sums = weights.sum(-1, dtype=torch.float32) if slack else weights
    return bool(slack) and is_distribution(weights) and bool((sums - 1).abs().max() <= slack)


def _row_factor(logs: Tensor, dots: Tensor, seen: Tensor, dtype: torch.dtype) -> float | None:
    """Return the factor of dots [..., query, key] in logarithms of weights, up to a number for each row; None where one is left over.

    `dtype`: type of the queries and keys, which sets the tolerance.
    """
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(seen, z.double(), 0.0) for z in (dots, logs))
    x, y = (torch.where(seen, z - z.sum(-1, keepdim=True) / count, 0.0) for z in (x, y))
    size = float(x.square().sum())
    if not size:
        return None
    factor = float((x * y).sum()) / size
    left, top = float((x * factor - y).abs().max()), float(torch.where(seen, logs, 0.0).abs().max())
    return factor if left <= TOLERANCE.get(dtype, 1e-2) * max(top, 1.0) else None
