"""How much of the input token a vector still carries, as far as a linear probe can read it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from workbench.metrics.base import metric, wide

LN2 = math.log(2)
SHARPNESS = [i / 10 for i in range(16)]


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: more of the token's identity is linearly readable", folds=1,
    source="V-information, Xu et al. 2020; controls after Hewitt and Liang 2019", sites=("stream", "z", "own_v", "v"),
    variants={"accuracy": {}, "fraction": {}}, units={"accuracy": "share", "fraction": "share"},
    controls={"shifted": {"shifted": True}}, min_length=2,
)  # fmt: skip
class TokenProbe:
    """Bits of the input token's identity that a linear softmax probe recovers beyond token frequency.

    (CE_unigram - CE_probe) / ln 2 on held-out documents, two of eight; a document is never on two sides. Five of eight fit
    the probe by L-BFGS, with a small ridge, on vectors whitened there; one of eight sets its temperature, down to the bare
    unigram, so that noise gives about 0 rather than the price of overfitting. The probe tells apart the tokens seen in
    fitting; all others keep their unigram probability (add-one), so they add nothing. `fraction`: of the unigram bits.
    `shifted`: the target is the token up to 16 positions before in the same document, what document-level leakage alone
    would give. Caution: layer 1's own values and all SVFormer values are exact lookups and must reach the ceiling by
    construction; that is no finding.
    """

    shift, ridge, iterations, tolerance = 16, 1e-4, 60, 3e-4

    def __init__(self, *, shifted: bool = False) -> None:
        self.shifted = shifted
        self.documents: list[tuple[Tensor, Tensor]] = []

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        """Keep a batch of documents."""
        shift = min(self.shift, tokens.shape[1] // 2) if self.shifted else 0
        targets = tokens.roll(shift, dims=1).cpu()
        self.documents += zip(wide(vectors.flatten(2)).float().cpu(), targets, strict=True)

    def merge(self, other: TokenProbe) -> None:
        """Add what another accumulator has kept."""
        self.documents += other.documents

    def result(self) -> Mapping[str, float]:
        """{"": bits, "accuracy", "fraction"} on the held-out documents; NaN with fewer than seven documents."""
        if len(self.documents) < 7 or not all(x.isfinite().all() for x, _ in self.documents):
            return dict.fromkeys(("", "accuracy", "fraction"), math.nan)
        fit, tune, held = (
            [torch.cat(part) for part in zip(*(d for i, d in enumerate(self.documents) if i % 8 in side), strict=True)]
            for side in ((0, 1, 2, 4, 5), (6,), (3, 7))
        )
        counts = torch.cat((fit[1], tune[1])).bincount(minlength=int(held[1].max()) + 1)
        prior = ((counts + 1) / (counts + 1).sum()).log()
        seen = fit[1].unique()
        tuned, tested = (probe - prior[seen] for probe in self._fit(fit[1], *_whitened(fit[0], tune[0], held[0])))
        sharpness = min(SHARPNESS, key=lambda a: float(F.nll_loss(_log_p(prior, seen, a * tuned), tune[1])))
        log_p = _log_p(prior, seen, sharpness * tested)
        unigram = float(-prior[held[1]].mean())
        bits = (unigram - float(F.nll_loss(log_p, held[1]))) / LN2
        accuracy = float((log_p.argmax(-1) == held[1]).float().mean())
        return {"": bits, "accuracy": accuracy, "fraction": bits * LN2 / unigram}

    @torch.no_grad()
    def _fit(self, y: Tensor, x: Tensor, tune: Tensor, held: Tensor) -> list[Tensor]:
        """Scores [pos, tokens seen in `y`, ascending] for `tune` and `held`: softmax regression, the bias not decayed."""
        seen, target, counts = y.unique(return_inverse=True, return_counts=True)
        weight = x.new_zeros(len(seen), x.shape[1])
        weight[:, -1] = (counts / len(y)).log()
        decay, rows = x.new_full((x.shape[1],), 2 * self.ridge), torch.arange(len(y))
        decay[-1] = 0
        optimiser = torch.optim.LBFGS(
            [weight], max_iter=self.iterations, tolerance_change=self.tolerance, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:  # gradient by hand and in place: half the time of autograd
            log_p = (x @ weight.T).log_softmax(-1)
            loss = -log_p[rows, target].mean() + (weight.square() * decay).sum() / 2
            error = log_p.exp_()
            error[rows, target] -= 1
            weight.grad = error.T @ x / len(y) + weight * decay
            return loss

        optimiser.step(closure)
        return [tune @ weight.T, held @ weight.T]


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: the vector has mixed in its neighbour", folds=1,
    source="V-information, Xu et al. 2020, of the token before", sites=("stream", "z"),
    variants={"accuracy": {}, "fraction": {}}, units={"accuracy": "share", "fraction": "share"},
    controls={"shifted": {"shifted": True}}, min_length=4,
)  # fmt: skip
class PreviousTokenProbe(TokenProbe):
    """Bits of the previous token's identity that a linear softmax probe recovers: mixing, where `token_probe` is retention.

    As `token_probe`, with the target one position before; position 0, which has none, is left out. Caution: neighbours are
    alike in text, so the identity of a token tells of the one before it; layer 0's stream, which has mixed nothing in, is
    the baseline.
    """

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        """Keep a batch of documents."""
        super().update(vectors[:, 1:], tokens[:, :-1])


def _log_p(prior: Tensor, seen: Tensor, evidence: Tensor) -> Tensor:
    """Log-probabilities [pos, d_vocab]: `evidence` [pos, seen] shifts the seen tokens' share among themselves."""
    log_p = prior.repeat(len(evidence), 1)
    log_p[:, seen] = (prior[seen] + evidence).log_softmax(-1) + prior[seen].logsumexp(0)
    return log_p


def _whitened(x: Tensor, *others: Tensor) -> list[Tensor]:
    """All with the mean and covariance of `x` made 0 and 1, and a last column of ones: without it the fit crawls."""
    mean = x.mean(0)
    centred = (x - mean).double()
    values, directions = torch.linalg.eigh(centred.T @ centred / len(x))
    floor = max(1e-6 * float(values[-1]), torch.finfo(torch.float).tiny)  # directions that do not vary stay small
    turn = (directions * values.clamp_min(floor).rsqrt()).float()
    return [F.pad((part - mean) @ turn, (0, 1), value=1.0) for part in (x, *others)]
