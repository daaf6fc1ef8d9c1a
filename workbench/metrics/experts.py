"""Routing in mixtures of experts: entropy of the router, load of the experts, and experts of the first token."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float

from workbench.errors import BadData
from workbench.metrics.base import metric, wide
from workbench.metrics.found_sinks import sink_positions


@metric(
    unit="share of ln E", range="0..1, 1 = all experts equally likely", reading="higher: less decided",
    source="entropy of the router's scores; Fedus et al. 2022 for their balance, DeepSeek-AI 2024 (eq. 18) for sigmoids", version=2,
)  # fmt: skip
def router_entropy(router_scores: Float[torch.Tensor, "batch pos expert"]) -> Float[torch.Tensor, " batch"]:
    """Mean entropy of the router's scores over the E experts, divided by their sum; in units of ln E.

    The scores of a softmax router are its softmax. The scores of a sigmoid router (DeepSeek-V3) have no fixed sum, so p_e is s_e / sum s.
    Scores are those before the selection: a bias on the selection or a limit on groups of experts does not change them.
    Caution: the selected experts alone enter the output. A model may be trained with a loss that keeps this entropy high.
    """
    scores = wide(router_scores)
    return torch.special.entr(scores / scores.sum(-1, keepdim=True)).sum(-1).mean(-1) / math.log(scores.shape[-1])


@metric(
    unit="times the even share", range="0..E / k, 1 = even", reading="higher: the expert takes more tokens", min_length=2,
    source="load of Shazeer et al. 2017",
    variants={"later_tokens": {"tokens_used": "later"}, "first_token": {"tokens_used": "first"}}, version=2,
)  # fmt: skip
def expert_load(
    expert_weights: Float[torch.Tensor, "batch pos expert"], *, tokens_used: str = "all"
) -> Float[torch.Tensor, "batch index"]:
    """Share of tokens that take each expert, relative to the even share k / E of E experts of which a token takes k.

    `first_token` is the load by the first token alone and `later_tokens` that by all others. The load counts the experts that the model
    takes, however it selects them.
    Caution: with few tokens the load is uneven by chance; the standard error is over documents.
    """
    taken = wide(expert_weights).ne(0).to(torch.promote_types(expert_weights.dtype, torch.float32))
    taken = {"all": taken, "first": taken[:, :1], "later": taken[:, 1:]}[tokens_used]
    even = taken.sum(-1).mean(1, keepdim=True) / taken.shape[-1]  # of each document: tokens may be dropped
    return torch.where(even > 0, taken.mean(1) / even, 0.0)


@metric(
    unit="share of experts", range="0..1", reading="lower: the first token has its own experts", min_length=3,
    source="overlap of selected experts; baseline: two later tokens, by chance k / E",
    variants={"later_tokens": {"between_later": True}}, version=2,
)  # fmt: skip
def first_token_experts(
    expert_weights: Float[torch.Tensor, "batch pos expert"],
    received: Float[torch.Tensor, "batch head pos"] | None = None,
    row_max: Float[torch.Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    positions: str = "first",
    between_later: bool = False,
) -> Float[torch.Tensor, " batch"]:
    """Share of a sink's experts that another token takes too: whether sinks follow the routing.

    Mean over later tokens of |experts(first) and experts(token)| / k. The baseline `later_tokens` is the same between two different
    later tokens. A value far below it says that the token on which heads rest is routed apart from the others.
    With positions `found`: mean over pairs of a position on which a head of the layer rests (`sink_positions`) and one on which none
    does. Its baseline, `later_tokens_found`, is the mean over pairs of two different positions on which no head rests. It is the expected
    value for equally many random positions of the same document. Documents without a sink, or with fewer than two other positions, do
    not count in either.
    Caution: a start-of-sequence token is the same in every document, so its experts are too.
    """
    taken = wide(expert_weights).ne(0).to(torch.float64)
    at = torch.zeros(taken.shape[:2], dtype=torch.bool, device=taken.device)
    at[:, 0] = True
    if positions != "first":
        if received is None or row_max is None:
            raise BadData("positions='found' needs received attention and row maxima")
        at = sink_positions(received, row_max, window).any(1)
    sinks, others = (torch.einsum("bpe,bp->be", taken, x.to(taken)) for x in (at, ~at))  # tokens that take each expert
    number, count = taken.sum(-1).mean(-1), (~at).sum(-1)
    both = others * (others - 1) if between_later else sinks * others
    pairs = count * (count - 1 if between_later else at.sum(-1))
    return (both.sum(-1) / pairs / number).where(at.any(-1) & (count > 1), math.nan)
