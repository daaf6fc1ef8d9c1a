"""Manifold-constrained hyper-connections (mHC): n residual streams that are mixed by doubly stochastic matrices.

x_s = h_pre X;  X' = h_res X + h_post^T f_s(norm(x_s)), where X [n, d] are the streams. With r = RMSNorm(vec X) phi, for each token
h_pre = sigmoid(a_1 r + b), h_post = 2 sigmoid(a_2 r + b) and h_res = Sinkhorn(exp(a_3 r + b)): 20 rounds that normalise the columns,
then the rows, to sum 1.

Options: `mixing` = permutations: h_res = sum over the n! permutation matrices P_k of softmax_k(a_3 r + b) P_k, which is exactly doubly
stochastic.

Source: Xie et al. (2025), mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880. Permutations: mHC-lite, arXiv 2601.05732.
Unconfirmed: the start of b (given below, after others' reading of the appendix), the home stream of sublayer s (here s mod n) and
the readout (here the streams' mean).
Seam: `connections` (`residual_stream.py`). Sublayer s has `matrices.<s>` [rows, n d_model] (phi) and `biases.<s>` [rows], with the rows
of h_pre, h_post and h_res in this order, and `scales.<s>` [3]. At the start a = 0.01. b is -3 for h_pre (3 for the home stream), 0 for
h_post, and for h_res 6 I - 3, or with permutations 0 for the identity and -8 for the others.
Parameters: 2 L (n d (n^2 + 2 n) + n^2 + 2 n + 3); n! in place of n^2 for permutations.
Cache: 2 L T D; the streams need only the new token.
Degenerate case: with phi = 0 and this start all streams stay equal: the vanilla decoder up to eps, since h_pre sums to 1.1, not 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import UNBOUNDED, choice_option, integer_option
from workbench.models.shortcut import Shortcut

ROUNDS = 20  # of Sinkhorn normalisation
MOST = 6  # streams, which have 720 permutations


class ManifoldHyperConnections(Shortcut):
    """Residual streams mixed by doubly stochastic matrices."""

    prefix = "mhc"
    permutations: Tensor

    def __init__(self, config: ModelConfig, *, streams: int = 4, mixing: str = "sinkhorn") -> None:
        super().__init__(config)
        self.mixing = choice_option("mixing", mixing, ("sinkhorn", "permutations"))
        limit = MOST if mixing == "permutations" else UNBOUNDED - 1
        self.streams = n = integer_option("streams", streams, range(1, limit + 1), f"mixing={mixing}")
        start = (6 * torch.eye(n) - 3).flatten()
        if self.mixing == "permutations":
            orders = torch.tensor(list(itertools.permutations(range(n))))
            # the identity comes first
            self.register_buffer("permutations", torch.eye(n)[orders].flatten(1), persistent=False)
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
        """Return h_res [batch, pos, into, from] from its logits."""
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
    """Normalise the columns, then the rows, of positive matrices [..., n, n] to sum 1, repeatedly."""
    for _ in range(ROUNDS):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix
