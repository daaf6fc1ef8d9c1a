"""Quantities that a recorder can write, and the numbers of one logging step."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UnknownName, WorkbenchError, refuse_unknown
from workbench.hook_names import ACTIVATIONS
from workbench.metrics import METRICS, Metric
from workbench.observing.interception.sharded_weights import is_sharded
from workbench.runs.records import COLUMNS, TEXT, WHOLE

OWN = {
    "gradient_norm": "Frobenius norm of each matrix's gradient, and of all gradients together",
    "update_ratio": "norm of a matrix's change in this step over the matrix's norm",
    "weight_norm": "Frobenius norm of each matrix",
    "coefficient": "numbers that a shortcut learns or uses",
    "activation_gradient_norm": "Frobenius norm of the loss's gradient with respect to streams and values, whole batch",
    "gradient_by_position": "norm of the gradient at what attention reads at each of the first 32 positions, summed over the batch",
    "gradient_sink": "gradient at what attention reads at the first position over that of the 31 behind it, summed over the batch",
}
"""Quantities that are not metrics of one activation."""

DEFAULT = (
    "gradient_norm", "update_ratio", "coefficient", "activation_gradient_norm", "hidden_norm", "value_norm",
    "importance_entropy", "row_entropy", "sink_mass",
)  # fmt: skip
"""These cost less than 1 % of the training time; `docs/recorder.md` has the numbers."""

UNITS = {
    "train_loss": "nats", "gradient_norm": "loss per weight", "activation_gradient_norm": "loss per activation",
    "gradient_by_position": "loss per activation", "gradient_sink": "ratio", "update_ratio": "ratio", "weight_norm": "norm",
    "padding_share": "share of positions", "seconds_per_step": "s", "recorder_share": "share of the loop's time",
}  # fmt: skip


class NotRecorded(UserWarning):
    """A quantity, matrix, record or step that is not recorded; the message says why."""


class Stopped:
    """Quantities that are no longer recorded, with reasons: a failed quantity must not end the training."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def attempt(self, names: Iterable[str], take: Callable[..., Any], *inputs: Any) -> Any:
        """Return `take(*inputs)`, or None after an error, which stops the named quantities, and None if all are stopped."""
        active = [name for name in names if name not in self.reasons]
        if active:
            with self.guard(*active):
                return take(*inputs)
        return None

    @contextmanager
    def guard(self, *names: str) -> Iterator[None]:
        """Stop the named quantities if the block raises."""
        try:
            yield
        except Exception as error:  # whatever a changed module, a full disk or a lost connection raises
            self.reasons |= dict.fromkeys((name for name in names if name not in self.reasons), first_line(error))


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message; our own errors have no type."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {line}"


def readable(metric: Metric) -> bool:
    """Return whether a metric reads one activation, so that a hook can compute it."""
    one = len(metric.arguments) == 1 and (metric.arguments[0] == "vectors" or metric.arguments[0] in ACTIVATIONS)
    return metric.form == "per_sequence" and one


def aliases_of(metric: Metric) -> tuple[str, ...]:
    """Return the activations at which a metric is computed."""
    return metric.sites or metric.arguments


def quantities() -> dict[str, str]:
    """Return every quantity and its meaning: the recorder's own, and each metric of one activation."""
    return OWN | {name: m.summary for name, m in METRICS.items() if readable(m) and name not in OWN}


def known_quantities(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetition; raises `UnknownName` with the nearest names."""
    wanted = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    if not wanted:
        raise WorkbenchError(f"no quantities: choose from {', '.join(quantities())}")
    for name in wanted:
        refuse_unknown("quantity", name, quantities())
    return wanted


NOTED = tuple(name for name in COLUMNS if name not in ("run", "architecture", "seed", "step", "metric", "value"))
"""Axes of numbers from the loop."""
_TEXT, _WHOLE, _NUMBER = (str, "text"), (numbers.Integral, "a whole number"), (numbers.Real, "a number")


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
        rows = list(self.host_rows)
        for pending in self.pending.values():
            flat = iter(torch.cat([value.reshape(-1).float() for _, value in pending]).tolist())
            for row, value in pending:  # one for each entry, by head or the axis `along`
                axes, along = {k: v for k, v in row.items() if k != "along"}, row.get("along", "head")
                entries = [{along: i} for i in range(value.numel())] if value.ndim else [{}]
                rows += [axes | entry | {"value": next(flat)} for entry in entries]
        return rows


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
        kind, words = _TEXT if name in TEXT else _WHOLE if name in WHOLE else _NUMBER
        too_large = name in WHOLE and isinstance(entry, numbers.Integral) and abs(int(entry)) >= 2**63
        if entry is not None and (not isinstance(entry, kind) or isinstance(entry, bool) or too_large):
            raise WorkbenchError(f"{name}={entry!r} is a {type(entry).__name__}: give {words}")
        if isinstance(entry, str) and entry.encode(errors="replace").decode() != entry:
            raise WorkbenchError(f"{name}={entry!r} holds half a character, which no file can hold: leave it out")
    if step is None or step < 0 or not metric:
        raise WorkbenchError(f"step={step!r}, metric={metric!r}: give a step of at least 0 and a name")
    return row | {"value": float(one_number(value))}
