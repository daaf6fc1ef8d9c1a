"""Attention output and concentration statistics without the T x T pattern, by strips of queries or by fused calls.

| form | computation | used for |
|---|---|---|
| `strips` | one pass over strips of queries, float32 or float64 | the CPU and all other inputs |
| `fused` | three fused attention calls; the row maximum, if wanted, by strips | 16-bit types on a GPU with flash attention |

Both take memory O(T) and equal `attention_reference`. `attention_form` names the form of given inputs.
"""

from __future__ import annotations

import torch

from workbench.kernels.fused import fused_statistics, runs_fused
from workbench.kernels.reference import AttentionStatistics, Keys, Null, Queries, attention_reference, refuse_other
from workbench.kernels.strips import strip_statistics

__all__ = ["AttentionStatistics", "attention_form", "attention_reference", "attention_statistics"]


def attention_form(device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """Return the form of `attention_statistics` for inputs of this kind at a scale above 0: `strips` or `fused`."""
    return "fused" if device.type == "cuda" and dtype.itemsize == 2 and runs_fused(device, dtype, d_head) else "strips"


@torch.no_grad()
def attention_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, budget: int | None = None, row_max: bool = True,
    null: Null = None,
) -> tuple[Queries, AttentionStatistics]:  # fmt: skip
    """Compute causal attention output (dtype of q) and its statistics, without gradients.

    Query head h reads kv head h * kv_heads // heads. Statistics are float32 (float64 for float64 inputs), also under
    autocast.

    Args:
        q: Queries after rotary embedding.
        k: Keys after rotary embedding.
        v: Values, mixed if the architecture mixes them.
        scale: Factor on q . k; 1 / sqrt(d_head) by default.
        budget: Elements in one strip of scores; if given, strips are used.
        row_max: Whether to compute the row maximum, for which fused calls need another pass.
        null: Logits of one more column of the softmax, which is no key (sink logits, off by one).
    """
    refuse_other(q, k, v, null)
    fused = attention_form(q.device, q.dtype, q.shape[-1]) == "fused"
    if fused and budget is None and (scale is None or scale > 0):  # fused calls mask before they scale
        return fused_statistics(q, k, v, scale=scale, row_max=row_max, null=null)
    return strip_statistics(q, k, v, scale=scale, budget=budget, null=null)
