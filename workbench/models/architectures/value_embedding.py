"""Value embeddings: tables of values by token id are mixed into the first and the last layers' values.

V_n = lambda_n1 V_n^own + lambda_n2 E_k[token]: table k at layer k and at layer L - K + k, K = `value_tables`; the other
layers V_n = lambda_n1 V_n^own.

Source: modded-nanogpt (Jordan et al. 2024), three tables, coefficients learned from (0.5, 0.5); with fewer than six layers
half as many tables as layers.
Seam: values; a table is a source that no layer computes. `own` [L] and `table` [2 K] are the coefficients.
Parameters: K d_vocab D + L + 2 K.
Cache: 2 L T D, the mixed values.
Degenerate case: table weights 0 and own weights 1 are the vanilla decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight, number


class ValueEmbedding(Shortcut):
    """Learned values by token id beside the projected ones."""

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
        self.value_tables = min(3, limit) if value_tables is None else value_tables
        if isinstance(self.value_tables, bool) or self.value_tables not in range(1, limit + 1):
            nearest = min(range(1, limit + 1), key=lambda n: abs(n - self.value_tables))
            choices = f"1..{limit} for {layers} layers"
            raise WorkbenchError(f"value_tables={value_tables}: must be {choices}; nearest {nearest}")
        self.lambda_table, self.lambda_own = number("lambda_table", lambda_table), number("lambda_own", lambda_own)
        self.decays = self.decay_lambda = bool(decay_lambda)
        shape = config.d_vocab, config.d_key_value
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(self.value_tables))
        self.layers = sorted({k for n in range(self.value_tables) for k in (n, layers - self.value_tables + n)})
        self.own = nn.Parameter(torch.full((config.n_layers,), self.lambda_own))
        self.table = nn.Parameter(torch.full((len(self.layers),), self.lambda_table))

    def table_of(self, layer: int) -> int | None:
        """Which table a layer reads."""
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
