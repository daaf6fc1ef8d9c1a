"""The verdict on a claim, how its comparisons decide it, and the correction over all verdicts that are shown together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from workbench.statistics.intervals import MIN_SEEDS, Interval, percent, significance
from workbench.statistics.multiple_testing import holm, holm_factors

Status = Literal["supported", "refuted", "unresolved", "gated", "not_checkable"]
STATUSES: dict[Status, str] = {
    "supported": "supported", "refuted": "refuted", "unresolved": "unresolved", "gated": "not tested",
    "not_checkable": "not checkable with these runs",
}  # fmt: skip
NONE: Mapping[Any, Any] = MappingProxyType({})
DECIDED: tuple[Status, ...] = ("supported", "refuted", "unresolved")  # statuses of claims that were tested
ROLES = ("decides", "must hold too", "can refute", "context")  # of a comparison in a verdict's table


@dataclass(frozen=True)
class Verdict:
    """The status of a claim, the sentence that explains it, and the numbers behind it.

    `setting` is what the compared runs have in common, `scope` the limits of the status or the unmet condition of a `gated` claim. `p` is
    the probability of a decision as clear by chance (NaN if nothing was tested), `alone` the status before the correction over a page,
    `factor` the number by which the corrections have multiplied the p-value.
    """

    status: Status
    sentence: str
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    runs: tuple[str, ...] = ()
    setting: str = ""
    scope: str = ""
    p: float = math.nan
    alone: Status | None = None
    factor: float = 1.0

    @property
    def words(self) -> str:
        """The status in words, with its limits."""
        status = STATUSES[self.status]
        if self.alone not in (None, self.status):
            return f"{status} among all claims here; by itself {STATUSES[self.alone]} {self.scope}".strip()
        if self.status == "gated":
            return f"{status}: {self.scope or 'a condition is not met'}"
        return f"{status} {self.scope}".strip()

    def adjusted(self) -> pd.DataFrame:
        """Return the table with intervals as wide as the corrections demand, and whether each row excludes 0.

        Bounds are NaN where an interval is not over seeds; such rows decide nothing. `significant` is then False.
        """
        if "each" not in self.table:
            return self.table
        each = [tuple(map(float, text.split())) if isinstance(text, str) else () for text in self.table["each"]]
        columns = zip(*(self.table[c] for c in ("value", "low", "high", "n")), each, strict=True)
        wide = [Interval(v, low, high, n, each=x).widened(self.factor) for v, low, high, n, x in columns]
        low, high, significant = [i.low for i in wide], [i.high for i in wide], [i.sign != 0 for i in wide]
        return self.table.assign(low=low, high=high, significant=significant)

    def unmet(self) -> dict[str, str]:
        """Return the comparisons that must have their sign for a supported claim and have not, each with the reason."""
        table = self.adjusted()
        if "role" not in table or self.status == "supported":
            return {}
        needed, tested = table[table["role"].isin(ROLES[:2])], self.status == "gated" or math.isfinite(self.p)
        met = needed["significant"] & (needed["value"] * needed["expected"] > 0) & tested
        reasons = {
            True: "the adjusted interval does not exclude 0 in the claimed direction",
            False: "no interval over seeds",
        }
        if not tested:
            reasons = {True: "too few seeds for a test", False: "too few seeds for an interval"}
        return {str(row["comparison"]): reasons[math.isfinite(row["low"])] for _, row in needed[~met].iterrows()}


class InsufficientEvidence(Exception):
    """Raised by a claim's function if the runs cannot decide; it carries the verdict."""

    def __init__(
        self, sentence: str, status: Status = "not_checkable", table: pd.DataFrame | None = None, scope: str = ""
    ) -> None:
        super().__init__(sentence)
        self.verdict = Verdict(status, sentence, pd.DataFrame() if table is None else table, scope=scope)


def decide(
    parts: Mapping[Any, Interval], expected: int | Sequence[int], *, also: Mapping[Any, Interval] = NONE,
    against: Mapping[Any, Interval] = NONE, min_seeds: int = MIN_SEEDS,
) -> tuple[Status, float]:  # fmt: skip
    """Return the status of a claim with several comparisons, and the probability of a decision as clear by chance.

    A claim is supported if every comparison has the expected sign: an intersection-union test (Berger 1982), whose p-value is the
    largest. It is refuted if any has the opposite sign: the smallest p-value times their number (Bonferroni). If nothing differs
    from 0, each happens to at most 2.5 % of claims at a confidence level of 95 %; `docs/verdicts.md` lists the measured rates.

    `parts` support and refute, `also` must have their sign before the claim is supported and cannot refute it, `against` can refute and
    need not have their sign. `expected` is the sign of all, or of each in this order. Comparisons over fewer than `min_seeds` seeds, or
    over documents, decide nothing. The p-value is NaN if nothing was tested.
    """
    given = [*parts.values(), *also.values(), *against.values()]
    signs = [expected] * len(given) if isinstance(expected, int) else expected
    one_sided = [
        math.nan if i.n < min_seeds or not math.isfinite(i.p) else i.p / 2 if i.value * sign > 0 else 1 - i.p / 2
        for i, sign in zip(given, signs, strict=True)
    ]
    needed = one_sided[: len(parts) + len(also)]
    refuting = one_sided[: len(parts)] + one_sided[len(parts) + len(also) :]
    tested = [p for p in refuting if math.isfinite(p)]
    if not tested:
        return "unresolved", math.nan
    support = 2 * max(needed) if needed and all(map(math.isfinite, needed)) else 1.0
    contrary = 2 * len(refuting) * (1 - max(tested))
    if contrary <= significance():
        return "refuted", contrary
    return ("supported" if support <= significance() else "unresolved"), min(1.0, support, contrary)


