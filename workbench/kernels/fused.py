"""Attention output and concentration statistics from PyTorch's fused calls that return the rows' log-sum-exp.

With scaled masked scores s_ij, lse_i = ln sum_j exp s_ij and A_ij = exp(s_ij - lse_i):

    z, lse         one call
    H_i            = lse_i - scale q_i . (sum_j A_ij k_j): one more call, with the keys as values
    received_j     = sum_i exp(s_ij - lse_i): exp of the log-sum-exp of the *transposed* attention, a third call. In reverse
                   order it is causal too, and -lse_i is in spare channels of the head, split into parts that
                   16-bit types can represent
    sink_i         = exp(s_i0 - lse_i)
    row_max_i      = exp(max_j s_ij - lse_i): no fused call returns a maximum, so the scores are computed again in strips

A column that is no key scales z by the rest, and counts in the lse_i of `received`. H_i is a difference of two numbers as large
as the scores, so it has their absolute error, unlike the strips' H_i. The calls are private ones of PyTorch, since the public one
does not return the log-sum-exp: FlashAttention, Dao et al. 2022, arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.reference import AttentionStatistics, Keys, Null, Queries, with_null
from workbench.kernels.strips import score_strips

_CALLS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}
_SPARE = 8  # flash attention on a GPU takes multiples of 8 channels
_MAX_WIDTH = 256  # channels of a head on a GPU
_PARTS = 3  # 16-bit parts of a float32 number
_UNIT = 64.0  # the parts are multiples of this, so that float16 reaches 4e6


def runs_fused(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """Return whether `fused_statistics` can run: PyTorch has the call, and on a GPU the hardware, type and width fit."""
    if not hasattr(torch.ops.aten, _CALLS.get(device.type, "no call")):
        return False
    if device.type == "cpu":
        return True
    return (
        torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and _padded(d_head) <= _MAX_WIDTH
    )


def _padded(d_head: int) -> int:
    return -(-(d_head + _PARTS) // _SPARE) * _SPARE


@torch.no_grad()
def fused_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, row_max: bool = True, null: Null = None
) -> tuple[Queries, AttentionStatistics]:
    """`attention_statistics` in fused calls; raises `WorkbenchError` if `runs_fused` is false or the scale is not above 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0 or not runs_fused(q.device, q.dtype, q.shape[-1]):
        kind = f"scale {scale}, {q.dtype}, width {q.shape[-1]} on {q.device}"
        raise WorkbenchError(f"no fused call for {kind}; use strips")
    z, received, row_entropy, sink, lse = fused_but_maximum(q, k, v, scale=scale, null=null)
    top = None
    if row_max:
        top = torch.empty_like(lse)
        for strip in score_strips(q, k, scale=scale):
            rows = top[strip.sequences, strip.heads, strip.queries]
            rows.copy_(strip.scores.amax(-1).view(rows.shape))
        top = top.sub_(lse).exp_().clamp_(max=1)
    statistics = AttentionStatistics(received=received, row_entropy=row_entropy, row_max=top, sink=sink, lse=lse)
    return z, statistics if null is None else with_null(statistics, null)


def fused_but_maximum(
    q: Queries, k: Keys, v: Keys, *, scale: float, null: Null = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the three calls: returns output and received, and row entropy, sink and lse without the null column."""
    heads = q.shape[2]
    q, k, v = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (q, k, v))
    z, lse = _call(q, k, v, scale)
    mean_key, _ = _call(q, k, k, scale)
    wide, first = q.to(lse.dtype), k[:, :, :1].to(lse.dtype)
    entropy = lse - scale * (wide * mean_key).sum(-1)
    sink = (scale * (wide * first).sum(-1) - lse).exp()
    with_column = lse
    if null is not None:
        with_column = torch.logaddexp(lse, null.to(lse)[:, None])
        z = z * (lse - with_column).exp().to(z.dtype)[..., None]
    # received: in reverse order every key is a query over the rows that see it, with -lse in spare channels
    width = q.shape[-1]
    columns, rows = (x.new_zeros(*x.shape[:-1], _padded(width)) for x in (k, q))
    columns[..., :width], rows[..., :width] = k.flip(2), q.flip(2)
    columns[..., width : width + _PARTS] = _UNIT
    rest = with_column.flip(-1) / (-scale * _UNIT)
    for channel in range(width, width + _PARTS):
        rows[..., channel] = rest
        rest = rest - rows[..., channel]
    received = _call(columns, rows, rows, scale)[1].flip(-1).exp()  # with values of another width the call is not fused
    return z.transpose(1, 2), received, entropy.clamp_(min=0), sink, lse


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and lse [batch, head, pos] of causal attention of [batch, head, pos, d_head] with as many key as query heads."""
    width = q.shape[-1]
    if missing := -width % _SPARE:
        q, k, v = (torch.nn.functional.pad(x, (0, missing)) for x in (q, k, v))
    call: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, _CALLS[q.device.type])
    z, lse = call(q, k, v, is_causal=True, scale=scale)[:2]
    return z[..., :width], lse[..., : q.shape[2]]
