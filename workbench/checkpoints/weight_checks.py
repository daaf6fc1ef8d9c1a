"""Checks of weights: tensors that do not fit a model, prefixes of their names, and values that are too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from workbench.errors import BadCheckpoint, suggest

IMMENSE = 1e18  # a square of it, summed over a few hundred, is about the largest float32


def refuse_immense(weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Raise `BadCheckpoint` for a weight beyond `IMMENSE`, which is finite but makes logits infinite."""
    for name, weight in weights:
        if weight.numel() and weight.is_floating_point():
            wide = weight.detach() if weight.element_size() > 1 else weight.detach().float()
            largest = max(abs(float(end)) for end in wide.aminmax())
            if largest > IMMENSE:
                raise BadCheckpoint(
                    f"{path}: {name} holds {largest:.3g}, of which logits become NaN or infinite: the training diverged or the file is "
                    "damaged; choose an earlier step"
                )


def misfits(shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> str:
    """Return missing, unexpected and misshapen tensors, a line each and at most five of a kind; empty if all fit."""
    missing, unexpected = sorted(wanted.keys() - shapes), sorted(shapes.keys() - wanted)
    misshapen = [n for n in wanted if n in shapes and list(wanted[n]) != list(shapes[n])]
    lines = [f"missing {n}; {suggest(n, unexpected)}" for n in missing[:5]]
    lines += [f"unexpected {n} {list(shapes[n])}" for n in unexpected[:5]]
    lines += [f"{n} is {list(shapes[n])}, wanted {list(wanted[n])}" for n in misshapen[:5]]
    more = len(missing) + len(unexpected) + len(misshapen) - len(lines)
    return "\n  ".join([*lines, f"and {more} more"] if more else lines)


def prefix_advice(names: Iterable[str], wanted: Iterable[str]) -> str:
    """Return how to open tensors that have the wanted names below a prefix; empty if less than half of them have."""
    wanted, prefixes = set(wanted), Counter[str]()
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[i:]) in wanted:
                prefixes[f"{'.'.join(parts[:i])}."] += 1
    prefix, count = max(prefixes.items(), key=lambda item: item[1], default=("", 0))
    if 2 * count <= len(wanted):
        return ""
    return f"{count} of {len(wanted)} are there under {prefix!r}: give strip_prefix={prefix!r} (workbench import --strip-prefix {prefix})"
