"""What a seen attention is held against: the factor between q . k and its scores, and the output that softmax(q k) v gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.kernels.attention import AttentionStatistics, attention_statistics
from workbench.observing.interception.masks import CAUSAL, Modify, masked_statistics
from workbench.observing.interception.positions import Beside
from workbench.observing.interception.product_calls import as_written

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far an attention's output may be from the reference, relative to its largest entry, to count as the same computation."""


@as_written
def score_factor(scores: Tensor, allowed: Tensor, q: Tensor, k: Tensor) -> float | None:
    """The factor between q . k and the scores [batch, head, query, key] where they are not masked; None where there is none."""
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
    """The reference's output and statistics of an attention; None under a mask that it cannot read. `kind`: what that does."""
    if kind == CAUSAL and not any(beside):
        return causal_attention(q, k, v, scale)
    if isinstance(mask, Tensor) and not kind.startswith("a mask of type"):
        return masked_statistics(q, k, v, scale=scale, mask=mask, causal=causal, modify=modify, beside=beside)
    return None


def near(found: Tensor, statistics: AttentionStatistics, z: Tensor, dtype: torch.dtype) -> bool:
    """Whether the reference gives the attention's own output, in the type of its values, for queries that see some key."""
    wide, sees = torch.promote_types(z.dtype, torch.float32), (statistics.lse > -torch.inf).transpose(1, 2)
    found, z = (x[sees].to(wide) for x in (found, z))
    return bool((found - z).abs().max() <= TOLERANCE.get(dtype, 1e-2) * z.abs().max().clamp_min(1e-20))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Any]:
    """`attention_statistics` in v's type, with a value width of its own."""
    wide, own = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    z, statistics = attention_statistics(q.to(v.dtype), k.to(v.dtype), v, scale=scale)
    return z[..., :own], statistics
