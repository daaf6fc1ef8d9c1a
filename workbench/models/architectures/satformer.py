"""SATFormer: the first layer's values are added in an amount that each token and key-value head decides.

V_n = V_n^own + alpha V_1 with alpha = f(X_n W_n), X_n the normalised input of the attention, for the layers n >= 2 that `layers` names.
f = `gate_form`: relu, sigmoid, tanh, identity, softmax (over the key-value heads, times their number), or softmax_sigmoid (both).

Source: arXiv 2605.03953 (2026), and its code (SkyeGunasekaran/SATFormer): no bias, weights from N(0, 0.02).
Seam: values, with weights of each token: `attn.hook_v_weights` [batch, pos, kv_head, source], own last; `gates.<layer>` [kv_head, d].
V_1 is not detached. The mean of alpha over tokens is what `coefficient_share` tells as its coefficient.
Parameters: d G for each such layer, G key-value heads.
Cache: 2 L T D, the mixed values.
Degenerate case: alpha = 0 (W = 0 under relu, tanh, identity) is the vanilla decoder, `layers` = [] too; a constant alpha is ResFormer
with (alpha, 1): W = 0 under softmax is (1, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight, chosen_layers, one_of

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
    weighs_tokens = True

    def __init__(self, config: ModelConfig, *, gate_form: str = "relu", layers: str | Sequence[int] = "all") -> None:
        super().__init__(config)
        self.gate_form = one_of("gate_form", gate_form, tuple(GATES))
        self.layers = chosen_layers("layers", layers, range(1, config.n_layers))
        shape = config.n_key_value_heads, config.d_model
        self.gates = nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n in self.layers})

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        for name, tensor in self.named_parameters():
            draw(name, tensor)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == "v" and layer in self.layers else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return GATES[self.gate_form](F.linear(x, self.gates[str(layer)])), 1.0
