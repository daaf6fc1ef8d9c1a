"""What a sublayer reads of the outputs before it, from the published equations: depth attention and several streams, in loops."""

from __future__ import annotations

import itertools

import torch


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def depth_attention(s, outputs, o, p, shape):
    """What sublayer s reads of the embedding and of the outputs so far."""
    sublayers = 2 * shape.n_layers
    if o["depth_form"] == "delta" and s == sublayers:
        return sum(outputs)
    N, sums, rest = o["depth_blocks"] or sublayers, [outputs[0]], outputs[1:]
    sizes = [sublayers // N + (n < sublayers % N) for n in range(N)]
    while rest:
        size = sizes.pop(0)
        sums.append(sum(rest[:size]))
        rest = rest[size:]
    query, gain = (p[f"attention_residuals.{n}.{s}"] for n in ("queries", "gains"))
    size, read = shape.d_model // o["depth_heads"], []
    for h in range(o["depth_heads"]):
        chunk = slice(h * size, (h + 1) * size)
        score = torch.stack([(query * gain * rms(v, shape.rms_norm_eps))[..., chunk].sum(-1) for v in sums])
        share = score.exp() / score.exp().sum(0) + (o["depth_form"] == "delta")
        read.append(sum(a[..., None] * v[..., chunk] for a, v in zip(share, sums, strict=True)))
    return torch.cat(read, -1)


class Streams:
    """n residual streams, one by one."""

    def __init__(self, kind, o, p, shape, embedding):
        self.kind, self.o, self.p, self.shape, self.n = kind, o, p, shape, o["streams"]
        self.X = [embedding] * self.n
        self.passing, self.gets = None, None

    def read(self, s):
        """What sublayer s reads."""
        if s == 2 * self.shape.n_layers:
            return sum(self.X) / self.n
        weights, self.passing, self.gets = (self.free if self.kind == "hyper_connections" else self.doubly_stochastic)(
            s
        )
        return sum(w * x for w, x in zip(weights, self.X, strict=True))

    def write(self, out):
        """A sublayer's output goes to all streams, which have mixed: `passing[into][from]`."""
        mixed = [sum(w * x for w, x in zip(row, self.X, strict=True)) for row in self.passing]
        self.X = [x + w * out for x, w in zip(mixed, self.gets, strict=True)]

    def free(self, s):
        at, n, streams = "hyper_connections.", self.n, range(self.n)
        A_m, B, A_r = self.p[f"{at}pre.{s}"], self.p[f"{at}post.{s}"], self.p[f"{at}res.{s}"].reshape(n, n)
        if not self.o["dynamic"]:
            return A_m, A_r.T, B
        a, b = self.p[f"{at}scales.{s}"]
        W, normed = self.p[f"{at}matrices.{s}"], [rms(x, self.shape.rms_norm_eps) for x in self.X]

        def said(i, row):
            return torch.tanh((normed[i] * W[row]).sum(-1, keepdim=True))

        return (
            [A_m[i] + a * said(i, 0) for i in streams],
            [[A_r[i, j] + a * said(i, 1 + j) for i in streams] for j in streams],
            [B[i] + b * said(i, n + 1) for i in streams],
        )

    def doubly_stochastic(self, s):
        n, (a1, a2, a3) = self.n, self.p[f"mhc.scales.{s}"]
        r = rms(torch.cat(self.X, -1), self.shape.rms_norm_eps) @ self.p[f"mhc.matrices.{s}"].T
        b = self.p[f"mhc.biases.{s}"]
        pre, post, rest = (
            c * r[..., at] + b[at] for c, at in ((a1, slice(n)), (a2, slice(n, 2 * n)), (a3, slice(2 * n, None)))
        )
        if self.o["mixing"] == "permutations":
            res = torch.zeros(*rest.shape[:-1], n, n, dtype=rest.dtype)
            for k, order in enumerate(itertools.permutations(range(n))):
                res = (
                    res
                    + (rest.exp()[..., k] / rest.exp().sum(-1))[..., None, None]
                    * torch.eye(n, dtype=rest.dtype)[list(order)]
                )
        else:
            res = rest.exp().reshape(*rest.shape[:-1], n, n)
            for _ in range(20):
                res = res / res.sum(-2, keepdim=True)
                res = res / res.sum(-1, keepdim=True)
        gate = lambda x, i: 1 / (1 + torch.exp(-x[..., i, None]))  # noqa: E731
        return (
            [gate(pre, i) for i in range(n)],
            [[res[..., j, i, None] for i in range(n)] for j in range(n)],
            [2 * gate(post, i) for i in range(n)],
        )
