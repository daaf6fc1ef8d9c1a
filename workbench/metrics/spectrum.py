"""Spectra of vectors: number of directions in use, from second moments streamed in float64, one D x D matrix per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.metrics.base import metric, wide

MAX_EIGENVALUES = 32
VARIANCE = 0.99  # share that `pcs_99` counts components for


class _Moments:
    """Count, sum and second moment of vectors."""

    def __init__(self) -> None:
        self.n = 0
        self.sum = torch.zeros((), dtype=torch.double)
        self.second = torch.zeros((), dtype=torch.double)

    def update(self, vectors: Float[Tensor, "batch pos *width"]) -> None:
        x = wide(vectors.flatten(2).flatten(0, 1)).double()
        self.n += len(x)
        self.sum, self.second = self.sum + x.sum(0).cpu(), self.second + (x.T @ x).cpu()

    def merge(self, other: _Moments) -> None:
        self.n, self.sum, self.second = self.n + other.n, self.sum + other.sum, self.second + other.second

    def eigenvalues(self, *, centred: bool = False) -> Tensor:
        """Return the descending eigenvalues of the second moment (1/N) sum v v^T, or of the covariance.

        NaN if a vector was not finite.
        """
        moment = self.second / self.n
        if centred:
            mean = self.sum / self.n
            moment = moment - torch.outer(mean, mean)
        if not moment.isfinite().all():
            return torch.full_like(moment[0], math.nan)
        return torch.linalg.eigvalsh(moment).flip(0).clamp_min(0)


@metric(
    unit="directions", range="1..D", reading="higher: more directions in use", sites=("v", "own_v", "stream", "z"), min_length=2,
    source="Zhou et al. 2024 (spectra of values); effective rank: Roy and Vetterli 2007; participation: Gao et al. 2017",
    variants={"participation": {}, "pcs_99": {}, "top_share": {}, "trace": {}},
    units={"top_share": "share", "trace": "norm squared"}, version=2,
)  # fmt: skip
class EffectiveRank(_Moments):
    """Number of directions in use, from the eigenvalues mu of the uncentred second moment (1/N) sum v v^T.

    exp(-sum q ln q) with q = mu / sum mu (the eigenvalue form). `participation`: (sum mu)^2 / sum mu^2. `top_share`:
    mu_1 / sum mu. `trace`: sum mu = mean ||v||^2, the scale that cancels in the others. `pcs_99`: principal components for
    99 % of the centred variance, without an error, as the jackknife over eight groups covers a count in 32 % of cases only.
    Caution: limited by the number of vectors. Compare models on the same tokens, and with step 0.
    """

    errors: Mapping[str, float] = MappingProxyType({"pcs_99": math.nan})

    def result(self) -> Mapping[str, float]:
        """Return {"": effective rank, and the variants}; NaN without vectors or if all are zero."""
        names = ("", "participation", "pcs_99", "top_share", "trace")
        if not self.n or not (mu := self.eigenvalues()).isfinite().all() or float(mu.sum()) == 0:
            return dict.fromkeys(names, math.nan)
        q = mu / mu.sum()
        spread = self.eigenvalues(centred=True)
        total = float(spread.sum())
        pcs = int((spread.cumsum(0) < VARIANCE * total * (1 - 1e-12)).sum()) + 1 if total > 0 else 0
        values = (torch.special.entr(q).sum().exp(), 1 / q.square().sum(), pcs, q[0], mu.sum())
        return dict(zip(names, map(float, values), strict=True))


@metric(
    unit="share of the trace", range="0..1, falling", reading="flat: many directions; steep: few", sites=("v", "own_v"),
    source="Zhou et al. 2024 (spectra of values), normalised by the trace", min_length=2, variants={"per_sequence": {}}, version=2,
)  # fmt: skip
class Spectrum(_Moments):
    """Eigenvalues of the values' uncentred second moment over their sum, largest first.

    Pooled: one matrix (1/N) sum v v^T of all N vectors. `per_sequence`: as in the published code, the eigenvalues of one matrix
    (1/T) sum v v^T per sequence, averaged rank by rank. Its largest share is higher, as a sequence has at most T directions, and
    leading directions that differ between sequences are averaged by rank. The published spectra are not normalised and contain
    the values' scale. Caution: the largest 32 only. Normalisation removes the scale, so read the `trace` of `effective_rank` too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranked = torch.zeros(MAX_EIGENVALUES, dtype=torch.double)  # sums over sequences, by rank

    def update(self, vectors: Float[Tensor, "batch pos *width"]) -> None:
        super().update(vectors)
        for x in wide(vectors.flatten(2)).double():
            moment = x @ x.T if x.shape[0] < x.shape[1] else x.T @ x  # the same eigenvalues but for zeros
            if not moment.isfinite().all():
                self.ranked += math.nan
                continue
            mu = torch.linalg.eigvalsh(moment).flip(0).clamp_min(0)[:MAX_EIGENVALUES].cpu()
            self.ranked[: len(mu)] += mu

    def merge(self, other: _Moments) -> None:
        assert isinstance(other, Spectrum)
        super().merge(other)
        self.ranked = self.ranked + other.ranked

    def result(self) -> Mapping[str, list[float]]:
        """Return {"": one share per eigenvalue, "per_sequence": the same}; NaN without vectors."""
        mu = self.eigenvalues() if self.n else torch.tensor([math.nan])
        pooled = (mu / mu.sum())[:MAX_EIGENVALUES]
        by_rank = self.ranked[: len(pooled)] / (mu.sum() * max(self.n, 1))  # the traces add up to the pooled one
        return {"": pooled.tolist(), "per_sequence": by_rank.tolist()}


@metric(
    unit="directions", range="1..min(T, D)", reading="higher: the head's vectors use more directions",
    source="effective rank: Roy and Vetterli 2007 (eigenvalue form), head by head", sites=("v", "own_v"), min_length=2,
    variants={"top_share": {"top": True}}, units={"top_share": "share"},
)  # fmt: skip
def head_rank(
    vectors: Float[Tensor, "batch pos kv_head d_head"], *, top: bool = False
) -> Float[Tensor, "batch kv_head"]:
    """Number of directions in the values of a key-value head within a document: exp(-sum q ln q), q = mu / sum mu.

    mu are the eigenvalues of the head's uncentred second moment sum v v^T. `top_share`: the largest q. NaN if a vector is not
    finite or all are zero. Caution: limited by T and by d_head, so compare models on equal documents and with step 0. For all
    heads together see `effective_rank`.
    """
    x = wide(vectors).transpose(1, 2)
    moment = x.mT @ x
    finite = moment.isfinite().all((-2, -1))
    mu = torch.linalg.eigvalsh(moment.where(finite[..., None, None], 0)).clamp_min(0).double()
    q = mu / mu.sum(-1, keepdim=True)
    return q[..., -1] if top else torch.special.entr(q).sum(-1).exp()
