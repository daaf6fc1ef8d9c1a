"""Hyper-connections: n residual streams that are read, mixed and written with trained weights, which may depend on the token.

x_s = A_m^T X;  X' = A_r^T X + B^T f_s(norm(x_s)), where X [n, d] are the streams before an attention or MLP. With `dynamic`
A_m = A_m0 + a tanh(X_ W_m), A_r = A_r0 + a tanh(X_ W_r), B = B_0 + b tanh(X_ W_B) for each token, where X_ are the normed streams.

Source: Zhu et al. (2024), Hyper-Connections, arXiv 2409.19606, static and dynamic (Algorithm 2). Differences: X_ is normed by RMSNorm
without a gain, which would only scale the rows of W (published: layer norm). The readout is the streams' mean (published: their sum,
which the final norm maps to the same). No output projection is scaled by sqrt(n) at the start (unconfirmed).
Seam: `connections` (`residual_stream.py`). Sublayer s has `pre.<s>` [n] (A_m0), `res.<s>` [n n] (A_r0 row by row), `post.<s>` [n] (B_0),
`matrices.<s>` [n + 2, d_model] (of A_m, A_r, B in this order) and `scales.<s>` [2] (a, b). At the start A_m0 selects stream s mod n,
A_r0 is the identity, B_0 is 1, W is 0, a and b are 0.01. Weight decay applies to matrices, not to static weights.
Parameters: 2 L (n^2 + 2 n), with `dynamic` 2 L ((n + 2) d + 2) more.
Cache: 2 L T D; the streams need only the new token.
Degenerate case: the start is the vanilla decoder, with all streams equal. One stream is a residual stream with trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import UNBOUNDED, integer_option
from workbench.models.shortcut import Shortcut


class HyperConnections(Shortcut):
    """Residual streams with unconstrained weights."""

    prefix = "hyper_connections"
    random = "none"

    def __init__(self, config: ModelConfig, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(config)
        self.streams, self.dynamic = integer_option("streams", streams, range(1, UNBOUNDED)), bool(dynamic)
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
