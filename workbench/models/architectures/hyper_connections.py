"""Hyper-connections: n residual streams, read, mixed and written with trained weights that may depend on the token.

x_s = A_m^T X;  X' = A_r^T X + B^T f_s(norm(x_s)): X [n, d] the streams, before each attention and MLP. With `dynamic`
A_m = A_m0 + a tanh(X_ W_m), A_r = A_r0 + a tanh(X_ W_r), B = B_0 + b tanh(X_ W_B), X_ each stream normed: numbers for each token.

Source: Zhu et al. (2024), Hyper-Connections, arXiv 2409.19606, static and dynamic (Algorithm 2). Here X_ is normed by RMSNorm
without a gain, which would only scale the rows of W (published: a layer norm), the readout is the streams' mean (published: the
sum, which the final norm brings to the same), and no output projection is scaled by sqrt(n) at the start (unconfirmed).
Seam: the streams (`multi_stream.py`); of sublayer s `pre.<s>` [n] (A_m0), `res.<s>` [n n] (A_r0 row by row), `post.<s>` [n] (B_0),
and `matrices.<s>` [n + 2, d_model] (of A_m, A_r, B in this order) and `scales.<s>` [2] (a, b). At the start A_m0 picks stream s mod n,
A_r0 is the identity, B_0 is 1, W is 0, a and b are 0.01. Matrices decay, static weights do not.
Parameters: 2 L (n^2 + 2 n), with `dynamic` 2 L ((n + 2) d + 2) more.
Cache: 2 L T D; streams need the new token only.
Degenerate case: the start is the vanilla decoder, all streams alike; one stream is one residual stream with trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Shortcut, stream_count


class HyperConnections(Shortcut):
    """Streams with free weights."""

    prefix = "hyper_connections"

    def __init__(self, config: ModelConfig, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(config)
        self.streams, self.dynamic = stream_count(streams), bool(dynamic)
        n, sublayers = self.streams, range(2 * config.n_layers)
        one = torch.eye(n)
        self.pre, self.res, self.post = (
            nn.ParameterList(nn.Parameter(make(s).clone()) for s in sublayers)
            for make in (lambda s: one[s % n], lambda s: one.flatten(), lambda s: torch.ones(n))
        )
        self.matrices, self.scales = (
            nn.ParameterList(nn.Parameter(torch.full(shape, value)) for _ in sublayers if self.dynamic)
            for shape, value in (((n + 2, config.d_model), 0.0), ((2,), 0.01))
        )

    def initialise(self, draw: Any) -> None:
        """Nothing is random."""

    def connections(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.streams
        pre, post = self.pre[sublayer], self.post[sublayer]
        res = self.res[sublayer].view(n, n).T  # from A_r [from, into] to [into, from]
        if self.dynamic:
            normed = F.rms_norm(streams, streams.shape[-1:], None, self.config.rms_norm_eps)
            said = F.linear(normed, self.matrices[sublayer]).tanh()  # [batch, pos, stream, n + 2]
            of_streams, of_output = self.scales[sublayer]
            pre, post = pre + of_streams * said[..., 0], post + of_output * said[..., -1]
            res = res + of_streams * said[..., 1:-1].mT
        return pre, res, post

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        return [{"streams": shapes["pre.0"][0], "dynamic": "matrices.0" in shapes}] if "pre.0" in shapes else []
