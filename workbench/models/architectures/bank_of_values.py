"""Bank of Values: the last layers look up their values by token id; queries and keys stay contextual.

V_n = gamma_n E_n[token] for the layers of the bank, which have no value projection; gamma_n is a trained gain, one number per layer.

Options: `bank_layers`, the layers of the bank. `bank` = first: V_n = gamma_n V_1, the first layer's values instead of the table.
`bank_gain` = False: gamma = 1.

Source: Bank of Values (2026), arXiv 2606.02780, as reported by others: a free table in the last third of the layers, gamma starting at
1 without bounds, and gamma V_1 as a comparison. Unconfirmed: whether gamma is one number. Its V + V_1 is ResFormer with (1, 1) in
the `last_third`, its V_1 alone is SVFormer there. Values projected from the embedding are not implemented.
Seam: `shared_source` (a table or the first layer), with `weights` for the source alone; `tables.<layer>` [d_vocab, D], `gains` [layers].
Parameters: (d_vocab - d) D + 1 for each layer of the bank: a table and a gain, no W_V. With `first` 1 - d D.
Cache: 2 L T D; looked-up and gained values are cached like any others. With `first` and no gain (L + k) T D, k layers outside the bank.
Degenerate case: bank_layers = [] is the vanilla decoder; a table that holds a vanilla first layer's values is that layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import choice_option, layers_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class BankOfValues(Shortcut):
    """Values from a table, or from the first layer, in the layers of the bank."""

    prefix = "bank_of_values"
    reads = "effective"

    def __init__(
        self,
        config: ModelConfig,
        *,
        bank_layers: Sequence[int] | str = "last_third",
        bank: str = "table",
        bank_gain: bool = True,
    ) -> None:
        super().__init__(config)
        self.bank, self.bank_gain = choice_option("bank", bank, ("table", "first")), bool(bank_gain)
        self.bank_layers = layers_option("bank_layers", bank_layers, range(int(bank == "first"), config.n_layers))
        shape, looked_up = (config.d_vocab, config.d_key_value), self.bank_layers if bank == "table" else ()
        self.tables = nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n in looked_up})
        if self.bank_gain and self.bank_layers:
            self.gains = nn.Parameter(torch.ones(len(self.bank_layers)))

    def prepare(self, tokens: Tensor) -> Memory:
        values = {n: nn.functional.embedding(tokens, table) for n, table in self.tables.items()}
        memory: Memory = {"bank_gains": self.gains.unbind()} if self.bank_gain and self.bank_layers else {}
        for n, v in values.items():
            memory["v", f"bank.{n}", self.reads] = v.unflatten(-1, (-1, self.config.d_head))
        return memory

    def shared_source(self, projection: Projection, layer: int) -> Source:
        if projection != "v" or layer not in self.bank_layers:
            return layer
        return 0 if self.bank == "first" else f"bank.{layer}"

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        if tensor != "v" or layer not in self.bank_layers or not self.bank_gain:
            return ()
        return (self.shared_source("v", layer),)

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return (memory["bank_gains"][self.bank_layers.index(layer)],)

    def coefficients(self) -> dict[str, list[float]]:
        if not (self.bank_gain and self.bank_layers):
            return {}
        gains = dict(zip(self.bank_layers, self.gains.tolist(), strict=True))
        return {"bank_gain": [gains.get(n, math.nan) for n in range(self.config.n_layers)]}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        return [{"bank_gain": "gains" in shapes, "bank": "table" if any("tables" in n for n in shapes) else "first"}]
