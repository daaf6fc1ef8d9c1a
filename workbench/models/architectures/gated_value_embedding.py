"""Gated value embeddings: a table of values by token id in every second layer, in an amount that each token and head decides.

V_n = V_n^own + s sigmoid(X_n[:c] W_n) E_n[token], X_n the normalised input of the attention, of which the gate reads the first c =
`gate_channels` channels; s = `gate_scale`; by default the layers n with n = L mod 2, the last one among them.

Source: nanochat (Karpathy, gpt.py of 2026-07-03): s = 3, c = 12, a table for each such layer with entries of standard deviation
1 / sqrt(d) (uniform there, normal here), W from U(0, 0.02). The norm before it has no gain there.
Seam: values, with weights of each token: `attn.hook_v_weights` [batch, pos, kv_head, source], own last; a table is a source that no
layer computes. `tables.<layer>` [d_vocab, D] and `gates.<layer>` [kv_head, c].
Parameters: d_vocab D + G c for each such layer, G key-value heads.
Cache: 2 L T D, the mixed values.
Degenerate case: gate_scale = 0 is the vanilla decoder; W = 0 adds s / 2 of the table, as value embeddings with (s / 2, 1) do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight, chosen_layers, number

WIDEST = 0.02  # weight of a gate at the start


class GatedValueEmbedding(Shortcut):
    """Learned values by token id beside the projected ones, gated by the input."""

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
        self.gate_scale = number("gate_scale", gate_scale, minimum=0.0)
        self.gate_channels = min(12, width) if gate_channels is None else gate_channels
        if isinstance(gate_channels, bool) or self.gate_channels not in range(1, width + 1):
            nearest = min(max(1, self.gate_channels), width)
            raise WorkbenchError(f"gate_channels={gate_channels!r}: must be 1..{width} (d_model); nearest {nearest}")
        alternate = tuple(reversed(layers[::-1][::2]))
        self.table_layers = chosen_layers(
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
