"""Routers of mixtures of experts: modules that return the logits of all experts, and the weights of the experts that a token takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.observing.interception.position_axes import Positions
from workbench.observing.interception.tensor_paths import TensorPath, get_at
from workbench.observing.recognition.decoder_structure import TensorLocation
from workbench.observing.recognition.least_squares import EXACT
from workbench.observing.recognition.module_runs import Execution, TracedTensor

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "root of the softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""Scores [..., expert] of logits, by their name: the weights of the experts that a token takes are a multiple of theirs."""
ROUTING = ("router_logits", "router_scores", "expert_weights")
"""Activations of a router."""


@dataclass(frozen=True)
class Router(TensorLocation):
    """Logits of a router, the weights of the experts that a token takes, and how these follow from the logits.

    The module itself selects the experts, by score, after a bias on each, or within the best groups: the selection is read, not repeated.
    """

    weights: TensorPath
    indices: TensorPath | None
    """Of the experts; None where the weights are of all experts, 0 for those that are not taken."""
    scores: str  # name in `SCORES`; empty if the weights do not show which
    is_normed: bool  # whether the scores of a token's experts are divided by their sum

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the activations that it shows; without scores that are known, none of these."""
        return ROUTING if self.scores else tuple(site for site in ROUTING if site != "router_scores")

    def read(self, site: str, output: Any, positions: Positions) -> Tensor:
        """Return an activation [batch, pos, expert] in a module's output."""

        def shaped(path: TensorPath) -> Tensor:
            tensor: Tensor = get_at(output, path)
            tokens = positions.shaped(tensor if tensor.is_floating_point() else tensor.double(), self.axes)
            assert tokens is not None
            return tokens

        logits = shaped(self.path)
        if site == "router_logits":
            return logits
        if site == "router_scores":
            return SCORES[self.scores](logits.to(torch.promote_types(logits.dtype, torch.float32)))
        weights = shaped(self.weights)
        if self.indices is None:
            return weights
        return torch.zeros_like(logits, dtype=weights.dtype).scatter_add(-1, shaped(self.indices).long(), weights)

    @property
    def words(self) -> str:
        """How the weights follow from the logits."""
        scores = f"the {self.scores} of the logits" if self.scores else "unknown scores (one expert, divided by itself)"
        return f"{scores}, of a token's experts" + (" divided by their sum" if self.is_normed else "")


def find_router(inside: Sequence[Execution]) -> Router | str | None:
    """Find a module that returns logits of all experts, weights of the ones that a token takes, and which these are.

    The weights must be a multiple of scores of these logits. Without such a module, return why the last candidate is none, or None.
    """
    reason = None
    for entry in inside:
        for logits, weights, indices in _candidates(entry):
            if not float(logits.rows.double().std(-1).max()):
                continue
            fits = list(_fits(logits.rows, weights.rows, indices))
            if not fits:
                reason = f"the weights of {entry.name} are no multiple of a softmax or sigmoid of its logits"
                continue
            is_known = len({scores for scores, _ in fits}) == 1
            scores, is_normed = fits[0]
            return Router.of(
                entry, logits, inside, weights=weights.path, indices=None if indices is None else indices.path,
                scores=scores if is_known else "", is_normed=is_normed,
            )  # fmt: skip
    return reason


def _candidates(entry: Execution) -> Iterator[tuple[TracedTensor, TracedTensor, TracedTensor | None]]:
    """Yield (logits, weights, indices) among a module's outputs that have the shapes and the values of a router's."""
    for logits in entry.outputs:
        for weights in entry.outputs:
            experts, width = logits.rows.shape[1], weights.rows.shape[1]
            if weights is logits or logits.axes != weights.axes or not weights.rows.any():
                continue
            if 0 < width < experts:
                alike = (i for i in entry.indices if i.rows.shape == weights.rows.shape and i.axes == weights.axes)
                yield from (
                    (logits, weights, i) for i in alike if 0 <= int(i.rows.min()) <= int(i.rows.max()) < experts
                )
            elif width == experts and len(taken := weights.rows.count_nonzero(-1).unique()) == 1 and int(taken) < width:
                yield logits, weights, None


def _fits(logits: Tensor, weights: Tensor, indices: TracedTensor | None) -> Iterator[tuple[str, bool]]:
    """Yield the names of scores of which the weights are a multiple, and whether these are divided by their sum first."""
    tolerance = EXACT.get(weights.dtype, 1e-2)
    experts = weights.topk(int(weights[0].count_nonzero()), -1).indices if indices is None else indices.rows.long()
    weights = (weights.gather(-1, experts) if indices is None else weights).double()
    for is_normed in (True, False):
        for name, score in SCORES.items():
            made = score(logits.double()).gather(-1, experts)
            made = made / made.sum(-1, keepdim=True) if is_normed else made
            made = made * (weights != 0)  # an expert without weight is none: one of no MLP
            factor = (weights * made).sum() / made.square().sum()
            if float((weights - factor * made).abs().max()) <= tolerance * float(weights.abs().max()):
                yield name, is_normed
