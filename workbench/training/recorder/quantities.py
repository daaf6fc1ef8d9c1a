"""Names and units of the quantities that a recorder can write, and its defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from workbench.errors import UnknownName, WorkbenchError
from workbench.metrics import METRICS, Metric
from workbench.names import ACTIVATIONS

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
    "padding_share": "share of positions", "coefficient": "weight", "seconds_per_step": "s", "recorder_share": "share of the loop's time",
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
        if not active:
            return None
        try:
            return take(*inputs)
        except Exception as error:  # whatever a changed module, a full disk or a lost connection raises
            self.reasons |= dict.fromkeys(active, first_line(error))
            return None


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
        if name not in quantities():
            raise UnknownName("quantity", name, quantities())
    return wanted
