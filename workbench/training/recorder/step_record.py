"""The numbers of one logging step on their devices, and how they become rows with one transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.training.recorder.quantities import UNITS


class StepRecord:
    """Numbers of one logging step, still on their devices."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}  # matrices before the update, and their norms
        self.host_rows: list[dict[str, Any]] = []
        self.pending: dict[torch.device, list[tuple[dict[str, Any], Tensor]]] = {}

    def add(self, axes: dict[str, Any], value: Any) -> None:
        """A number, or a tensor: of one element, or of one for each head."""
        row = {"step": self.step, "unit": UNITS.get(axes["metric"]), **axes}
        if isinstance(value, Tensor):
            self.pending.setdefault(value.device, []).append((row, value.detach()))
        else:
            self.host_rows.append(row | {"value": float(value)})

    def rows(self) -> list[dict[str, Any]]:
        """Every row; one transfer from each device."""
        return self.host_rows + [row for pending in self.pending.values() for row in fetched(pending)]


def fetched(pending: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[dict[str, Any]]:
    """Rows of tensors on one device, fetched at once; one row per head of a tensor with several entries."""
    flat = iter(torch.cat([value.reshape(-1).float() for _, value in pending]).tolist())
    for row, value in pending:
        if value.ndim:
            yield from (row | {"head": head, "value": next(flat)} for head in range(value.numel()))
        else:
            yield row | {"value": next(flat)}


def frobenius_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Frobenius norms in one launch, float32 or better; of a sparse gradient, those of its entries."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    return list(torch._foreach_norm(dense, 2, torch.promote_types(dense[0].dtype, torch.float32))) if dense else []
