"""Numbers of one logging step, which stay on their devices until one transfer makes them rows."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UnknownName, WorkbenchError
from workbench.observing.interception.weights import is_sharded
from workbench.runs.records import COLUMNS, TEXT, WHOLE
from workbench.training.recorder.quantities import UNITS

NOTED = tuple(name for name in COLUMNS if name not in ("run", "architecture", "seed", "step", "metric", "value"))
"""Axes of numbers from the loop."""
_KINDS = {str: "text", int: "a whole number", float: "a number"}


class StepRecord:
    """Numbers of one logging step on their devices."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}  # matrices before the update, and their norms
        self.host_rows: list[dict[str, Any]] = []
        self.pending: dict[torch.device, list[tuple[dict[str, Any], Tensor]]] = {}

    def add(self, axes: dict[str, Any], value: Any) -> None:
        """Add a number, or a tensor of one element or of one per head (or per entry of the axis `along`)."""
        row = {"step": self.step, "unit": UNITS.get(axes["metric"]), **axes}
        if isinstance(value, Tensor):
            self.pending.setdefault(value.device, []).append((row, value.detach()))
        else:
            self.host_rows.append(row | {"value": float(value)})

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, with one transfer from each device."""
        return self.host_rows + [row for pending in self.pending.values() for row in _fetched(pending)]


def _fetched(pending: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield one row per entry of tensors on one device, by head or the axis `along`, after one transfer."""
    flat = iter(torch.cat([value.reshape(-1).float() for _, value in pending]).tolist())
    for row, value in pending:
        along, row = row.get("along", "head"), {k: v for k, v in row.items() if k != "along"}
        if value.ndim:
            yield from (row | {along: i, "value": next(flat)} for i in range(value.numel()))
        else:
            yield row | {"value": next(flat)}


def frobenius_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return Frobenius norms in float32 or better, with one kernel launch per type.

    Tensors sharded over processes (FSDP2, tensor parallel) get the norm of the complete tensor, with one reduction per layout.
    """
    given: list[Any] = list(tensors)
    by_type: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for i, t in enumerate(given):
        dense = t.to_local() if is_sharded(t) else t.coalesce().values() if t.is_sparse else t
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        by_type.setdefault(torch.promote_types(dense.dtype, torch.float32), []).append((i, dense))
    norms = list(given)
    for dtype, some in by_type.items():
        for (i, _), norm in zip(some, torch._foreach_norm([dense for _, dense in some], 2, dtype), strict=True):
            norms[i] = norm
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


def one_number(value: Any) -> float | Tensor:
    """Return a real number, or a copy of a tensor of one element; raise `WorkbenchError` for anything else."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1 or value.is_complex():
        raise WorkbenchError(f"a tensor {list(value.shape)} of {value.dtype}, not one real number: give its mean")
    local: Any = value.detach()
    if is_sharded(value):
        if not all(placement.is_replicate() for placement in local.placements):
            raise WorkbenchError("a tensor spread over processes, not one number: give loss.full_tensor()")
        local = local.to_local()
    return local.reshape(()).clone()  # the next compiled step overwrites its static buffers


def noted_row(step: int, metric: str, value: Any, axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a number from the loop; raises `WorkbenchError` for unknown axes and wrong types."""
    row = {"step": step, "metric": metric, **axes}
    for name, entry in row.items():
        if name in axes and name not in NOTED:
            raise UnknownName("axis", name, NOTED)
        kind: Any = str if name in TEXT else int if name in WHOLE else float
        of_kind = (
            isinstance(entry, str)
            if kind is str
            else isinstance(entry, numbers.Integral if kind is int else numbers.Real)
        )
        if entry is not None and (not of_kind or isinstance(entry, bool) or (kind is int and abs(entry) >= 2**63)):
            raise WorkbenchError(f"{name}={entry!r} is a {type(entry).__name__}: give {_KINDS[kind]}")
    if step is None or step < 0 or not metric:
        raise WorkbenchError(f"step={step!r}, metric={metric!r}: give a step of at least 0 and a name")
    return row | {"value": float(one_number(value))}
