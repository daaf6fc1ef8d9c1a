"""Manifold-constrained hyper-connections: n residual streams whose mixing neither grows nor shrinks what passes.

x_s = h_pre X;  X' = h_res X + h_post^T f_s(norm(x_s)): X [n, d] the streams. With r = RMSNorm(vec X) phi, for each token
h_pre = sigmoid(a_1 r + b), h_post = 2 sigmoid(a_2 r + b) and h_res = Sinkhorn(exp(a_3 r + b)), 20 rounds of columns, then rows, to sum
1. `mixing` = permutations: h_res = sum over the n! permutation matrices P_k of softmax_k(a_3 r + b) P_k, doubly stochastic exactly.

Source: Xie et al. (2025), mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880; permutations: mHC-lite, arXiv 2601.05732.
Unconfirmed: the start of b (below; after others' reading of the appendix), which stream sublayer s has for its home (here s mod n) and
the readout (here the streams' mean).
Seam: the streams (`multi_stream.py`); of sublayer s `matrices.<s>` [rows, n d_model] (phi) and `biases.<s>` [rows], rows those
of h_pre, h_post, h_res, and `scales.<s>` [3]. At the start a = 0.01; b is -3 (home 3) for h_pre, 0 for h_post,
6 I - 3 for h_res, or 0 for the identity and -8 for other permutations.
Parameters: 2 L (n d (n^2 + 2 n) + n^2 + 2 n + 3); n! in place of n^2 for permutations.
Cache: 2 L T D; streams need the new token only.
Degenerate case: without phi and at this start all streams stay alike: the vanilla decoder up to eps, since h_pre sums to 1.1, not 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Shortcut, one_of, stream_count

ROUNDS, MOST = 20, 6  # 720 permutations


class ManifoldHyperConnections(Shortcut):
    """Streams mixed by doubly stochastic matrices."""

    permutations: Tensor

    prefix = "mhc"

    def __init__(self, config: ModelConfig, *, streams: int = 4, mixing: str = "sinkhorn") -> None:
        super().__init__(config)
        self.streams = n = stream_count(streams)
        self.mixing = one_of("mixing", mixing, ("sinkhorn", "permutations"))
        start = (6 * torch.eye(n) - 3).flatten()
        if self.mixing == "permutations":
            if n > MOST:
                raise WorkbenchError(
                    f"streams={n}: mixing=permutations takes {MOST} at the most ({n}! matrices); nearest {MOST}"
                )
            orders = torch.tensor(list(itertools.permutations(range(n))))
            self.register_buffer(
                "permutations", torch.eye(n)[orders].flatten(1), persistent=False
            )  # the identity first
            start = torch.full((len(orders),), -8.0).index_fill(0, torch.tensor(0), 0.0)
        sublayers, rows = range(2 * config.n_layers), 2 * n + len(start)
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(rows, n * config.d_model)) for _ in sublayers)
        homes = [torch.full((n,), -3.0).index_fill(0, torch.tensor(s % n), 3.0) for s in sublayers]
        self.biases = nn.ParameterList(nn.Parameter(torch.cat((home, torch.zeros(n), start))) for home in homes)
        self.scales = nn.ParameterList(nn.Parameter(torch.full((3,), 0.01)) for _ in sublayers)

    def connections(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, flat = self.streams, streams.flatten(-2)
        normed = F.rms_norm(flat, flat.shape[-1:], None, self.config.rms_norm_eps)
        said, bias, scales = F.linear(normed, self.matrices[sublayer]), self.biases[sublayer], self.scales[sublayer]
        wide = torch.promote_types(said.dtype, torch.float32)
        sizes = (n, n, len(bias) - 2 * n)
        parts = zip(said.to(wide).split(sizes, -1), bias.to(wide).split(sizes), scales.to(wide), strict=True)
        pre, post, res = (scale * part + shift for part, shift, scale in parts)
        return pre.sigmoid(), self.mixed(res), 2 * post.sigmoid()

    def mixed(self, logits: Tensor) -> Tensor:
        """h_res [batch, pos, into, from] of its logits."""
        n = self.streams
        if self.mixing == "permutations":
            return (logits.softmax(-1) @ self.permutations.to(logits.dtype)).unflatten(-1, (n, n))
        return sinkhorn((logits - logits.amax(-1, keepdim=True)).exp().unflatten(-1, (n, n)))

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        if "matrices.0" not in shapes:
            return []
        rows, width = shapes["matrices.0"]
        n = width // config.d_model
        return [{"streams": n, "mixing": "sinkhorn" if rows == n * n + 2 * n else "permutations"}]


def sinkhorn(matrix: Tensor) -> Tensor:
    """Positive matrices [..., n, n] whose columns, then rows, are brought to sum 1, again and again."""
    for _ in range(ROUNDS):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix
