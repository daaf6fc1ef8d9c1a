"""What runs say of a claim: a status, one sentence with the numbers that decide, and their table; and how intervals decide.

What the runs at hand cannot say is a verdict too: `not_checkable` names the runs that are missing, `gated` the condition
that is not met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from workbench.statistics.error_bars import LEVEL, MIN_SEEDS, Interval, holm

Status = Literal["supported", "refuted", "unresolved", "gated", "not_checkable"]
STATUSES: dict[Status, str] = {
    "supported": "supported", "refuted": "refuted", "unresolved": "unresolved", "gated": "not tested",
    "not_checkable": "not checkable with these runs",
}  # fmt: skip
NONE: Mapping[Any, Any] = MappingProxyType({})
DECIDED: tuple[Status, ...] = ("supported", "refuted", "unresolved")
"""Of claims that the runs at hand could be put to the test with."""


@dataclass(frozen=True)
class Verdict:
    """What runs say of a claim; `table` holds the numbers behind the sentence, `runs` names those that were compared.

    `scope` limits a status, or names the condition without which nothing is tested. `p` is the probability of a decision as clear by
    chance, NaN where nothing was tested. `alone` is the status before the correction over all claims of a page (`corrected`).
    """

    status: Status
    sentence: str
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    runs: tuple[str, ...] = ()
    setting: str = ""
    scope: str = ""
    p: float = math.nan
    alone: Status | None = None

    @property
    def words(self) -> str:
        """The status as people read it, with its limits."""
        if self.alone not in (None, self.status):
            return (
                f"{STATUSES[self.status]} among all claims here; by itself {STATUSES[self.alone]} {self.scope}".strip()
            )
        if self.status == "gated":
            return f"{STATUSES[self.status]}: {self.scope or 'a condition is not met'}"
        return f"{STATUSES[self.status]} {self.scope}".strip()


class InsufficientEvidence(Exception):
    """Raised inside a verdict function where the evidence cannot decide; it becomes the verdict it carries."""

    def __init__(self, sentence: str, status: Status = "not_checkable", table: pd.DataFrame | None = None) -> None:
        super().__init__(sentence)
        self.verdict = Verdict(status, sentence, pd.DataFrame() if table is None else table)


def decide(
    parts: Mapping[Any, Interval], expected: int | Sequence[int], *, also: Mapping[Any, Interval] = NONE,
    against: Mapping[Any, Interval] = NONE, min_seeds: int = MIN_SEEDS,
) -> tuple[Status, float]:  # fmt: skip
    """What a claim of several comparisons comes to, and how probable a decision as clear as this is by chance (NaN: none tested).

    Supported where every part has its expected sign: an intersection-union test (Berger 1982), for which the least clear part
    counts at its own level. Refuted where any has the other sign: the clearest counts, its p times their number (Bonferroni, the
    first step of Holm 1979). `also` must have its sign too before anything is supported, and refutes nothing; `against` refutes
    with the other sign, and need not have its own. `expected`: one sign for all, or one for each of parts, also and against.

    Where nothing differs from 0, either happens to at most 2.5 % of claims, whatever the number of seeds from `min_seeds` on; fewer
    decide nothing, nor do intervals over documents. `docs/verdicts.md` has the rates of every claim.
    """
    given = [*parts.values(), *also.values(), *against.values()]
    signs = [expected] * len(given) if isinstance(expected, int) else expected
    odds = [_one_sided(i, sign, min_seeds) for i, sign in zip(given, signs, strict=True)]
    needed, able = odds[: len(parts) + len(also)], odds[: len(parts)] + odds[len(parts) + len(also) :]
    tested = [p for p in able if math.isfinite(p)]
    if not tested:
        return "unresolved", math.nan
    support = 2 * max(needed) if needed and all(map(math.isfinite, needed)) else 1.0
    contrary = 2 * len(able) * (1 - max(tested))
    if contrary <= 1 - LEVEL:
        return "refuted", contrary
    return ("supported" if support <= 1 - LEVEL else "unresolved"), min(1.0, support, contrary)


def _one_sided(interval: Interval, sign: int, min_seeds: int) -> float:
    """The p of the test for this sign; NaN where too few seeds or no test are behind the interval."""
    if interval.n < min_seeds or not math.isfinite(interval.p):
        return math.nan
    return interval.p / 2 if interval.value * sign > 0 else 1 - interval.p / 2


def judged(
    parts: Mapping[Any, Interval], expected: int | Sequence[int], sentence: str, unit: str,
    units: Mapping[Any, str] = NONE, *, also: Mapping[Any, Interval] = NONE, against: Mapping[Any, Interval] = NONE,
    shown: Mapping[Any, Interval] = NONE, doubt: object = None, wrong: object = None, min_seeds: int = MIN_SEEDS,
) -> Verdict:  # fmt: skip
    """The verdict of `decide`, with all its intervals and those that are only `shown` as its table, in their `unit` or `units`.

    `doubt`: what leaves open that which would be supported. `wrong`: a fact without chance that refutes it.
    """
    status, p = decide(parts, expected, also=also, against=against, min_seeds=min_seeds)
    if wrong and math.isfinite(p):
        status, p = "refuted", 0.0
    elif doubt and status == "supported":
        status, p = "unresolved", 1.0
    return Verdict(status, sentence, interval_table({**parts, **also, **against, **shown}, unit, units), p=p)


def of_settings(verdicts: Mapping[str, Verdict]) -> Verdict:
    """One verdict of those in all comparable settings, the one with most seeds first: the clearest, paid for by their number.

    Settings that contradict each other leave the claim open, and are told.
    """
    tested = {name: v for name, v in verdicts.items() if math.isfinite(v.p)}
    if len(tested) < 2:
        return next(iter(tested.values()), next(iter(verdicts.values())))
    paid = dict(zip(tested, holm([v.p for v in tested.values()]), strict=True))
    statuses: dict[str, Status] = {n: v.status if paid[n] <= 1 - LEVEL else "unresolved" for n, v in tested.items()}
    chosen = min(
        tested, key=lambda name: (statuses[name] == "unresolved", paid[name] if statuses[name] != "unresolved" else 0)
    )
    contrary = {"supported", "refuted"} <= set(statuses.values())
    told = "; ".join(f"{name}: {STATUSES[status]}" for name, status in statuses.items())
    sentence = (
        f"{tested[chosen].sentence} These are the numbers of {chosen}; of all {len(tested)} comparable settings, corrected for their "
        f"number, {'which contradict each other' if contrary else 'one by one'}: {told}."
    )
    status: Status = "unresolved" if contrary else statuses[chosen]
    scope = tested[chosen].scope if status == tested[chosen].status else ""
    return replace(tested[chosen], status=status, p=1.0 if contrary else paid[chosen], sentence=sentence, scope=scope)


def interval_table(intervals: Mapping[Any, Interval], unit: str = "", others: Mapping[Any, str] = NONE) -> pd.DataFrame:
    """Named intervals as a table; `others`: units of those that have another one."""
    rows = [
        {"comparison": name, "value": i.value, "low": i.low, "high": i.high, "n": i.n, "unit": others.get(name, unit)}
        for name, i in intervals.items()
    ]
    return pd.DataFrame(rows)


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one page: decided are those that Holm's correction over all that were tested leaves so.

    The chance that one or more of them is decided falsely is then at most 5 %, however many claims are on the page.
    """
    tested = [v for v in verdicts if math.isfinite(v.p)]
    together = iter(holm([v.p for v in tested]))
    return [
        replace(v, alone=v.status, status=v.status if next(together) <= 1 - LEVEL else "unresolved")
        if math.isfinite(v.p)
        else v
        for v in verdicts
    ]


def expected_by_chance(verdicts: Sequence[Verdict]) -> str:
    """How many claims were tested, how many false decisions chance alone makes of them one by one, and what the correction leaves."""
    tested = [v for v in verdicts if math.isfinite(v.p)]
    alone, left = (
        sum(s in ("supported", "refuted") for s in found)
        for found in ([v.alone for v in tested], [v.status for v in tested])
    )
    were, are = ("claim was" if len(tested) == 1 else "claims were"), ("is" if alone == 1 else "are")
    return (
        f"{len(tested)} {were} tested. One by one chance alone decides up to 5 % of claims that have nothing to them, half of them "
        f"each way: up to {len(tested) * (1 - LEVEL):.2g} false ones here. {alone} {are} decided one by one, {left} after Holm's "
        f"correction over all {len(tested)}, which is the status that stands first; the chance that any of these is false is 5 % at most."
    )
