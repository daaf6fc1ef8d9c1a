"""Interleaved timing of variants in one process: medians of process CPU time and ratios to the first variant."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    milliseconds: float  # median process CPU time of one call
    ratio: float  # median over rounds of this variant's time over the first variant's in the same round


def interleave(
    variants: Mapping[str, Callable[[], object]], *, seconds: float = 3.0, rounds: int = 7, sample: float = 5e-3
) -> dict[str, Timing]:
    """Time every variant once per round, for at least `rounds` rounds and `seconds` of CPU time.

    CPU time ignores what other processes take from the machine; ratios within a round cancel slow drift of its clock.
    A variant faster than `sample` seconds is repeated within a round.
    """
    repeats = {}
    for name, run in variants.items():
        run()
        repeats[name] = max(1, round(sample / max(_cpu_seconds(run, 1), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = time.process_time()
    while len(next(iter(times.values()))) < rounds or time.process_time() - start < seconds:
        for name, run in variants.items():
            times[name].append(_cpu_seconds(run, repeats[name]))
    first = next(iter(times.values()))
    return {
        name: Timing(1e3 * statistics.median(mine), statistics.median(a / b for a, b in zip(mine, first, strict=True)))
        for name, mine in times.items()
    }


def _cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats
