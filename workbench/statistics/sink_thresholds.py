"""Thresholds of attention sinks, shared by metrics, claims and reports."""

from __future__ import annotations

from typing import Literal

SINK_MASS = 0.3  # mean attention to position 0 above which a head is a sink (Gu et al. 2024, arXiv 2410.10781)
FOUND_EXCESS, FOUND_P, FOUND_QUERIES = 0.1, 0.01, 0.25
"""Of a detected sink: least mean attention above uniform, largest p-value a head and document, least share of queries that see it."""
FOUND_MOST, FOUND_LENGTH = 4, 16  # positions of a head that are detected at most; fewest tokens of a document
NO_OP, BROADCAST, ALIKE = 0.2, 0.5, 0.5  # this project's: greatest ratio, least ratio, greatest spread


def sink_kind(mass: float, ratio: float, spread: float) -> Literal["none", "no-op", "broadcast", "mixed"]:
    """Classify a head's sink from the three numbers of `sink_output`; the last three thresholds are this project's own.

    `none` has a mass up to 0.3. `no-op` has a ratio up to 0.2: the sink adds little to the head's output. `broadcast` has a ratio of 0.5 or
    more and a spread up to 0.5: the head writes nearly the same vector at every position. `mixed` is any other sink.
    """
    if not mass > SINK_MASS:
        return "none"
    if ratio <= NO_OP:
        return "no-op"
    return "broadcast" if ratio >= BROADCAST and spread <= ALIKE else "mixed"