def judged(
    parts: Mapping[Any, Interval], expected: int | Sequence[int], sentence: str, unit: str,
    units: Mapping[Any, str] = NONE, *, also: Mapping[Any, Interval] = NONE, against: Mapping[Any, Interval] = NONE,
    shown: Mapping[Any, Interval] = NONE, doubt: object = None, wrong: object = None, min_seeds: int = MIN_SEEDS,
) -> Verdict:  # fmt: skip
    """Return the verdict of `decide`, with all comparisons and those `shown` alone as its table; `units` are exceptions from `unit`.

    With `doubt`, a claim that would be supported stays unresolved. With `wrong`, a fact that does not depend on chance refutes it.
    """
    status, p = decide(parts, expected, also=also, against=against, min_seeds=min_seeds)
    if wrong and math.isfinite(p):
        status, p = "refuted", 0.0
    elif doubt and status == "supported":
        status, p = "unresolved", 1.0
    table = interval_table({**parts, **also, **against, **shown}, unit, units)
    roles = [role for role, group in zip(ROLES, (parts, also, against, shown), strict=True) for _ in group]
    deciding = len(roles) - len(shown)
    signs = [expected] * deciding if isinstance(expected, int) else list(expected)[:deciding]
    if len(table) == len(roles):  # else one comparison has two roles
        table = table.assign(role=roles, expected=pd.array([*signs, *[None] * len(shown)], dtype="Int64"))
    return Verdict(status, sentence, table, p=p)


def interval_table(intervals: Mapping[Any, Interval], unit: str = "", others: Mapping[Any, str] = NONE) -> pd.DataFrame:
    """Return named intervals as a table; `others` has the units of intervals with another unit.

    `each` has the numbers of the seeds, and `seeds` their names where they are known, separated by spaces.
    """
    rows = [
        {"comparison": name, "value": i.value, "low": i.low, "high": i.high, "n": i.n, "unit": others.get(name, unit),
         "each": " ".join(map(repr, i.each)), "seeds": " ".join(i.seeds)}
        for name, i in intervals.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def of_settings(verdicts: Mapping[str, Verdict]) -> Verdict:
    """Combine the verdicts in all comparable settings into one: the clearest, Holm-corrected for the number of settings.

    The preferred setting is first, and is shown if nothing is decided. Settings that contradict each other leave it unresolved.
    """
    tested = {name: v for name, v in verdicts.items() if math.isfinite(v.p)}
    if len(tested) < 2:
        return next(iter(tested.values()), next(iter(verdicts.values())))
    p = [v.p for v in tested.values()]
    adjusted, factors = (dict(zip(tested, of(p), strict=True)) for of in (holm, holm_factors))
    clear = [name for name in tested if adjusted[name] <= significance()]
    statuses: dict[str, Status] = {n: v.status if n in clear else "unresolved" for n, v in tested.items()}
    first = min(tested, key=lambda n: (1, 0.0) if statuses[n] == "unresolved" else (0, adjusted[n]))
    contrary = {"supported", "refuted"} <= set(statuses.values())
    by_setting = "; ".join(f"{name}: {STATUSES[status]}" for name, status in statuses.items())
    sentence = (
        f"{tested[first].sentence} These are the numbers of {first}. The verdicts in all {len(tested)} comparable settings, corrected "
        f"for their number{', contradict each other' if contrary else ''}: {by_setting}."
    )
    status: Status = "unresolved" if contrary else statuses[first]
    scope = tested[first].scope if status == tested[first].status else ""
    p_value, factor = 1.0 if contrary else adjusted[first], tested[first].factor * factors[first]
    return replace(tested[first], status=status, p=p_value, sentence=sentence, scope=scope, factor=factor)


def corrected(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts that are shown together, Holm-corrected over all that were tested.

    The probability that one or more of them is decided falsely is then at most 5 % at a confidence level of 95 %.
    """
    verdicts = list(verdicts)
    p = [v.p for v in verdicts if math.isfinite(v.p)]
    corrections = zip(holm(p), holm_factors(p), strict=True)

    def correct(verdict: Verdict) -> Verdict:
        adjusted, factor = next(corrections)
        status: Status = verdict.status if adjusted <= significance() else "unresolved"
        return replace(verdict, alone=verdict.status, status=status, factor=verdict.factor * factor)

    return [correct(v) if math.isfinite(v.p) else v for v in verdicts]


def judge_differences(differences: Mapping[Any, Interval]) -> dict[Any, Verdict]:
    """Return the verdict on each difference being below 0 (`refuted`: above), Holm-corrected over all of them."""
    verdicts = [Verdict(status, "", p=p) for status, p in (decide({"": i}, -1) for i in differences.values())]
    return dict(zip(differences, corrected(verdicts), strict=True))


def expected_by_chance(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims were tested, how many false decisions chance would make, and how many the correction leaves."""
    tested = [v for v in verdicts if math.isfinite(v.p)]
    n, decided = len(tested), ("supported", "refuted")
    alone, together = sum(v.alone in decided for v in tested), sum(v.status in decided for v in tested)
    return (
        f"{n} {'claim was' if n == 1 else 'claims were'} tested. Without correction up to {percent(significance())} of true null claims "
        f"would be decided by chance, half in each direction: up to {n * significance():.2g} here. Without correction {alone} "
        f"{'is' if alone == 1 else 'are'} decided. Holm's correction over all {n} leaves {together}; the probability that any of these is "
        f"decided falsely is at most {percent(significance())}."
    )
