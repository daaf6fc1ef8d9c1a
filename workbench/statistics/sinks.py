"""When a head is an attention sink, and what its sink does: the thresholds that metrics, claims and reports share."""

from __future__ import annotations

from typing import Literal

SINK_MASS = 0.3  # mean attention to position 0 above which a head is a sink (Gu et al. 2024, arXiv 2410.10781)
NO_OP, BROADCAST, ALIKE = 0.2, 0.5, 0.5  # this project's: greatest ratio, least ratio, greatest spread


def sink_kind(mass: float, ratio: float, spread: float) -> Literal["none", "no-op", "broadcast", "mixed"]:
    """What a head's sink does, from the three numbers of `sink_output`; the last three thresholds are this project's own.

    `none`: mass up to 0.3, no sink. `no-op`: ratio up to 0.2, the sink writes little of what the head writes, so attention
    rests there. `broadcast`: ratio from 0.5 on and spread up to 0.5, the head writes mostly one vector, to every position.
    `mixed`: a sink between the two.
    """
    if not mass > SINK_MASS:
        return "none"
    if ratio <= NO_OP:
        return "no-op"
    return "broadcast" if ratio >= BROADCAST and spread <= ALIKE else "mixed"
