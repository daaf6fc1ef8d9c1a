"""Metrics of value vectors: norms, the first token's drain, and the share that the token's identity explains."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.errors import BadData
from workbench.metrics.base import metric, wide
from workbench.metrics.found_sinks import sink_positions

COLUMNS = 64  # of vectors that are widened at a time


@metric(
    unit="norm", range=">= 0", reading="higher: larger value vector", source="Guo et al. 2024, arXiv 2406.12335",
    sites=("v", "own_v"),
)  # fmt: skip
def value_norm(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch pos"]:
    """Euclidean norm of the value at each position, all key-value heads together.

    Caution: the effective value `v` of a value-residual model contains the first layer's. Read `own_v` too.
    """
    return wide(vectors.flatten(2)).norm(dim=-1)


@metric(
    unit="ratio", range="> 0, 1 = none", reading="lower: the first token's value is drained", min_length=2,
    source="Guo et al. 2024, arXiv 2410.13835; Zhou et al. 2024", sites=("v", "own_v"), controls={"none": lambda T: 1.0},
)  # fmt: skip
def value_drain(
    vectors: Float[Tensor, "batch pos *width"],
    received: Float[Tensor, "batch head pos"] | None = None,
    row_max: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    positions: str = "first",
) -> Float[Tensor, " batch"]:
    """Norm of the first position's value over the median norm of the others: ||v_0|| / median over t > 0 of ||v_t||.

    With positions `found`: mean norm over the positions on which a head of the layer rests (`sink_positions`), over the median of
    the other positions. Documents without such a position do not count.
    """
    norms = wide(vectors.flatten(2)).norm(dim=-1)
    if positions == "first":
        return norms[:, 0] / norms[:, 1:].quantile(0.5, dim=-1)
    if received is None or row_max is None:
        raise BadData("positions='found' needs received attention and row maxima")
    at = sink_positions(received, row_max, window).any(1)
    others = norms.masked_fill(at, math.nan).nanquantile(0.5, dim=-1)
    ratio = torch.where(at, norms, 0).sum(-1) / at.sum(-1) / others
    return ratio.nan_to_num(nan=math.inf).where(at.any(-1), math.nan)  # NaN means: no such position


@metric(
    unit="cosine", range="-1..1", reading="higher: the head's output is nearer to the token's own value", min_length=3,
    source="Exclusive Self Attention, arXiv 2603.09078 (2026): attention-similarity bias",
    variants={"first_position": {"first": True}, "other_token": {"other": True}},
)  # fmt: skip
def value_bias(
    z: Float[Tensor, "batch pos head d_head"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    *,
    first: bool = False,
    other: bool = False,
) -> Float[Tensor, "batch head"]:
    """Cosine between a head's output and the value of the token itself, mean over the positions after the first.

    cos(z_i, v_i) with v_i of the head's key-value head. `first_position`: at position 0, which attends to itself alone, so 1
    unless something changes z. `other_token`, the baseline: v_j of the token half a document away. Caution: similar values
    raise it at every distance, and z includes gates and additions. Exclusive attention is 0 by construction.
    """
    own = v.repeat_interleave(z.shape[2] // v.shape[2], dim=2)
    own = own[:, 1:].roll((own.shape[1] - 1) // 2, 1) if other else own[:, :1] if first else own[:, 1:]
    return torch.cosine_similarity(wide(z[:, :1] if first else z[:, 1:]), wide(own), dim=-1).mean(1)


def returning(tokens: Tensor) -> Mapping[str, Tensor]:
    """Return the ids that occur at least twice, ascending, as no others count in an identity share."""
    ids, counts = tokens.unique(return_counts=True)
    return {"among": ids[counts > 1]}


@metric(
    unit="share", range="about 0..1", reading="higher: the vector depends less on context",
    sites=("own_v", "v", "q", "k", "z", "stream"), controls={"shuffled": {"shuffle": True}},
    source="one-way variance components; after Bank of Values, arXiv 2606.02780", ahead=returning,
)  # fmt: skip
class TokenIdentityShare:
    """Share of the variance of a vector that the identity of its token explains.

    With N tokens, K types seen at least twice, sums of squares SSB between and SSW within types (over all dimensions) and
    MSW = SSW / (N - K): (SSB - (K - 1) MSW) / (SSB + SSW + MSW), the bias-corrected form. Exactly 1 for first-layer values
    and for every SVFormer value. `shuffled`: ids moved to other positions of their document, which must give about 0.
    Caution: high at random init too, when context has little effect yet. Compare with step 0.

    Args:
        shuffle: Whether to move ids to other positions of their document.
        among: The ids that will occur twice, if known before; sums of other ids are not stored.
    """

    def __init__(self, *, shuffle: bool = False, among: Tensor | None = None) -> None:
        self.shuffle, self.among = shuffle, among
        self.ids = torch.zeros(0, dtype=torch.long)
        self.counts = torch.zeros(0, dtype=torch.double)
        self.sums = torch.zeros(0, 0, dtype=torch.double)
        self.squares = torch.zeros(0, dtype=torch.double)

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        if self.shuffle:
            order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(tokens.shape[1]))
            tokens = tokens[:, order.to(tokens.device)]
        flat, ids = vectors.flatten(2).flatten(0, 1), tokens.flatten()
        if self.among is not None:
            selected = torch.isin(ids, self.among.to(ids.device))
            flat, ids = flat[selected], ids[selected]
        types, inverse = ids.unique(return_inverse=True)
        # allocate stored tensors first: blocks freed between two of them would fragment the heap
        sums = torch.empty(len(types), flat.shape[1], dtype=torch.promote_types(flat.dtype, torch.float32))
        squares = torch.zeros(len(types), dtype=torch.double, device=flat.device)
        for part, into in zip(flat.split(COLUMNS, 1), sums.split(COLUMNS, 1), strict=True):
            part = part.double()
            into.copy_(part.new_zeros(len(types), part.shape[1]).index_add_(0, inverse, part))
            squares.index_add_(0, inverse, part.square().sum(-1))
        self._add(types.cpu(), inverse.bincount().double().cpu(), sums, squares.cpu())

    def _add(self, ids: Tensor, counts: Tensor, sums: Tensor, squares: Tensor) -> None:
        if not len(self.ids):
            self.ids, self.counts, self.sums, self.squares = ids, counts, sums, squares
            return
        types, inverse = torch.cat((self.ids, ids)).unique(return_inverse=True)
        old, new = inverse[: len(self.ids)], inverse[len(self.ids) :]
        for name, added in {"counts": counts, "sums": sums, "squares": squares}.items():
            own = getattr(self, name)
            total = own.new_zeros(len(types), *own.shape[1:]).index_add_(0, old, own).index_add_(0, new, added)
            setattr(self, name, total)
        self.ids = types

    def merge(self, other: TokenIdentityShare) -> None:
        if len(other.ids):
            self._add(other.ids, other.counts, other.sums, other.squares)

    def result(self) -> float:
        """Return the share; NaN if fewer than two types occur twice or nothing varies."""
        twice = self.counts >= 2
        counts, sums, squares = self.counts[twice], self.sums[twice].double(), self.squares[twice]
        n, k = float(counts.sum()), int(twice.sum())
        if k < 2:
            return float("nan")
        between = float((sums.square().sum(-1) / counts).sum() - sums.sum(0).square().sum() / n)
        within = max(float(squares.sum() - (sums.square().sum(-1) / counts).sum()), 0.0)
        noise = within / (n - k)
        total = between + within + noise
        return (between - (k - 1) * noise) / total if total > 0 else float("nan")
