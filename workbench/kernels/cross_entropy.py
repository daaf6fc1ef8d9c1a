"""Next-token cross-entropy straight from the normalised stream, without the logits of all positions at once.

    l_i = logsumexp_j (x_i . w_j) - x_i . w_{y_i},     dl_i / dlogits_i = p_i - onehot(y_i),  p_i = softmax_j (x_i . w_j)

One reused buffer holds the logits of a chunk of positions and becomes p - onehot in place. The gradients of a mean (or a sum)
are computed in the same pass, so that a step has as many products as the plain one. With other weights of the positions the
backward pass computes the logits again. Logarithms and sums are in float32 or better.
Source: the order of work of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989); torch 2.13 has a `linear_cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from workbench.errors import BadData

CHUNK = 2**23  # logits at a time: 32 MiB in float32
PART = 2**20  # existing logits that are widened at a time
MIN_ROWS = 128  # positions of a chunk, as every chunk reads and writes the gradient of the matrix once
MIN_LOGITS = 2**24  # least number of logits for chunks: 64 MiB


def cross_entropy_reference(
    x: Float[Tensor, "n d_model"], weight: Float[Tensor, "d_vocab d_model"], targets: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Compute cross-entropy from all logits at once, the reference for `cross_entropy`."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def refuse_targets(targets: Tensor, width: int) -> None:
    """Raise `BadData` for token ids without a logit."""
    if targets.numel() and (last := int(targets.max())) >= width:
        cure = "ids without a logit have no loss; leave them out"
        raise BadData(f"next tokens go up to {last} and logits to {width - 1}: {cure}")


def sequence_losses(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch targets"]:
    """Compute the cross-entropy in nats of every next token from logits, a few positions at a time in float32 or better."""
    rows, wide = max(1, PART // logits.shape[-1]), torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(len(tokens), tokens.shape[1] - 1, dtype=wide, device=logits.device)
    for one, ids, out in zip(logits, tokens, losses, strict=True):  # small tensors in between would fragment the heap
        for part, targets, into in zip(one[:-1].split(rows), ids[1:].split(rows), out.split(rows), strict=True):
            try:
                into.copy_(F.cross_entropy(part.to(wide), targets, reduction="none"))
            except IndexError:
                refuse_targets(tokens[:, 1:], logits.shape[-1])
                raise
    return losses


def cross_entropy(
    x: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, " n"],
    *,
    chunk: int | None = None,
) -> Float[Tensor, " n"]:
    """Compute the cross-entropy in nats of every position's target, float32 (float64 for float64 inputs), twice differentiable.

    Under autocast the products run in its type. Equal to the reference up to the order of sums. `chunk`: positions at a time, by
    default about `CHUNK` logits.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x, weight = (t.to(torch.get_autocast_dtype(device)) for t in (x, weight))
    rows = chunk or max(MIN_ROWS, CHUNK // len(weight))
    return _Chunked.apply(x, weight, targets, rows)


class _Chunked(torch.autograd.Function):
    """Losses, with the gradients of their sum computed in the forward pass if needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.rows = rows
        with torch.autocast(x.device.type, enabled=False):
            losses, *gradients = _pass(x, weight, targets, rows, ctx.needs_input_grad)
        ctx.gradients = gradients if any(ctx.needs_input_grad) else None
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph: the gradient is differentiated too
            inputs = [t for t, needs in zip((x, weight), wanted, strict=False) if needs]
            losses = cross_entropy_reference(x, weight, targets)
            slopes = iter(torch.autograd.grad(losses, inputs, upstream, create_graph=True))
            return next(slopes) if wanted[0] else None, next(slopes) if wanted[1] else None, None, None
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place below, so usable once
        with torch.autocast(x.device.type, enabled=False):
            # weights differ between positions, unlike in a mean; fake tensors have no numbers and count as equal
            if gradients is None or not (isinstance(upstream, FakeTensor) or bool((upstream == upstream[0]).all())):
                del gradients
                _, *gradients = _pass(x, weight, targets, ctx.rows, wanted, upstream)
            else:
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(upstream[0])
        by_x, by_weight = gradients
        return by_x, None if by_weight is None else by_weight.to(weight.dtype), None, None


def _pass(
    x: Tensor, weight: Tensor, targets: Tensor, rows: int, wanted: Any, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses [n] and, if wanted, the gradients of their sum weighted by `upstream`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = x.new_empty(len(x), dtype=wide)
    by_x = torch.empty_like(x) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    buffer = x.new_empty(min(rows, len(x)), len(weight))
    for part in (slice(start, start + rows) for start in range(0, len(x), rows)):
        rows_in, target = x[part], targets[part, None]
        logits = torch.mm(rows_in, weight.T, out=buffer[: len(rows_in)]).to(wide)
        true = logits.gather(1, target)
        most = logits.amax(1, keepdim=True)
        total = logits.sub_(most).exp_().sum(1, keepdim=True)
        losses[part] = (total.log() + most - true)[:, 0]
        if by_x is None and by_weight is None:
            continue
        share = total.reciprocal() if upstream is None else upstream[part, None] / total
        logits.mul_(share)
        one = torch.ones_like(share) if upstream is None else upstream[part, None]
        logits.scatter_add_(1, target, -one)
        slope = logits.to(x.dtype)
        if by_x is not None:
            torch.mm(slope, weight, out=by_x[part])
        if by_weight is not None:
            if wide == x.dtype:
                by_weight.addmm_(slope.T, rows_in)
            else:
                by_weight += slope.T @ rows_in
    return losses, by_x, by_weight
