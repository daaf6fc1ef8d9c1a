"""SATFormer: the first layer's values are added with a gate for each token and key-value head.

V_n = V_n^own + alpha V_1 with alpha = f(X_n W_n) for the layers n >= 2 that `layers` names. X_n is the normalised input of the attention.
f = `gate_form`: relu, sigmoid, tanh, identity, softmax (over the key-value heads, times their number), or softmax_sigmoid (both).

Source: arXiv 2605.03953 (2026), and its code (SkyeGunasekaran/SATFormer): no bias, weights from N(0, 0.02).
Seam: `weights` of the values, per token: `attn.hook_v_weights` [batch, pos, kv_head, source], own last; `gates.<layer>` [kv_head, d].
V_1 is not detached. `coefficient_share` reports the mean of alpha over tokens.
Parameters: d G for each such layer, G key-value heads.
Cache: 2 L T D, the mixed values.
Degenerate case: alpha = 0 (W = 0 under relu, tanh, identity) is the vanilla decoder, layers = [] too. A constant alpha is ResFormer
with (alpha, 1): W = 0 under softmax is (1, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import choice_option, layers_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1) * logits.shape[-1],
    "softmax_sigmoid": lambda logits: logits.softmax(-1) * logits.sigmoid() * logits.shape[-1],
}


class SATFormer(Shortcut):
    """Value residual with a gate for each token and head."""

    prefix = "satformer"
    random = "all"
    weighs_tokens = True

    def __init__(self, config: ModelConfig, *, gate_form: str = "relu", layers: str | Sequence[int] = "all") -> None:
        super().__init__(config)
        self.gate_form = choice_option("gate_form", gate_form, tuple(GATES))
        self.layers = layers_option("layers", layers, range(1, config.n_layers))
        shape = config.n_key_value_heads, config.d_model
        self.gates = nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n in self.layers})

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == "v" and layer in self.layers else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return GATES[self.gate_form](F.linear(x, self.gates[str(layer)])), 1.0
