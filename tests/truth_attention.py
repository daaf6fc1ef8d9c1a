"""Every measure of attention patterns once more in plain float64: see `truth.py`."""

from __future__ import annotations

import math

import torch
from truth import at, spread


def uniform(T):
    """Importance under uniform causal attention."""
    return torch.tensor([sum(1 / i for i in range(j, T + 1)) / T for j in range(1, T + 1)], dtype=torch.double)


def of_patterns(parts, controls=None):
    """Truth of a measure of patterns: {variant: (function(pattern, world, layer), axes)}; controls by the length."""

    def truth(world):
        rows, T = {}, world.ids.shape[1]
        for (name, n), pattern in world.seen.items():
            if name == "pattern":
                for variant, (function, axes) in parts.items():
                    rows |= spread(function(pattern, world, n), axes, layer=n, variant=variant)
                for control, (value, axes) in ((c, given(T)) for c, given in (controls or {}).items()):
                    rows |= spread(value, axes, layer=n, control=control)
        return rows

    return truth


def importance(A):
    return A.mean(1).sum(1) / A.shape[-1]


def entropy(p):
    return -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0.0).sum(-1)


def steps(A):
    return torch.arange(1, A.shape[-1] + 1, dtype=torch.double)


def written(A, world, n, even=False):
    """||A_ij v_j W_O|| summed over queries: [document, position, head]."""
    v = world.seen["v", n].repeat_interleave(world.H // world.G, 2)
    vectors = torch.einsum("bkhd,hdm->bkhm", v, world.output_matrix(n)).norm(dim=-1)
    received = A.sum(2).transpose(1, 2)
    return vectors * ((uniform(A.shape[-1]) * A.shape[-1])[None, :, None] if even else received)


def share(x):
    return x / x.sum(1, keepdim=True)


def value_weighted(A, world, n):
    v = world.seen["v", n].repeat_interleave(world.H // world.G, 2)
    return share((A.sum(2) * v.abs().sum(-1).transpose(1, 2)).sum(1))


def attended(world, n):
    """Values by query head, and what the heads put out: [document, position, head, width]."""
    return world.seen["v", n].repeat_interleave(world.H // world.G, 2), world.seen["z", n]


def supplied(A, world, n):
    """What the first value adds to each later output along it, over the output's square."""
    v, z = attended(world, n)
    written = A[:, :, 1:, :1] * v[:, :1].transpose(1, 2)
    z = z[:, 1:].transpose(1, 2)
    return (written * z).sum((-2, -1)) / (z**2).sum((-2, -1))


def bias(A, world, n, places=None, away=0):
    v, z = attended(world, n)
    T = z.shape[1]
    each = [
        (z[:, t] * v[:, u]).sum(-1) / z[:, t].norm(dim=-1) / v[:, u].norm(dim=-1)
        for t in places or range(1, T)
        for u in [1 + (t - 1 - away) % (T - 1) if t else 0]
    ]
    return torch.stack(each).mean(0)


def other(A, world, n):
    return bias(A, world, n, away=(A.shape[-1] - 1) // 2)


def stripes(A, offset):
    return torch.stack([A[:, :, t, t - offset] for t in range(A.shape[-1] // 2, A.shape[-1])]).mean(0)


def concentration(world):
    rows, u = {}, uniform(world.ids.shape[1])
    for n in range(world.L):
        p = importance(world.seen["pattern", n])
        m = p.mean(0)
        parts = {
            None: (p * (p / u).log()).sum(1).mean(),
            "first_position": m[0] * (m[0] / u[0]).log() + (1 - m[0]) * ((1 - m[0]) / (1 - u[0])).log(),
            "profile": (m[1:] * ((m[1:] / (1 - m[0])) / (u[1:] / (1 - u[0]))).log()).sum(),
            "content": (p * (p / m).log()).sum(1).mean(),
        }
        rows |= {at(layer=n, variant=name): float(x) for name, x in parts.items()}
    return rows


def rests(A):
    """Positions on which one head's pattern [query, key] rests in one document: at most the four of largest excess."""
    T, found = len(A), {}
    tested = [j for j in range(T) if T - j >= T / 4 and T - j > 10]
    for j in tested:
        rows = range(max(j, 1), T)
        excess = sum(float(A[i, j]) - 1 / (i + 1) for i in range(j, T))
        largest = {i: float(A[i].max()) for i in rows}
        variance = sum(largest[i] / (i + 1) for i in rows)
        if excess > 0.1 * (T - j):
            evidence = excess**2 / 2 / (variance + max(largest.values()) * excess / 3)
            if evidence > math.log(len(tested) / 0.01):
                found[j] = excess
    return sorted(found, key=found.get)[-4:]


def found_sinks(world):
    rows, (N, T) = {}, world.ids.shape
    for n in range(world.L):
        A, shares = world.seen["pattern", n], {"": [0.0] * world.H}
        for b, h in [(b, h) for b in range(N) for h in range(world.H)]:
            for j in rests(A[b, h]):
                part = float(A[b, h, 1:, j].sum()) / (T - 1) / N
                token = int(world.ids[b, j])
                first = "" if token in world.ids[b, :j] else "first "
                for name in ("", f"position {j}", f"{first}token {token}"):
                    shares.setdefault(name, [0.0] * world.H)[h] += part
        for kind in ("position", "token"):
            names = sorted((x for x in shares if kind in x), key=lambda x: -sum(shares[x]))
            for name in names[6:]:
                del shares[name]
        for name, each in shares.items():
            rows |= {at(layer=n, head=h, variant=name or None): x for h, x in enumerate(each)}
    return rows


POS = {"uniform_causal": lambda T: (uniform(T), ["position"])}


def fixed(function, name="uniform_causal"):
    return {name: lambda T: (function(T), [])}


ATTENTION = {
    "token_importance": of_patterns({None: (lambda A, w, n: importance(A), ["position"])}, POS),
    "importance_entropy": of_patterns(
        {
            None: (lambda A, w, n: entropy(importance(A)), []),
            "deficit": (lambda A, w, n: entropy(uniform(A.shape[-1])) - entropy(importance(A)), []),
            "per_head": (lambda A, w, n: entropy(A.sum(2) / A.shape[-1]), ["head"]),
        },
        fixed(lambda T: float(entropy(uniform(T)))),
    ),
    "concentration_parts": concentration,
    "found_sinks": found_sinks,
    "row_entropy": of_patterns(
        {
            None: (lambda A, w, n: entropy(A).mean(-1), ["head"]),
            "normalised": (lambda A, w, n: (entropy(A)[..., 1:] / steps(A)[1:].log()).mean(-1), ["head"]),
        },
        fixed(lambda T: math.lgamma(T + 1) / T),
    ),
    "effective_keys": of_patterns(
        {
            None: (lambda A, w, n: entropy(A).exp().mean(-1), ["head"]),
            "share": (lambda A, w, n: (entropy(A).exp() / steps(A)).mean(-1), ["head"]),
        },
        fixed(lambda T: (T + 1) / 2),
    ),
    "top_importance": of_patterns(
        {
            None: (lambda A, w, n: importance(A).sort(descending=True)[0][:, :10], ["index"]),
            "cumulative": (lambda A, w, n: importance(A).sort(descending=True)[0][:, :10].cumsum(1), ["index"]),
        },
        {"uniform_causal": lambda T: (uniform(T)[:10], ["index"])},
    ),
    "received_ratio": of_patterns(
        {None: (lambda A, w, n: importance(A) / uniform(A.shape[-1]), ["position"])}, fixed(lambda T: 1.0)
    ),
    "value_weighted_importance": of_patterns({None: (value_weighted, ["position"])}),
    "norm_weighted_importance": of_patterns(
        {
            None: (lambda A, w, n: share(written(A, w, n).sum(-1)), ["position"]),
            "per_head": (lambda A, w, n: share(written(A, w, n)), ["position", "head"]),
            "even_attention": (lambda A, w, n: share(written(A, w, n, True).sum(-1)), ["position"]),
        },
        POS,
    ),
    "sink_rate": of_patterns(
        {None: (lambda A, w, n: (A[:, :, :64, 0].mean(-1) > 0.3).double().mean(-1), [])}, fixed(lambda T: 0.0)
    ),
    "sink_mass": of_patterns(
        {None: (lambda A, w, n: A[:, :, 1:, 0].mean(-1), ["head"])},
        fixed(lambda T: sum(1 / i for i in range(2, T + 1)) / (T - 1)),
    ),
    "sink_power": of_patterns(
        {None: (lambda A, w, n: (A[..., 0] ** 2).sum(-1), ["head"])},
        fixed(lambda T: sum(i**-2 for i in range(1, T + 1))),
    ),
    "sink_contribution": of_patterns({None: (supplied, ["head"])}),
    "value_bias": of_patterns(
        {
            None: (bias, ["head"]),
            "first_position": (lambda A, w, n: bias(A, w, n, [0]), ["head"]),
            "other_token": (other, ["head"]),
        }
    ),
    "induction_score": of_patterns(
        {
            None: (lambda A, w, n: stripes(A, A.shape[-1] // 2 - 1), ["head"]),
            "previous": (lambda A, w, n: stripes(A, 1), ["head"]),
        },
        fixed(lambda T: sum(1 / (t + 1) for t in range(T // 2, T)) / (T - T // 2)),
    ),
}
