"""Checks of an architecture's options: each returns the value, or raises an error with the allowed and the nearest values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch

from workbench.errors import UnknownName, WorkbenchError, refuse_unknown

UNBOUNDED = 2**63
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def number_option(name: str, value: object, *, minimum: float = -math.inf) -> float:
    """Return a finite number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise WorkbenchError(f"{name}={value!r}: must be a finite number, as 0.5")
    if value < minimum:
        raise WorkbenchError(f"{name}={value!r}: must be {minimum:g} or more; nearest {minimum:g}")
    return float(value)


def integer_option(name: str, value: object, allowed: Sequence[int], unit: str = "") -> int:
    """Return an integer of a range or list of `allowed` ones; the error names their `unit`."""
    if isinstance(value, int) and not isinstance(value, bool) and value in allowed:
        return value
    first, last, is_range = allowed[0], allowed[-1], isinstance(allowed, range)
    span = f"{first}..{last}" if last < UNBOUNDED - 1 else f"{first} or more"
    choices = span if is_range else f"one of {list(allowed)}"
    nearest = ""
    if isinstance(value, Real) and math.isfinite(number := float(value)):
        near = min(max(int(number), first), last) if is_range else min(allowed, key=lambda n: abs(n - number))
        nearest = f"; nearest {near}"
    raise WorkbenchError(f"{name}={value!r}: must be {choices}{unit and f' ({unit})'}{nearest}")


def dtype_option(dtype: object) -> torch.dtype | None:
    """Return a type of weights by its name in torch, or itself; None stays None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if (known := getattr(torch, name, None)) not in DTYPES:
        raise UnknownName("dtype", name, [str(each).removeprefix("torch.") for each in DTYPES])
    return known


def choice_option(name: str, value: str, choices: Sequence[str]) -> str:
    """Return a choice by its name; raise `UnknownName` for any other."""
    refuse_unknown(name, value, choices)
    return value


def layers_option(name: str, layers: str | Sequence[int], allowed: range) -> tuple[int, ...]:
    """Return the layers of an option: `all`, the `late` last three eighths of the model, its `last_third`, or a list."""
    if layers == "all":
        return tuple(allowed)
    if layers in ("late", "last_third"):
        share = round(3 * allowed.stop / 8) if layers == "late" else allowed.stop // 3
        return tuple(allowed)[-max(1, share) :]
    listed = () if isinstance(layers, str) else tuple(layers)
    if isinstance(layers, str) or any(isinstance(n, bool) or n not in allowed for n in listed):
        choices = f"{allowed.start}..{allowed.stop - 1}" if allowed else "none in this model"
        integers = [n for n in listed if isinstance(n, int) and not isinstance(n, bool)]
        near = sorted({min(max(n, allowed.start), allowed.stop - 1) for n in integers}) if allowed else []
        raise WorkbenchError(
            f"{name}={layers!r}: choose 'all', 'late', 'last_third' or a list from the layers {choices}"
            + (f"; nearest {near}" if near else "")
        )
    return tuple(sorted(set(listed)))
