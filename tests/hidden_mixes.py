"""Decoders whose values are mixed, normed or adapted where no name and no inline sum shows it."""

from __future__ import annotations

import torch
from strangers import GPT, HEADS, D, causal, split
from torch import nn

SHARES = (0.46, 0.54)  # of the first layer's values and of the layer's own


class Mix(nn.Module):
    """A submodule that mixes, or passes on what it was given last."""

    def forward(self, first, own):
        return SHARES[0] * first + SHARES[1] * own


class MixedProjection(nn.Module):
    """A projection that keeps the first layer's values by itself."""

    def __init__(self, kept):
        super().__init__()
        self.inner, self.kept = nn.Linear(D, D), kept

    def forward(self, x):
        v = self.inner(x)
        first = self.kept.setdefault("v", v)
        return v if first is v else SHARES[0] * first + SHARES[1] * v


class MixedLinear(nn.Linear):
    """The same as a kind of `Linear`."""

    def __init__(self, kept):
        super().__init__(D, D)
        self.kept = kept

    def forward(self, x):
        v = super().forward(x)
        first = self.kept.setdefault("v", v)
        return v if first is v else SHARES[0] * first + SHARES[1] * v


class HeadNorm(nn.Module):
    """Root-mean-square norm over each head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D // HEADS))

    def forward(self, x):
        heads = x.unflatten(-1, (HEADS, -1))
        return (heads * heads.square().mean(-1, keepdim=True).rsqrt() * self.weight).flatten(-2)


class Adapted(nn.Module):
    """A matrix and its low-rank addition."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.b(self.a(x))


class Biased(nn.Module):
    """A product and its bias, both bare parameters."""

    def __init__(self):
        super().__init__()
        self.w, self.bias = nn.Parameter(torch.zeros(D, D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x @ self.w + self.bias


class Packed(nn.Module):
    """A matrix kept in eight bits, whose product no function mode sees as one of a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randint(-99, 99, (D, D), generator=torch.Generator().manual_seed(5)))

    def forward(self, x):
        return torch.ops.aten.mm(x.flatten(0, 1), self.packed.to(x.dtype) / 400).view(x.shape)


class Apart(nn.Module):
    """Queries, keys and values apart; `project` makes the values' projection, `mix` is what all values pass, `end` follows."""

    def __init__(self, layer, project=None, mix=None, end=None, start=None):
        super().__init__()
        self.layer = layer
        self.q, self.k, self.o = (nn.Linear(D, D) for _ in range(3))
        self.v = nn.Linear(D, D) if project is None else project()
        self.mix, self.end, self.start = mix and mix(), end and end(), start and start()

    def forward(self, x, memory):
        v = self.v(x)
        v = self.start(v) if self.start else v
        first = memory.setdefault("v", v)
        if self.mix and self.layer:
            v = self.mix(first, v)
        v = self.end(v) if self.end else v
        y = causal(split(self.q(x)), split(self.k(x)), split(v))
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Fresh(GPT):
    """Forgets what its parts kept before each run."""

    def __init__(self, kind):
        self_kept = {}
        super().__init__(attention=lambda i: Apart(i, project=lambda: kind(self_kept)))
        self.kept = self_kept

    def forward(self, idx, targets=None):
        self.kept.clear()
        return super().forward(idx, targets)


def mixed(**parts):
    return GPT(attention=lambda i: Apart(i, mix=Mix, **parts))


MIXED = {
    "a submodule": mixed, "identity after": lambda: mixed(end=nn.Identity),
    "dropout after": lambda: mixed(end=lambda: nn.Dropout(0.5)), "inside the projection": lambda: Fresh(MixedProjection),
    "a kind of Linear": lambda: Fresh(MixedLinear), "norm before": lambda: mixed(start=HeadNorm),
    "adapted": lambda: mixed(project=Adapted), "biased": lambda: mixed(project=Biased),
    "packed": lambda: mixed(project=Packed),
}  # fmt: skip
"""Values are `SHARES` of the first layer's and the layer's own."""
UNMIXED = {
    "norm": lambda: GPT(attention=lambda i: Apart(i, end=HeadNorm)),
    "adapted": lambda: GPT(attention=lambda i: Apart(i, project=Adapted)),
    "biased": lambda: GPT(attention=lambda i: Apart(i, project=Biased)),
    "packed": lambda: GPT(attention=lambda i: Apart(i, project=Packed)),
}
"""Values are the layer's own."""
