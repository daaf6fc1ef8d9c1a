"""Metrics of attention patterns: received attention, entropy, sinks and induction.

They read streamed statistics, never a T x T pattern. The control is the value under uniform causal attention, within the `window` of
latest keys where a layer has one. With a mask of another kind the window is 0: uniform attention over unknown keys is NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.errors import BadData
from workbench.metrics.base import metric, wide
from workbench.metrics.found_sinks import found_mass, keys_in_sight, over_queries, sink_positions
from workbench.statistics.sink_thresholds import SINK_MASS


def uniform_importance(T: int, window: int | None = None) -> Tensor:
    """Return the token importance under uniform causal attention, (1/T) sum over the queries i that see j of 1 / keys(i), float64 [T]."""
    return over_queries(1.0 / keys_in_sight(T, window), window) / T


def columns_in_sight(rows: Tensor, window: int | None, null: Tensor | None) -> Tensor:
    """Return the keys in sight of each query of rows [..., pos], and one more where attention may go to no token: `rows`' dtype [pos]."""
    return (keys_in_sight(rows.shape[-1], window) + (null is not None)).to(rows)


def _of_first(T: int, window: int | None, power: int) -> float:
    """Return the sum over queries of uniform causal attention to position 0 to a power; queries past the window do not see it."""
    return float((1.0 / keys_in_sight(T, window)[: window or T] ** power).sum())


def entropy(p: Tensor) -> Tensor:
    """Return -sum p ln p over the last axis in nats, with 0 ln 0 = 0."""
    return torch.special.entr(p).sum(-1)


def uniform_entropy(T: int, window: int | None = None) -> float:
    """Return the importance entropy of uniform causal attention in nats."""
    return float(entropy(uniform_importance(T, window)))


@metric(
    unit="share", range="0..1, sums to 1", reading="higher: the position receives more attention",
    source="Zhou et al. 2024 (code: column sums)", controls={"uniform_causal": uniform_importance},
)  # fmt: skip
def token_importance(received: Float[Tensor, "batch head pos"]) -> Float[Tensor, "batch pos"]:
    """Share of all attention that each position receives, heads averaged.

    p_j = (1/T) sum_i Abar_ij with Abar the mean over heads. The formula printed in Zhou et al. sums rows, which gives a
    constant. Their code sums columns, as here. The sum is below 1 if a column of the softmax is no key (`null_mass`).
    Caution: early positions receive more under any causal attention. Compare with the control.
    """
    return received.mean(1) / received.shape[-1]


@metric(
    unit="nats", range="0..ln T", reading="lower: more concentrated (deficit: higher)", source="Zhou et al. 2024",
    variants={"deficit": {"deficit": True}, "per_head": {"per_head": True}}, controls={"uniform_causal": uniform_entropy},
)  # fmt: skip
def importance_entropy(
    received: Float[Tensor, "batch head pos"],
    null: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    deficit: bool = False,
    per_head: bool = False,
) -> Float[Tensor, " batch *heads"]:
    """Entropy of token importance: low if attention is concentrated on few tokens.

    e = -sum_j p_j ln p_j; deficit = e_uniform(T) - e, 0 for uniform causal attention. `per_head` takes the entropy of
    every head's column sums. Attention to no token (`null_mass`) counts as one more term of the sum.
    Caution: grows with T, and averaging heads first hides their differences. Under uniform causal attention, early positions
    receive more. It is therefore not the maximum: queries that attend to themselves alone give ln T. A model may lie above it.
    """
    T = received.shape[-1]
    sums = received if null is None else torch.cat((received, null.sum(-1, keepdim=True)), -1)
    value = entropy((sums if per_head else sums.mean(1)).double() / T)
    return uniform_entropy(T, window) - value if deficit else value


