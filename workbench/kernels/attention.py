"""Attention output and its concentration statistics without the T x T pattern: strips of queries, or stock fused calls.

| form | statistics from | where |
|---|---|---|
| `strips` | one pass over strips of queries, float32 or float64 | everywhere else; the CPU |
| `fused` | three fused attention calls; the row maximum, if wanted, by strips | 16-bit types on a GPU with flash attention |

Both take memory O(T) and equal `attention_reference`. `attention_form` says which one is taken.
"""

from __future__ import annotations

import torch

from workbench.kernels.fused import fused_statistics, runs_fused
from workbench.kernels.reference import AttentionStatistics, Keys, Null, Queries, attention_reference, refuse_other
from workbench.kernels.strips import strip_statistics

__all__ = ["AttentionStatistics", "attention_form", "attention_reference", "attention_statistics"]


def attention_form(device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """How `attention_statistics` works on inputs of this kind, at a scale above 0: `strips` or `fused`."""
    return "fused" if device.type == "cuda" and dtype.itemsize == 2 and runs_fused(device, dtype, d_head) else "strips"


@torch.no_grad()
def attention_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, budget: int | None = None, row_max: bool = True,
    null: Null = None,
) -> tuple[Queries, AttentionStatistics]:  # fmt: skip
    """Causal attention output (dtype of q) and its statistics; a measurement, so nothing returned carries a gradient.

    Query head h reads kv head h * kv_heads // heads. Statistics are float32 (float64 for float64 inputs), also under
    autocast.

    Args:
        q: queries after rotary embedding.
        k: keys after rotary embedding.
        v: values, already mixed where the architecture mixes them.
        scale: factor on q . k; 1 / sqrt(d_head) unless given.
        budget: elements in one strip of scores; strips are taken where it is given.
        row_max: whether the row maximum is wanted: fused calls need another pass for it, strips find it anyway.
        null: logits of one more column of the softmax, which is no key (sink logits, off by one).
    """
    refuse_other(q, k, v, null)
    fused = attention_form(q.device, q.dtype, q.shape[-1]) == "fused"
    if fused and budget is None and (scale is None or scale > 0):  # fused calls mask before they scale
        return fused_statistics(q, k, v, scale=scale, row_max=row_max, null=null)
    return strip_statistics(q, k, v, scale=scale, budget=budget, null=null)
