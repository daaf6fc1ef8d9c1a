"""Gated value embeddings: every second layer adds values looked up by token id, multiplied by a gate for each token and head.

V_n = V_n^own + s sigmoid(X_n[:c] W_n) E_n[token]. X_n is the normalised input of the attention, and the gate reads its first c
channels.

Options: `gate_scale` = s and `gate_channels` = c. `table_layers` are the layers with a table, by default those with n = L mod 2, which
include the last one.

Source: nanochat (Karpathy, gpt.py of 2026-07-03): s = 3, c = 12, one table per such layer with entries of standard deviation
1 / sqrt(d) (uniform there, normal here), W from U(0, 0.02). Its norm before the attention has no gain.
Seam: `weights`, with coefficients per token: `attn.hook_v_weights` [batch, pos, kv_head, source], own last. The table is a source
outside the layers. `tables.<layer>` [d_vocab, D] and `gates.<layer>` [kv_head, c].
Parameters: d_vocab D + G c for each such layer, G key-value heads.
Cache: 2 L T D, the mixed values.
Degenerate case: gate_scale = 0 is the vanilla decoder. W = 0 adds s / 2 of the table, as value embeddings with (s / 2, 1) do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import integer_option, layers_option, number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight

WIDEST = 0.02  # weight of a gate at the start


class GatedValueEmbedding(Shortcut):
    """Values by token id, gated by the layer's input."""

    prefix = "gated_value_embedding"
    reads = "effective"
    weighs_tokens = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        gate_scale: float = 3.0,
        gate_channels: int | None = None,
        table_layers: str | Sequence[int] = "alternate",
    ) -> None:
        super().__init__(config)
        layers, width = range(config.n_layers), config.d_model
        self.gate_scale = number_option("gate_scale", gate_scale, minimum=0.0)
        channels = min(12, width) if gate_channels is None else gate_channels
        self.gate_channels = integer_option("gate_channels", channels, range(1, width + 1), "d_model")
        alternate = tuple(reversed(layers[::-1][::2]))
        self.table_layers = layers_option(
            "table_layers", alternate if table_layers == "alternate" else table_layers, layers
        )
        tables, gates = (config.d_vocab, config.d_key_value), (config.n_key_value_heads, self.gate_channels)
        self.tables, self.gates = (
            nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n in self.table_layers})
            for shape in (tables, gates)
        )

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        std = self.config.init_std
        for name, tensor in self.named_parameters():
            draw(name, tensor)
            if name.startswith("tables."):
                tensor.mul_(1 / (math.sqrt(self.config.d_model) * std))
            else:  # normal numbers to uniform ones
                tensor.copy_(WIDEST * torch.special.ndtr(tensor / std))

    def prepare(self, tokens: Tensor) -> Memory:
        values = {n: F.embedding(tokens, table) for n, table in self.tables.items()}
        return {("v", f"table.{n}", self.reads): v.unflatten(-1, (-1, self.config.d_head)) for n, v in values.items()}

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (f"table.{layer}",) if tensor == "v" and layer in self.table_layers else ()

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        gate = F.linear(x[..., : self.gate_channels], self.gates[str(layer)]).sigmoid()
        return self.gate_scale * gate, 1.0