@metric(
    unit="nats", range=">= 0, 0 = uniform causal attention", reading="higher: more concentrated", min_length=2,
    source="chain rule of the Kullback-Leibler divergence, on the token importance of Zhou et al. 2024",
)  # fmt: skip
class ConcentrationParts:
    """Concentration of attention as a sum of three parts: first position, profile over positions, particular tokens.

    With the importance p_s of sequence s (heads averaged), its mean m over sequences and u under uniform causal attention:
    mean_s KL(p_s || u) = first_position + profile + content.
    `first_position`: KL(m_0 || u_0), the first position against all others, which holds a sink.
    `profile`: (1 - m_0) KL(m_>0 || u_>0), renormalised without the first position, which holds local attention.
    `content`: mean_s KL(p_s || m), which holds attention to particular tokens.
    The entropy deficit mixes the parts, and they can cancel there.
    Caution: with few sequences the content part is too small, by a factor of about 1 - 1 / n.
    """

    def __init__(self) -> None:
        self.n, self.negentropy = 0, 0.0  # sum over sequences of sum p ln p
        self.sum = torch.zeros((), dtype=torch.double)
        self.window: int | None = None

    def update(
        self,
        received: Float[Tensor, "batch head pos"],
        null: Float[Tensor, "batch head pos"] | None = None,
        window: int | None = None,
    ) -> None:
        self.window = window
        p = (received.double().mean(1) / received.shape[-1]).cpu()
        p = p if null is None else p / p.sum(-1, keepdim=True)
        self._add(len(p), -float(entropy(p).sum()), p.sum(0))

    def merge(self, other: ConcentrationParts) -> None:
        if other.n:
            self._add(other.n, other.negentropy, other.sum)
            self.window = other.window

    def _add(self, n: int, negentropy: float, total: Tensor) -> None:
        if self.n and len(self.sum) != len(total):
            raise BadData(
                f"concentration_parts compares positions between documents of one length, not of {len(self.sum)} and {len(total)} tokens"
            )
        self.n, self.negentropy = self.n + n, self.negentropy + negentropy
        self.sum = self.sum + total

    def result(self) -> dict[str, float]:
        if not self.n:
            return dict.fromkeys(("", "first_position", "profile", "content"), float("nan"))
        mean, u = self.sum / self.n, uniform_importance(len(self.sum), self.window)
        content = self.negentropy / self.n + float(entropy(mean))
        pair = torch.stack((mean[0], mean[1:].sum())), torch.stack((u[0], u[1:].sum()))
        later = float(pair[0][1]) * _divergence(mean[1:] / pair[0][1], u[1:] / pair[1][1])
        total = self.negentropy / self.n - float(torch.xlogy(mean, u).sum())
        return {"": total, "first_position": _divergence(*pair), "profile": later, "content": content}


def _divergence(p: Tensor, q: Tensor) -> float:
    return float((torch.xlogy(p, p) - torch.xlogy(p, q)).sum())


@metric(
    unit="nats", range="0..ln i at query i", reading="lower: the head is more focused", min_length=2, version=2,
    source="Shannon entropy of attention rows", variants={"normalised": {"normalised": True}},
    controls={"uniform_causal": lambda T, window=None: float(keys_in_sight(T, window).log().mean())},
    units={"normalised": "share"},
)  # fmt: skip
def row_entropy(
    row_entropy: Float[Tensor, "batch head pos"],
    null: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    normalised: bool = False,
) -> Float[Tensor, "batch head"]:
    """Mean over queries of the entropy of an attention row, for every head.

    H_i = -sum_j A_ij ln A_ij. Attention to no token (`null_mass`) counts as one more key, so H_i is at most ln(i + 1) there. Keys of
    several layers at one position count as one. `normalised`: mean over i >= 2 of H_i / ln(keys in sight, and one for no token).
    Caution: the mean of exp(H) is not exp of the mean.
    """
    if not normalised:
        return row_entropy.mean(-1)
    return (row_entropy / columns_in_sight(row_entropy, window, null).log())[..., 1:].mean(-1)


