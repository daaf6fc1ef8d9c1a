"""Metrics of the residual stream: norms, the first token's peak, and similarity of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from workbench.kernels.cross_entropy import sequence_losses
from workbench.metrics.base import metric, wide

DIMENSIONS = 10


@metric(
    unit="norm", range=">= 0", reading="higher: larger hidden state", source="Sun et al. 2024, arXiv 2402.17762",
    sites=("stream",),
)  # fmt: skip
def hidden_norm(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch pos"]:
    """Euclidean norm of the residual stream at each position."""
    return wide(vectors.flatten(2)).norm(dim=-1)


@metric(
    unit="ratio", range="> 0, 1 = none", reading="higher: the first token's state towers over the others", min_length=2,
    source="Zhou et al. 2024; Guo et al. 2024", sites=("stream",), controls={"none": lambda T: 1.0},
)  # fmt: skip
def hidden_peak(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, " batch"]:
    """Norm of the first position's state over the mean norm of the others.

    ||h_0|| / mean over t > 0 of ||h_t||. Caution: above 1 already at random init if values are shared, since position 0
    attends to itself alone and is never averaged. Compare with step 0.
    """
    norms = wide(vectors.flatten(2)).norm(dim=-1)
    return norms[:, 0] / norms[:, 1:].mean(-1)


def repetition_floor(tokens: Tensor) -> Tensor:
    """Return the share of position pairs with equal ids [batch], the similarity from repeated tokens alone."""
    T = tokens.shape[1]
    same = torch.stack([row.unique(return_counts=True)[1].double().square().sum() for row in tokens])
    return (same - T) / (T * (T - 1))


@metric(
    unit="cosine", range="-1/(T-1)..1", reading="higher: tokens more alike (over-smoothing)", min_length=3,
    source="Zhou et al. 2024; Shi et al. 2022, arXiv 2202.08625", sites=("stream", "v", "own_v", "z", "rot_k"),
    variants={"excl0": {"skip": 1}}, controls={"token_repetition": repetition_floor}, version=2,
)  # fmt: skip
def token_similarity(vectors: Float[Tensor, "batch pos *width"], *, skip: int = 0) -> Float[Tensor, " batch"]:
    """Mean cosine between the vectors of all pairs of positions.

    (||sum_t u_t||^2 - T) / (T (T - 1)) with unit vectors u_t: the closed form of the mean off-diagonal cosine, in O(T d).
    All heads of a position together. `excl0` leaves position 0 out. The published similarity of keys is at `rot_k`, after the
    rotation. Caution: repeated tokens and single large channels raise it, and it differs between architectures at random
    init. Compare trained minus step 0.
    """
    x = vectors.flatten(2)[:, skip:]
    T, total = x.shape[1], torch.zeros((), dtype=torch.double, device=x.device)
    for part in x.split(256, dim=1):  # float32 would lose 1e-5 where one channel is massive; parts stay in the cache
        part = part.double()
        norms = torch.linalg.vector_norm(part, dim=-1).clamp_min(1e-300)  # a zero vector is like nothing
        total = total + torch.einsum("bt,btd->bd", norms.reciprocal(), part)
    return (total.square().sum(-1) - T) / (T * (T - 1))


@metric(
    unit="ratio", range="0..1", reading="lower: collapsed to one vector", min_length=3, sites=("stream", "v", "own_v", "z"),
    source="Wang et al. 2022, arXiv 2203.05962 (Frobenius form of Dong et al. 2021)", variants={"excl0": {"skip": 1}},
    controls={"orthogonal": lambda T: (1.0 - 1.0 / T) ** 0.5},
)  # fmt: skip
def collapse_residual(vectors: Float[Tensor, "batch pos *width"], *, skip: int = 0) -> Float[Tensor, " batch"]:
    """Norm of a sequence's vectors minus their mean, over the norm with it: r = ||X - 1 xbar^T||_F / ||X||_F.

    0 if all positions hold one vector; sqrt(1 - 1/T) for orthogonal vectors of one length. For unit vectors it is the
    token similarity s in another form: s = (T (1 - r^2) - 1) / (T - 1). Caution: one large position can dominate the ratio.
    """
    x = wide(vectors.flatten(2)[:, skip:])
    mean = x.mean(1, keepdim=True)
    return (x - mean).flatten(1).norm(dim=-1) / x.flatten(1).norm(dim=-1)


@metric(
    unit="ratio", range=">= 1", reading="higher: a few entries tower over the rest", sites=("stream",),
    source="Sun et al. 2024, arXiv 2402.17762 (an entry is massive above 100 and above 1000 times the median)",
    variants={"count": {"count": True}}, units={"count": "entries"},
)  # fmt: skip
def massive_activations(vectors: Float[Tensor, "batch pos *width"], *, count: bool = False) -> Float[Tensor, " batch"]:
    """Largest entry of the residual stream over the median entry, in absolute value.

    `count`: entries above 100 and at least 1000 times the median of their sequence, the published criterion. The median of an even
    number of entries is the lower of the middle two, as PyTorch's. Caution: small models rarely pass 100; the ratio has no threshold.
    """
    size = wide(vectors).abs().flatten(1)
    median = size.median(-1).values
    if count:
        return ((size > 100) & (size >= 1000 * median[:, None])).sum(-1).to(size.dtype)
    return size.amax(-1) / median


@metric(
    unit="ratio", range=">= 1 at the largest, falling", reading="higher: one dimension towers over the rest", sites=("stream",),
    source="Sun et al. 2024, arXiv 2402.17762 (massive activations are in few, fixed dimensions, mostly at the first token)",
    variants={"dimension": {}, "first_position": {}}, units={"dimension": "dimension", "first_position": "share of documents"},
)  # fmt: skip
class MassiveDimensions:
    """Largest entries of the ten leading dimensions of the stream over the document's median entry, largest first.

    The largest |x| of a dimension over positions, divided by the median |x| of the document; mean over documents.
    `dimension`: index of the dimension. `first_position`: share of documents with its largest entry at position 0.
    Caution: the ratio has no threshold (`massive_activations` counts by the published one). If no dimension is much larger
    than the rest, the order is chance. Compare the ratios with step 0, and the dimensions over seeds and layers.
    """

    errors: Mapping[str, float] = MappingProxyType({"dimension": math.nan, "first_position": math.nan})

    def __init__(self) -> None:
        self.n = 0
        self.sums = torch.zeros((), dtype=torch.double)  # of ratios and of largest entries at position 0, by dimension

    def update(self, vectors: Float[Tensor, "batch pos *width"]) -> None:
        size = wide(vectors.flatten(2)).abs().double()
        largest, place = size.max(1)
        ratio = largest / size.flatten(1).median(-1, keepdim=True).values
        self.n += len(size)
        self.sums = self.sums + torch.stack((ratio.sum(0), (place == 0).double().sum(0))).cpu()

    def merge(self, other: MassiveDimensions) -> None:
        self.n, self.sums = self.n + other.n, self.sums + other.sums

    def result(self) -> Mapping[str, list[float]]:
        """Return {"": ratios, and the variants}, one number per dimension; NaN without a document."""
        if not self.n:
            return {key: [math.nan] for key in ("", "dimension", "first_position")}
        ratio, first = self.sums / self.n
        order = ratio.argsort(descending=True, stable=True)[:DIMENSIONS]
        first = first[order].tolist()
        return {"": ratio[order].tolist(), "dimension": order.double().tolist(), "first_position": first}


@metric(
    unit="nats", range=">= 0", reading="higher: worse prediction", source="mean next-token cross-entropy", min_length=2,
)  # fmt: skip
def loss(
    logits: Float[Tensor, "batch pos vocab"],
    tokens: Int[Tensor, "batch pos"],
    counted: Bool[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, " batch"]:
    """Mean next-token cross-entropy of a sequence.

    `counted`: the tokens with a label, as labels of -100 do not count. Perplexity is exp of the mean over all sequences.
    Caution: compare losses on the same tokens only.
    """
    losses = sequence_losses(logits, tokens)
    if counted is None:
        return losses.mean(-1)
    return losses.where(counted[:, 1:], 0).sum(-1) / counted[:, 1:].sum(-1)
