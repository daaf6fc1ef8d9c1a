"""Bank of Values: the last layers look their values up by token id; queries and keys stay contextual.

V_n = E_n[token] for the layers of the bank, which have no value projection.

Source: Bank of Values (2026), arXiv 2606.02780, as reported by others: a free table in the last third of the layers.
Seam: `shared_source`, of a table.
Parameters: (d_vocab - d) D for each layer of the bank: a table [d_vocab, D], and no W_V.
Cache: 2 L T D; looked-up values are held like any others.
Degenerate case: bank_layers = [] is the vanilla decoder; a table that holds a vanilla first layer's values is that layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, chosen_layers


class BankOfValues(Shortcut):
    """Values from a table in some layers."""

    prefix = "bank_of_values"

    def __init__(self, config: ModelConfig, *, bank_layers: Sequence[int] | str | None = None) -> None:
        super().__init__(config)
        last_third = range(config.n_layers - max(1, config.n_layers // 3), config.n_layers)
        chosen = tuple(last_third) if bank_layers is None else bank_layers
        self.bank_layers = chosen_layers("bank_layers", chosen, range(config.n_layers))
        shape = config.d_vocab, config.d_key_value
        self.tables = nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n in self.bank_layers})

    def prepare(self, tokens: Tensor) -> Memory:
        values = {n: nn.functional.embedding(tokens, table) for n, table in self.tables.items()}
        return {("v", f"bank.{n}", "effective"): v.unflatten(-1, (-1, self.config.d_head)) for n, v in values.items()}

    def shared_source(self, projection: Projection, layer: int) -> Source:
        return f"bank.{layer}" if projection == "v" and layer in self.bank_layers else layer
