"""Attention masks of foreign modules: their kinds, and exact attention statistics under any of them.

Causal attention uses the streaming kernel. Any other mask is a T x T array already: the statistics under it are computed in
strips of queries, without a T x T pattern.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.kernels.attention_and_its_statistics import AttentionStatistics
from workbench.observing.interception.documents_and_labels import Segments
from workbench.observing.interception.eager_attention_products import as_written
from workbench.observing.interception.position_axes import Beside

CAUSAL, FUTURE = "causal", "sees later positions"
NOTHING = "hides every position"
WINDOW, PADDING, PACKED = "sliding window of {}", "padding", "packed sequences"
DIFFERENT = "hides some earlier positions"
CROSSING = "lets sequences that stand in one row see each other"
HIDDEN = -1e4  # a score or bias up to this hides its key
FAR, LATER_FAR = 5000.0, 500.0  # as do scores this far below the row's maximum; the second for later keys
_ROWS = 256
Modify = Callable[[Tensor, int, int, int], Tensor]
"""(scaled scores [query, key], sequence, head, first query) -> changed scores."""


def mask_kind(mask: object, causal: bool, length: int, window: int | None = None) -> str:
    """Describe a mask of `scaled_dot_product_attention` [..., query, key]; `CAUSAL` if it is just that.

    With `causal` the mask applies to earlier keys only; `window`: number of visible keys, if an argument limits them.
    """
    if window is not None and window < length:
        return WINDOW.format(window)
    if mask is not None and not isinstance(mask, Tensor):
        return f"a mask of type {type(mask).__name__}"
    if mask is None:
        return CAUSAL if causal or length == 1 else FUTURE
    allowed = mask if mask.dtype == torch.bool else visible_keys(mask)
    past = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    allowed = allowed.expand(*allowed.shape[:-2], length, length)
    allowed = allowed & past if causal else allowed
    if not bool(allowed.any()):
        return NOTHING
    if bool((allowed & ~past).any()):
        return FUTURE
    if mask.dtype != torch.bool and bool((mask.masked_fill(~allowed, 0) != 0).any()):
        return "adds a bias to the scores"
    if bool((allowed == past).all()):
        return CAUSAL
    allowed, position = allowed.reshape(-1, length, length), torch.arange(length, device=past.device)
    distance = position[:, None] - position
    window = int(distance.expand_as(allowed)[allowed].max()) + 1
    if bool((allowed == (past & (distance < window))).all()):
        return WINDOW.format(window)
    seen = allowed.any(1)[:, None]
    if bool((allowed == (past & seen)).all()):
        return PADDING
    if bool((allowed == (past & seen & (distance < window))).all()):
        return WINDOW.format(window)
    starts = allowed.to(torch.uint8).argmax(-1)
    begins = (starts == position) | (starts == starts.roll(1, -1))
    if bool((allowed == (past & (position >= starts[..., None]))).all()) and bool(begins[:, 1:].all()):
        return PACKED
    return DIFFERENT


def kind_within(allowed: Tensor, documents: Tensor) -> str:
    """Describe which earlier keys [batch, head, query, key] queries see of their own document [batch, pos] (0: padding)."""
    place = torch.arange(documents.shape[-1], device=allowed.device)
    distance = place[:, None] - place
    own = (documents[:, :, None] == documents[:, None]) & (documents[:, None] > 0) & (distance >= 0)
    allowed, own = torch.broadcast_tensors(allowed & own[:, None], own[:, None])
    if bool((allowed == own).all()):
        return PACKED
    window = int(distance.expand_as(allowed)[allowed].max()) + 1
    return WINDOW.format(window) if bool((allowed == (own & (distance < window))).all()) else DIFFERENT


def visible_keys(scores: Tensor) -> Tensor:
    """Return which keys a query attends to, from scores or additive masks [..., query, key].

    Masks may be finite: -1000 in place of a score, or -10000 on top of one, hide a key too.
    """
    if scores.shape[-2] != scores.shape[-1]:
        return scores > HIDDEN
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    best = scores.masked_fill(future, -torch.inf).amax(-1, keepdim=True)
    near = scores > torch.where(future, best - LATER_FAR, best - FAR)
    return near & (scores > HIDDEN) & (best > HIDDEN / 2)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [query, key] of a sliding window: True for the latest `window` keys."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


@torch.no_grad()
@as_written
def masked_statistics(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_value"],
    *,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    modify: Modify | None = None,
    beside: Beside = (0, 0),
    segments: Segments | None = None,
) -> tuple[Float[Tensor, "batch pos head d_value"], AttentionStatistics]:
    """Compute attention output and statistics under a mask of `scaled_dot_product_attention`, in strips.

    `modify` changes scaled scores before the mask (FlexAttention). `beside`: numbers of keys before and after the tokens' keys,
    whose share of a row is `null`. `segments`: see `pattern_statistics`. Float32 or better.
    A row without a visible key (bool, or -inf) has lse -inf and all other statistics 0.
    """
    batch, length, heads, _ = q.shape
    keys = k.shape[1]
    tokens = slice(beside[0], beside[0] + length)
    wide = torch.promote_types(v.dtype, torch.float32)
    group = heads // k.shape[2]
    z = torch.empty(batch, length, heads, v.shape[-1], dtype=v.dtype, device=q.device)
    received = torch.zeros(batch, heads, length, dtype=wide, device=q.device)
    rowwise = torch.zeros(5, batch, heads, length, dtype=wide, device=q.device)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1) if causal else None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)].expand(batch, -1, length, keys)
    for b in range(batch):
        for h in range(heads):
            key, value = k[b, :, h // group].to(wide), v[b, :, h // group].to(wide)
            for start in range(0, length, _ROWS):
                rows = slice(start, min(start + _ROWS, length))
                scores = q[b, rows, h].to(wide) @ key.T * scale
                scores = scores if modify is None else modify(scores, b, h, start)
                hidden = None if mask is None else mask[b, h if mask.shape[1] > 1 else 0, rows]
                if hidden is not None and hidden.dtype == torch.bool:
                    scores = scores.masked_fill(~hidden, -torch.inf)
                elif hidden is not None:  # a row that a finite bias hides has the pattern of its biased scores
                    scores = scores + hidden.to(scores.dtype)
                scores = scores if future is None else scores.masked_fill(future[rows], -torch.inf)
                pattern = scores.softmax(-1).nan_to_num_(0.0)
                z[b, rows, h] = (pattern @ value).to(v.dtype)
                seen = pattern[:, tokens]
                first = seen[:, 0] if segments is None else seen.gather(1, segments.first[b, rows, None])[:, 0]
                outside = pattern[:, : beside[0]].sum(-1) + pattern[:, tokens.stop :].sum(-1)
                received[b, h] += (seen if segments is None else seen[segments.is_text[b, rows]]).sum(0)
                entropy = torch.special.entr(seen).sum(-1) + torch.special.entr(outside)
                rowwise[:, b, h, rows] = torch.stack((entropy, seen.amax(-1), first, scores.logsumexp(-1), outside))
    entropy, top, sink, lse = rowwise[:4]
    null = rowwise[4] if any(beside) else None
    return z, AttentionStatistics(received=received, row_entropy=entropy, row_max=top, sink=sink, lse=lse, null=null)


@torch.no_grad()
def is_distribution(pattern: Float[Tensor, "*any pos pos"]) -> bool:
    """Return whether all entries are >= 0 and no row sums to more than 1, up to rounding."""
    slack = max(1e-4, 8 * torch.finfo(pattern.dtype).eps)
    rows = pattern.sum(-1, dtype=torch.promote_types(pattern.dtype, torch.float32))
    return bool(pattern.min() >= -slack) and bool(rows.max() <= 1 + slack)


@torch.no_grad()
def pattern_statistics(
    lse: Float[Tensor, "batch head pos"],
    pattern: Float[Tensor, "batch head pos pos"],
    null: Float[Tensor, "batch head pos"] | None = None,
    segments: Segments | None = None,
) -> AttentionStatistics:
    """Compute statistics of a pattern that the module has formed, a head at a time; float32 or better.

    `null`: share of each row that goes to no key, one more column in its entropy. With `segments`, `received` leaves out the queries
    of padding, and `sink` is the attention to the first token of the query's document.
    """
    wide = torch.promote_types(pattern.dtype, torch.float32)
    by_head = []
    for b, heads in enumerate(pattern):
        for p in (head.to(wide) for head in heads):
            used = p if segments is None else p[segments.is_text[b]]
            first = p[:, 0] if segments is None else p.gather(1, segments.first[b, :, None])[:, 0]
            by_head.append((used.sum(0), torch.special.entr(p).sum(-1), p.amax(-1), first))
    received, entropy, top, sink = (torch.stack(x).unflatten(0, pattern.shape[:2]) for x in zip(*by_head, strict=True))
    if null is not None:
        entropy, null = entropy + torch.special.entr(null.to(wide)), null.to(wide)
    lse = lse.to(wide)
    return AttentionStatistics(received=received, row_entropy=entropy, row_max=top, sink=sink, lse=lse, null=null)
