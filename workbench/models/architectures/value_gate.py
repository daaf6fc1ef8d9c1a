"""Value-gated attention: a gate computed from the values multiplies each head's values, or its output.

Key side: U_n,i = sum over j of A_ij g_j V_j with g = sigmoid(v W), one number per token j and key-value head; v are the layer's own
values of all heads, concatenated. Query side: U_n,i = (A_n V_n)_i sigmoid(V_i W)_h for each head h, where V_i is the value that the
head attends with at the same token. With `gate_from` = input the gate reads the layer's normalised input instead of the values.

Source: arXiv 2510.09017 (2025), without public code: the text has the gate on the key side, its appendix B on the query
side, and the input's gate is its comparison (IGA). Unconfirmed: the start and a bias; here weights are from N(0, init_std) without
bias. With value residuals the key side gates the own values before they are mixed (our reading).
Seam: `own_value` (key side), `gate` (query side); `gates.<layer>` [kv_head or head, D or d].
Parameters: L G D on the key side (G key-value heads), L H D on the query side; L G d and L H d with the input's gate.
Cache: 2 L T D, on the key side the gated values.
Degenerate case: W = 0 halves every output: the vanilla decoder with W_O halved. d(g v)/dv = g I + g (1 - g) v W^T for one head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import choice_option
from workbench.models.shortcut import Shortcut


class _ValueGate(Shortcut):
    prefix = "value_gate"
    random = "all"

    def __init__(self, config: ModelConfig, *, gate_from: str = "value", heads: int = 0) -> None:
        super().__init__(config)
        self.gate_from = choice_option("gate_from", gate_from, ("value", "input"))
        shape = heads, config.d_key_value if gate_from == "value" else config.d_model
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(config.n_layers))

    def opened(self, layer: int, v: Tensor, x: Tensor) -> Tensor:
        """Return the gates of all heads [batch, pos, head, 1]."""
        read, gates = v.flatten(-2) if self.gate_from == "value" else x, self.gates[layer]
        return F.linear(read.to(gates.dtype), gates).sigmoid()[..., None]


class KeySideGate(_ValueGate):
    """Values times their gate."""

    def __init__(self, config: ModelConfig, *, gate_from: str = "value") -> None:
        super().__init__(config, gate_from=gate_from, heads=config.n_key_value_heads)

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        return v * self.opened(layer, v, x)


class QuerySideGate(_ValueGate):
    """Head outputs times the gate of the token's value."""

    prefix = "value_gate_query"

    def __init__(self, config: ModelConfig, *, gate_from: str = "value") -> None:
        super().__init__(config, gate_from=gate_from, heads=config.n_heads)

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return z * self.opened(layer, v, x)
