"""Checks of a run's curves: losses in nats per token, and steps that count optimiser steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from workbench.checkpoints.training_logs.quantity_names import PERPLEXITY, UNITS
from workbench.errors import BadData

HIGHEST = 15.0  # nats, the loss of a uniform guess among 3.3 million tokens
TOKENS = 1 << 13  # least number of tokens in a batch, and in a logging interval of tokens
Curve = tuple[np.ndarray, np.ndarray]


def drop_other_units(curves: dict[str, Curve], skipped: Counter[str]) -> None:
    """Drop losses that are sums or in bits, by their size and by the perplexity beside them, and drop the perplexities."""
    for name in [name for name in curves if UNITS.get(name) == "nats"]:
        steps, values = curves[name]
        known = values[np.isfinite(values)]
        if len(known) and np.median(known) > HIGHEST:
            skipped[f"{name} is above {HIGHEST:g} nats at most steps, so it is a sum or has another unit"] += len(steps)
            del curves[name]
        elif perplexity := curves.get(PERPLEXITY.get(name, "")):
            _, left, right = np.intersect1d(steps, perplexity[0], return_indices=True)
            losses, perplexities = values[left], perplexity[1][right]
            sound = np.isfinite(losses) & (losses > 0.1) & np.isfinite(perplexities) & (perplexities > 1)
            if sound.any() and abs(np.median(np.log(perplexities[sound]) / losses[sound]) - np.log(2)) < 0.01:
                why = "is in bits, because 2 to its power is the perplexity beside it; multiply it by 0.69315"
                skipped[f"{name} {why}"] += len(steps)
                del curves[name]
    for name in PERPLEXITY.values():
        curves.pop(name, None)


def of_micro_batches(curves: Mapping[str, Curve]) -> str:
    """Return a note on a training loss that is a multiple or a fraction of the validation loss; empty for other losses."""
    if not curves.keys() >= {"train_loss", "validation_loss"}:
        return ""
    (at, own), (steps, values) = curves["train_loss"], curves["validation_loss"]
    ratios = own[np.searchsorted(at, steps).clip(max=len(at) - 1)] / np.where(values > 0, values, np.nan)
    times = float(np.median(ratios)) if np.isfinite(ratios).all() else 0.0
    multiple = max(times, 1 / times) if times > 0 else 1.0
    if multiple < 1.9 or abs(multiple - round(multiple)) > 0.1:
        return ""
    what = "divide it if it is summed over" if times > 1 else "multiply it if it is a share of each of several"
    return f"train_loss is about {times:.3g} times validation_loss; {what} micro-batches"


def drop_other_counters(
    tables: dict[str, Sequence[np.ndarray]], times: Mapping[str, np.ndarray], skipped: Counter[str]
) -> None:
    """Drop quantities with other steps than the most frequent quantity has at the same time.

    They count epochs, samples or tokens, or were logged without a step, which trackers store as step 0.

    Args:
        tables: Order, steps and values of each quantity.
        times: Time of each value by quantity.
        skipped: Reasons and how many numbers each one left out.
    """
    reference = max(tables, key=lambda name: (len(tables[name][1]), -int(tables[name][1][-1])))
    order = np.argsort(times[reference], kind="stable")
    clock, usual = times[reference][order], tables[reference][1][order]
    gaps = np.abs(np.diff(usual))
    slack = 2 * float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0
    for name in [name for name in tables if name != reference]:
        steps, last = tables[name][1], len(clock) - 1
        before, after = np.searchsorted(clock, times[name], "left"), np.searchsorted(clock, times[name], "right")
        near = usual[np.maximum(before - 1, 0)], usual[np.minimum(after, last)]
        least, most = np.minimum(*near), np.maximum(*near)
        between = (before > 0) & (after <= last)
        wrong = between & ((2 * steps + slack < least) | (steps > 2 * most + slack))
        unset = not steps.any() and before.min() > 0 and least.min() > slack
        if unset or 2 * wrong.sum() > between.sum():
            at = 0 if unset else int(np.flatnonzero(wrong)[0])
            other = f"{reference} has step {least[at]:,}; give both the same counter"
            skipped[f"{name} has step {steps[at]:,} when {other}"] += len(steps)
            del tables[name]


def refuse_tokens(path: Path, steps: np.ndarray) -> None:
    """Raise `BadData` if all steps, each once, are multiples of a number that only batches of tokens have."""
    unit = int(np.gcd.reduce(steps)) if (steps > 0).sum() > 2 else 0
    if unit >= TOKENS and unit % 1024 == 0:
        raise BadData(
            f"{path}: all steps are multiples of {unit:,}, so they may count tokens; divide them by the tokens of a step"
        )