@metric(
    unit="keys", range="1..i at query i", reading="lower: the head is more focused", version=2, source="perplexity of attention rows",
    variants={"share": {"share": True}}, units={"share": "share of the keys in sight"},
    controls={"uniform_causal": lambda T, window=None: float(keys_in_sight(T, window).mean())},
)  # fmt: skip
def effective_keys(
    row_entropy: Float[Tensor, "batch head pos"],
    null: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    share: bool = False,
) -> Float[Tensor, "batch head"]:
    """Number of keys with even attention that has the same entropy: the mean over queries of exp(H_i).

    Attention to no token (`null_mass`) counts as one more key, so exp(H_i) is at most i + 1 there. `share`: divided by the number of
    keys in sight, and one for no token. Caution: the mean of exp(H) is larger than exp of the mean entropy.
    """
    keys = row_entropy.exp()
    return (keys / columns_in_sight(keys, window, null) if share else keys).mean(-1)


TOP = 10


@metric(
    unit="share", range="0..1, falling with the rank", reading="higher: attention is on fewer positions",
    source="Zhou et al. 2024 (ranks 1, 2, 3, 10)", variants={"cumulative": {"cumulative": True}},
    controls={"uniform_causal": lambda T, window=None: uniform_importance(T, window).topk(min(TOP, T)).values},
)  # fmt: skip
def top_importance(
    received: Float[Tensor, "batch head pos"], *, cumulative: bool = False
) -> Float[Tensor, "batch index"]:
    """Token importance of the ten most attended positions, largest first; heads averaged.

    `cumulative`: sum over ranks up to this one. Caution: a rank is a different position in every sequence.
    """
    p = received.double().mean(1) / received.shape[-1]
    top = p.topk(min(TOP, p.shape[-1]), dim=-1).values
    return top.cumsum(-1) if cumulative else top


@metric(
    unit="ratio", range=">= 0, 1 = uniform causal", reading="higher: attended more than its position explains", min_length=2,
    source="column sums over the column sums of uniform causal attention", controls={"uniform_causal": lambda T: 1.0},
)  # fmt: skip
def received_ratio(received: Float[Tensor, "batch head pos"], window: int | None = None) -> Float[Tensor, "batch pos"]:
    """Attention that each position receives, divided by its value under uniform causal attention; heads averaged.

    c_j / c_j^uniform with c_j = sum_i A_ij. Caution: late positions receive little, so their ratios are noisy.
    """
    T = received.shape[-1]
    return received.mean(1) / (T * uniform_importance(T, window)).to(received)


