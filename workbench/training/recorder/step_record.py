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
        """A number, or a tensor: of one element, or of one for each head (or what `along` names)."""
        row = {"step": self.step, "unit": UNITS.get(axes["metric"]), **axes}
        if isinstance(value, Tensor):
            self.pending.setdefault(value.device, []).append((row, value.detach()))
        else:
            self.host_rows.append(row | {"value": float(value)})

    def rows(self) -> list[dict[str, Any]]:
        """Every row; one transfer from each device."""
        return self.host_rows + [row for pending in self.pending.values() for row in fetched(pending)]


def fetched(pending: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[dict[str, Any]]:
    """Rows of tensors on one device, fetched at once; one row per entry of a tensor with several, by head or what `along` names."""
    flat = iter(torch.cat([value.reshape(-1).float() for _, value in pending]).tolist())
    for row, value in pending:
        along, row = row.get("along", "head"), {k: v for k, v in row.items() if k != "along"}
        if value.ndim:
            yield from (row | {along: i, "value": next(flat)} for i in range(value.numel()))
        else:
            yield row | {"value": next(flat)}


def frobenius_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Frobenius norms in one launch, float32 or better; of a sparse gradient, those of its entries.

    Of tensors that are spread over processes (FSDP2, tensor parallel) those of the whole, in one exchange for each way of spreading.
    """
    given: list[Any] = list(tensors)
    dense = [t.to_local() if is_sharded(t) else t.coalesce().values() if t.is_sparse else t for t in given]
    if not dense:
        return []
    norms = list(torch._foreach_norm(dense, 2, torch.promote_types(dense[0].dtype, torch.float32)))
    spread: dict[Any, list[int]] = {}
    for i, t in enumerate(given):
        if is_sharded(t):
            dims = tuple(dim for dim, placement in enumerate(t.placements) if placement.is_shard())
            spread.setdefault((t.device_mesh, dims), []).append(i)
    for (mesh, dims), which in spread.items():
        squares = torch.stack([norms[i] for i in which]).square()
        for dim in dims:
            torch.distributed.all_reduce(squares, group=mesh.get_group(dim))
        for i, square in zip(which, squares.unbind(), strict=True):
            norms[i] = square.sqrt()
    return norms


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is one process's shard of a tensor: a DTensor, without loading torch.distributed."""
    return hasattr(tensor, "placements")
