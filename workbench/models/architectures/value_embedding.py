"""Value embeddings: the first and the last layers mix their values with values looked up by token id.

V_n = lambda_n1 V_n^own + lambda_n2 E_k[token], with table k in layer k and in layer L - K + k, K = `value_tables`. The other
layers have V_n = lambda_n1 V_n^own.

Source: modded-nanogpt (Jordan et al. 2024): three tables, trained coefficients that start at (0.5, 0.5). Models of fewer than six layers
have half as many tables as layers.
Seam: `weights` of the values, with a table as source; `own` [L] and `table` [2 K] are the coefficients.
Parameters: K d_vocab D + L + 2 K.
Cache: 2 L T D, the mixed values.
Degenerate case: table coefficients 0 and own coefficients 1 are the vanilla decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.options import integer_option, number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class ValueEmbedding(Shortcut):
    """A weighted sum of projected values and values by token id."""

    prefix = "value_embedding"
    reads = "effective"

    def __init__(
        self,
        config: ModelConfig,
        *,
        value_tables: int | None = None,
        lambda_table: float = 0.5,
        lambda_own: float = 0.5,
        decay_lambda: bool = False,
    ) -> None:
        super().__init__(config)
        layers, limit = config.n_layers, max(1, config.n_layers // 2)
        tables = min(3, limit) if value_tables is None else value_tables
        self.value_tables = integer_option("value_tables", tables, range(1, limit + 1), f"for {layers} layers")
        self.lambda_table = number_option("lambda_table", lambda_table)
        self.lambda_own = number_option("lambda_own", lambda_own)
        self.decays = self.decay_lambda = bool(decay_lambda)
        shape = config.d_vocab, config.d_key_value
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(self.value_tables))
        self.layers = sorted({k for n in range(self.value_tables) for k in (n, layers - self.value_tables + n)})
        self.own = nn.Parameter(torch.full((config.n_layers,), self.lambda_own))
        self.table = nn.Parameter(torch.full((len(self.layers),), self.lambda_table))

    def table_of(self, layer: int) -> int | None:
        """Return the table that a layer reads, None for a layer without one."""
        if layer not in self.layers:
            return None
        return layer if layer < self.value_tables else layer - self.config.n_layers + self.value_tables

    def prepare(self, tokens: Tensor) -> Memory:
        memory: Memory = {"value_embedding": (self.own.unbind(), self.table.unbind())}
        for k, table in enumerate(self.tables):
            rows = nn.functional.embedding(tokens, table)
            memory["v", f"table.{k}", self.reads] = rows.unflatten(-1, (-1, self.config.d_head))
        return memory

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (f"table.{k}",) if tensor == "v" and (k := self.table_of(layer)) is not None else ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        return projection == "v"

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        own, table = memory["value_embedding"]
        return (table[self.layers.index(layer)], own[layer]) if layer in self.layers else (own[layer],)

    def coefficients(self) -> dict[str, list[float]]:
        table = [math.nan] * self.config.n_layers
        for layer, value in zip(self.layers, self.table.tolist(), strict=True):
            table[layer] = value
        return {"lambda_table": table, "lambda_own": self.own.tolist()}
