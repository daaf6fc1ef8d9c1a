"""Routers of mixtures of experts: modules that return the logits of all experts and the weights of the best ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.observing.recognition.executions import Execution
from workbench.observing.recognition.fits import EXACT
from workbench.observing.recognition.structure import TensorLocation


@dataclass(frozen=True)
class Router(TensorLocation):
    """Logits of a router, and how many experts a token takes: the likeliest, weighted by the softmax over all or over these."""

    experts: int
    top: int
    is_normed: bool  # whether the weights of a token's experts sum to 1

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weights [..., expert] of the experts in the MLP's output. An expert that the token does not take has weight 0."""
        shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        best, place = shares.topk(self.top, -1)
        best = best / best.sum(-1, keepdim=True) if self.is_normed else best
        return torch.zeros_like(shares).scatter(-1, place, best)


def find_router(inside: Sequence[Execution]) -> Router | None:
    """Find a module whose second float output is the weights of the experts that its first one, the logits, selects."""
    for entry in inside:
        if len(entry.outputs) != 2 or len(entry.inputs) != 1:
            continue
        logits, weights = entry.outputs
        experts, top = logits.rows.shape[1], weights.rows.shape[1]
        if not 0 < top < experts or logits.axes != weights.axes or not float(logits.rows.float().std(-1).max()):
            continue
        for is_normed in (True, False):
            router = Router.of(entry, logits, inside, experts=experts, top=top, is_normed=is_normed)
            made = router.weights(logits.rows).topk(top, -1).values
            off = (made - weights.rows.to(made).sort(-1, descending=True).values).abs().max()
            if float(off) <= EXACT.get(weights.rows.dtype, 1e-2):
                return router
    return None
