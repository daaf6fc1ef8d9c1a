"""How much of the input token a vector still carries, as far as a linear probe can read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from workbench.metrics.base import metric

LN2 = math.log(2.0)


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: more of the token's identity is linearly readable", folds=1,
    source="V-information, Xu et al. 2020; controls after Hewitt and Liang 2019", sites=("stream", "z", "own_v", "v"),
    variants={"accuracy": {}, "fraction": {}}, units={"accuracy": "share", "fraction": "share"},
    controls={"shifted": {"shifted": True}},
)  # fmt: skip
class TokenProbe:
    """Bits of the input token's identity that a linear softmax probe recovers beyond token frequency.

    (CE_unigram - CE_probe) / ln 2 on held-out documents (every fourth; a document is never on both sides), the probe
    fitted to convergence by L-BFGS with a small ridge. `fraction`: of the unigram bits. `shifted`: the target is the token
    16 positions away in the same document, what document-level leakage alone would give. Caution: layer 1's own values and
    all SVFormer values are exact lookups and must reach the ceiling by construction; that is no finding.
    """

    shift = 16
    ridge = 1e-4
    iterations = 60

    def __init__(self, *, shifted: bool = False) -> None:
        self.shifted = shifted
        self.documents: list[tuple[Tensor, Tensor]] = []

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        """Keep a batch of documents."""
        flat = vectors.flatten(2).float().cpu()
        for rows, ids in zip(flat, tokens.cpu(), strict=True):
            targets = ids.roll(self.shift) if self.shifted else ids
            self.documents.append((rows, targets))

    def merge(self, other: Self) -> None:
        """Add what another accumulator has kept."""
        self.documents += other.documents

    def result(self) -> Mapping[str, float]:
        """{"": bits, "accuracy", "fraction"} on the held-out documents; NaN with fewer than four documents."""
        held, train = self.documents[3::4], [d for i, d in enumerate(self.documents) if i % 4 != 3]
        if not held:
            return dict.fromkeys(("", "accuracy", "fraction"), float("nan"))
        x, y = (torch.cat(part) for part in zip(*train, strict=True))
        x_test, y_test = (torch.cat(part) for part in zip(*held, strict=True))
        classes = int(max(y.max(), y_test.max())) + 1
        frequency = (y.bincount(minlength=classes).double() + 1.0) / (len(y) + classes)
        unigram = float(-frequency.log()[y_test].mean())
        mean, spread = x.mean(0), x.std(0).clamp_min(1e-6)
        logits = self._fit((x - mean) / spread, y, frequency.log().float())((x_test - mean) / spread)
        bits = (unigram - float(F.cross_entropy(logits, y_test))) / LN2
        return {
            "": bits,
            "accuracy": float((logits.argmax(-1) == y_test).float().mean()),
            "fraction": bits * LN2 / unigram,
        }

    def _fit(self, x: Tensor, y: Tensor, prior: Tensor) -> torch.nn.Linear:
        probe = torch.nn.Linear(x.shape[1], len(prior))
        with torch.no_grad():
            probe.weight.zero_()
            probe.bias.copy_(prior)
        optimiser = torch.optim.LBFGS(
            probe.parameters(), max_iter=self.iterations, history_size=10, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = F.cross_entropy(probe(x), y) + self.ridge * probe.weight.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        return probe.requires_grad_(False)