@metric(
    unit="share", range="0..1, sums to 1", reading="higher: more of what attention moves comes from here",
    source="Guo et al. 2024, arXiv 2406.12335 (attention times the 1-norm of the value)",
)  # fmt: skip
def value_weighted_importance(
    received: Float[Tensor, "batch head pos"], v: Float[Tensor, "batch pos kv_head d_head"]
) -> Float[Tensor, "batch pos"]:
    """Share of a position in received attention times the value's 1-norm, summed over heads.

    c_j ||v_j||_1 / sum_j c_j ||v_j||_1. A sink with a small value counts little here and much in token importance.
    Caution: the norm is taken before W_O; `norm_weighted_importance` takes it after.
    """
    size = wide(v).abs().sum(-1).transpose(1, 2).repeat_interleave(received.shape[1] // v.shape[2], dim=1)
    weighted = (received * size).sum(1)
    return weighted / weighted.sum(-1, keepdim=True)


@metric(
    unit="share", range="0..1, sums to 1", reading="higher: more of what attention writes to the stream comes from here",
    source="Kobayashi et al. 2020, arXiv 2004.10102 (norm of the weighted, transformed vector)",
    variants={"per_head": {"per_head": True}, "even_attention": {"even": True}},
    controls={"uniform_causal": uniform_importance},
)  # fmt: skip
def norm_weighted_importance(
    received: Float[Tensor, "batch head pos"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    window: int | None = None,
    *,
    per_head: bool = False,
    even: bool = False,
) -> Float[Tensor, "batch pos *heads"]:
    """Share of a position in received attention times the norm of its value through W_O.

    sum over queries i and heads of ||A_ij v_j W_O|| = sum over heads of c_j ||v_j W_O||, divided by its sum over j.
    `per_head`: one share per head. `even_attention`: even attention to the same values, so that a difference comes from the
    pattern. The control `uniform_causal` is even attention to values of one norm. Caution: norms ignore that written vectors
    may cancel, and changes between the pattern and W_O (gates) are left out.
    """
    heads, T = received.shape[1:]
    triangle = torch.linalg.qr(wide(W_O).mT, mode="r").R  # ||x W_O|| = ||R x||, R no wider than the head
    values = wide(v).repeat_interleave(heads // v.shape[2], dim=2)
    size = torch.einsum("bphd,hrd->bphr", values, triangle).norm(dim=-1)
    attention = (T * uniform_importance(T, window)).to(size)[:, None] if even else received.transpose(1, 2)
    weighted = attention * size
    weighted = weighted if per_head else weighted.sum(-1)
    return weighted / weighted.sum(1, keepdim=True)


@metric(
    unit="share of heads", range="0..1", reading="higher: more heads are sinks", min_length=64,
    source="Gu et al. 2024, arXiv 2410.10781 (T = 64, threshold 0.3, first token)", controls={"uniform_causal": lambda T: 0.0},
)  # fmt: skip
def sink_rate(
    sink: Float[Tensor, "batch head pos"],
    received: Float[Tensor, "batch head pos"] | None = None,
    row_max: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    positions: str = "first",
) -> Float[Tensor, " batch"]:
    """Fraction of a layer's heads that give the first token more than 0.3 of their attention on average.

    alpha = mean over queries i = 1..64 of A_i1; a head counts if alpha > 0.3. The first 64 positions are used at any length,
    because the rate falls with T (uniform causal attention has alpha 0.074 there). With positions `found`, alpha is the head's
    `sink_mass` of found positions at the document's length. Caution: a fraction of heads, not of mass.
    """
    alpha = (
        sink[..., :64].mean(-1)
        if positions == "first"
        else sink_mass(sink, received, row_max, window, positions=positions)
    )
    return (alpha > SINK_MASS).to(sink.dtype).where(alpha.isfinite(), alpha).mean(-1)  # NaN is no "no sink"


@metric(
    unit="share", range="0..1", reading="higher: stronger sink", source="Xiao et al. 2023 (attention sinks)", min_length=2,
    controls={"uniform_causal": lambda T, window=None: (_of_first(T, window, 1) - 1.0) / (T - 1)},
)  # fmt: skip
def sink_mass(
    sink: Float[Tensor, "batch head pos"],
    received: Float[Tensor, "batch head pos"] | None = None,
    row_max: Float[Tensor, "batch head pos"] | None = None,
    window: int | None = None,
    *,
    positions: str = "first",
) -> Float[Tensor, "batch head"]:
    """Mean attention of the queries after the first to position 0.

    With positions `found`: to all positions of the head that `sink_positions` detects in the document, 0 without one.
    """
    if positions == "first":
        return sink[..., 1:].mean(-1)
    if received is None or row_max is None:
        raise BadData("positions='found' needs received attention and row maxima")
    return found_mass(received, sink_positions(received, row_max, window)).sum(-1)


@metric(
    unit="tokens", range="0..T", reading="higher: more of the loss's gradient gathers at the first value",
    source="Chen et al. 2026, Attention Sinks Induce Gradient Sinks, arXiv 2603.17771",
    controls={"uniform_causal": lambda T, window=None: _of_first(T, window, 2)},
)  # fmt: skip
def sink_power(sink: Float[Tensor, "batch head pos"]) -> Float[Tensor, "batch head"]:
    """Sum over queries of the squared attention to position 0.

    sum_t A_t0^2. The gradient at the first value is sum_t A_t0 g_t. If the gradients g_t of the head's outputs are
    independent, its mean square is this number times theirs. Caution: grows with T, and position 0 itself always adds 1.
    """
    return wide(sink).square().sum(-1)


@metric(
    unit="share", range="any", reading="higher: more of the head's output is the first token's; below 0: against it", min_length=2,
    source="contribution weights a_ij v_j . y_i / |y_i|^2 (Cunningham, PMLR 306; divided so that they sum to 1)",
)  # fmt: skip
def sink_contribution(
    sink: Float[Tensor, "batch head pos"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    z: Float[Tensor, "batch pos head d_head"],
) -> Float[Tensor, "batch head"]:
    """Signed share of the first token's value in a head's output, over the queries after the first.

    sum_i A_i0 v_0 . z_i / sum_i |z_i|^2. Over all tokens these shares sum to 1 if z is pattern times values and no more. The
    baseline is the head's `sink_mass`: a sink with a small value has a much smaller share. 0 if the head's output is zero.
    Caution: gates and additions change z. If they remove most of it, the share passes 1.
    """
    first = wide(v[:, 0]).repeat_interleave(z.shape[2] // v.shape[2], dim=1)
    out = wide(z[:, 1:]).transpose(1, 2)
    supplied = (wide(sink[..., 1:]) * (out * first[:, :, None]).sum(-1)).sum(-1)
    return supplied / out.square().sum((-2, -1)).clamp_min(torch.finfo(out.dtype).tiny)


@metric(
    unit="share", range="0..1", reading="higher: more of the attention goes nowhere", source="Miller 2023 (off by one); gpt-oss",
)  # fmt: skip
def null_mass(null: Float[Tensor, "batch head pos"]) -> Float[Tensor, "batch head"]:
    """Mean over queries of the attention to no token, for a softmax with a column that is no key.

    1 - sum_j A_ij: the share of a learned sink logit, or of the 1 that softmax_1 adds to its denominator. Caution: such a
    head can be idle without a sink on the first token, so read `sink_mass` too.
    """
    return null.mean(-1)


def _does_not_repeat(tokens: Int[Tensor, "batch pos"]) -> str:
    period = tokens.shape[1] // 2
    again = (tokens[:, period : 2 * period] == tokens[:, :period]).float().mean()
    doubt = "the second half of these documents does not repeat the first, so the numbers do not measure copying"
    return "" if again > 0.5 else doubt


def _of_earlier(T: int, offset: int, window: int | None) -> float:
    """Return what queries of the second half give to the key `offset` positions before them under uniform causal attention."""
    seen = window is None or offset < window or not window
    return float((1.0 / keys_in_sight(T, window)[T // 2 :]).mean()) if seen else 0.0


@metric(
    unit="share", range="0..1", reading="higher: the head copies what followed last time", min_length=4,
    source="Olsson et al. 2022, In-context Learning and Induction Heads", doubt=_does_not_repeat,
    variants={"previous": {"previous": True}},
    controls={"uniform_causal": lambda T, window=None: _of_earlier(T, T // 2 - 1, window)},
)  # fmt: skip
def induction_score(
    rot_q: Float[Tensor, "batch pos head d_head"],
    rot_k: Float[Tensor, "batch pos kv_head d_head"],
    lse: Float[Tensor, "batch head pos"],
    tokens: Int[Tensor, "batch pos"],
    *,
    previous: bool = False,
) -> Float[Tensor, "batch head"]:
    """Attention from each repeated token to the token after its earlier occurrence, half a sequence back.

    For sequences whose second half repeats the first, with period P = T // 2: mean over t >= P of A[t, t - P + 1].
    `previous`: mean over the same t of A[t, t - 1]. Caution: the number has no meaning on text without repetition.
    """
    T = tokens.shape[1]
    period = T // 2
    offset = 1 if previous else period - 1
    queries = torch.arange(period, T, device=tokens.device)
    keys = rot_k[:, queries - offset].repeat_interleave(rot_q.shape[2] // rot_k.shape[2], dim=2)
    scores = (wide(rot_q[:, queries]) * wide(keys)).sum(-1) * rot_q.shape[-1] ** -0.5
    return (scores.transpose(1, 2) - lse[..., queries]).exp().mean(-1)
