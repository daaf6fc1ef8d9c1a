"""Value-gated attention: each head's values, or its output, times a gate that is read off the values themselves.

Key side: U_n,i = sum over j of A_ij g_j V_j with g = sigmoid(v W), a number for each token j and key-value head, v the layer's own
values (all heads side by side). Query side: U_n,i = (A_n V_n)_i sigmoid(V_i W)_h for each head h, V_i what the head attends with
at the token itself. `gate_from = input` reads the gate off the layer's normalised input in place of the values.

Source: arXiv 2510.09017 (2025), of which no code was found: the text has the gate on the key side, its appendix B on the query
side, and the gate of the input is its comparison (IGA). The start and whether there is a bias are not confirmed: here weights
from N(0, init_std) and no bias. With value residuals the key side gates the own values before they are mixed (our reading).
Seam: own values (key side), gate of the head outputs (query side); `gates.<layer>` [kv_head or head, D or d].
Parameters: L G D on the key side (G key-value heads), L H D on the query side; L G d and L H d with the input's gate.
Cache: 2 L T D, on the key side the gated values.
Degenerate case: W = 0 halves every output: the vanilla decoder with W_O halved. d(g v)/dv = g I + g (1 - g) v W^T for one head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Shortcut, one_of


class _ValueGate(Shortcut):
    prefix = "value_gate"

    def __init__(self, config: ModelConfig, *, gate_from: str = "value", heads: int = 0) -> None:
        super().__init__(config)
        self.gate_from = one_of("gate_from", gate_from, ("value", "input"))
        shape = heads, config.d_key_value if gate_from == "value" else config.d_model
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(config.n_layers))

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        for name, tensor in self.named_parameters():
            draw(name, tensor)

    def opened(self, layer: int, v: Tensor, x: Tensor) -> Tensor:
        """The gate of each head, [batch, pos, head, 1], from values and input."""
        return F.linear(v.flatten(-2) if self.gate_from == "value" else x, self.gates[layer]).sigmoid()[..., None]


class KeySideGate(_ValueGate):
    """Values times their gate."""

    def __init__(self, config: ModelConfig, *, gate_from: str = "value") -> None:
        super().__init__(config, gate_from=gate_from, heads=config.n_key_value_heads)

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        return v * self.opened(layer, v, x)


class QuerySideGate(_ValueGate):
    """Head outputs times the gate of the token's own values."""

    prefix = "value_gate_query"

    def __init__(self, config: ModelConfig, *, gate_from: str = "value") -> None:
        super().__init__(config, gate_from=gate_from, heads=config.n_heads)

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return z * self.opened(layer, v, x)
