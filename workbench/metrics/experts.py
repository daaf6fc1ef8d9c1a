"""Routing in mixtures of experts: entropy of the router, load of the experts, and experts of the first token."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float

from workbench.metrics.base import metric, wide


@metric(
    unit="share of ln E", range="0..1, 1 = all experts equally likely", reading="higher: less decided",
    source="entropy of the router's softmax; Fedus et al. 2022 for its balance",
)  # fmt: skip
def router_entropy(router_logits: Float[torch.Tensor, "batch pos expert"]) -> Float[torch.Tensor, " batch"]:
    """Mean entropy of the router's softmax over the E experts, divided by ln E.

    Caution: the selected experts alone enter the output. A model may be trained with a loss that keeps this entropy high.
    """
    log_p = wide(router_logits).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean(-1) / math.log(log_p.shape[-1])


@metric(
    unit="times the even share", range="0..E / k, 1 = even", reading="higher: the expert takes more tokens", min_length=2,
    source="load of Shazeer et al. 2017",
    variants={"later_tokens": {"tokens_used": "later"}, "first_token": {"tokens_used": "first"}},
)  # fmt: skip
def expert_load(
    expert_weights: Float[torch.Tensor, "batch pos expert"], *, tokens_used: str = "all"
) -> Float[torch.Tensor, "batch index"]:
    """Share of tokens that take each expert, relative to the even share k / E of E experts of which a token takes k.

    `first_token` is the load by the first token alone, which heads rest on, and `later_tokens` that by all others.
    Caution: with few tokens the load is uneven by chance; the standard error is over documents.
    """
    taken = wide(expert_weights).ne(0).to(torch.promote_types(expert_weights.dtype, torch.float32))
    taken = {"all": taken, "first": taken[:, :1], "later": taken[:, 1:]}[tokens_used]
    even = taken.sum(-1).mean() / taken.shape[-1]
    return taken.mean(1) / even


@metric(
    unit="share of experts", range="0..1", reading="lower: the first token has its own experts", min_length=3,
    source="overlap of selected experts; baseline: two later tokens, by chance k / E",
    variants={"later_tokens": {"between_later": True}},
)  # fmt: skip
def first_token_experts(
    expert_weights: Float[torch.Tensor, "batch pos expert"], *, between_later: bool = False
) -> Float[torch.Tensor, " batch"]:
    """Share of the first token's experts that a later token takes too: whether sinks follow the routing.

    Mean over later tokens of |experts(first) and experts(token)| / k. The baseline `later_tokens` is the same between two different
    later tokens. A value far below it says that the token on which heads rest is routed apart from the others.
    Caution: a start-of-sequence token is the same in every document, so its experts are too.
    """
    taken = wide(expert_weights).ne(0).to(torch.float64)
    first, later = taken[:, 0], taken[:, 1:]
    number, count = first.sum(-1), later.shape[1]
    if not between_later:
        return torch.einsum("be,bpe->bp", first, later).mean(1) / number
    sums = later.sum(1)
    return (sums.square().sum(-1) - later.sum((1, 2))) / (count * (count - 1)) / number
