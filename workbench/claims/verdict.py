"""The verdict on a claim, how its comparisons decide it, and the correction over all verdicts that are shown together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pandas as pd

from workbench.claims.verdict_wording import labelled
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
class SettingVerdict:
    """The verdict on a claim in one tested setting: its p-value, and its status before (`alone`) and after all corrections."""

    name: str
    p: float
    alone: Status
    status: Status


@dataclass(frozen=True)
class Verdict:
    """The status of a claim, the sentence that explains it, and the numbers behind it.

    `setting` is what the compared runs have in common, `scope` the limits of the status or the unmet condition of a `gated` claim. `p` is
    the probability of a decision as clear by chance (NaN if nothing was tested), `alone` the status before the correction over a page,
    `factor` the number by which the corrections have multiplied the p-value. `settings` are the verdicts in all tested settings, if
    there are several: the first leads, and sentence and numbers are its. `untested` is the number of settings that were not tested.
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
    settings: tuple[SettingVerdict, ...] = ()
    untested: int = 0

    @property
    def tests(self) -> tuple[SettingVerdict, ...]:
        """The tested settings; without several, the verdict itself."""
        return self.settings or (SettingVerdict(self.setting, self.p, self.alone or self.status, self.status),)

    @property
    def contradictory(self) -> bool:
        """True if one setting supports the claim and another refutes it."""
        return {"supported", "refuted"} <= {s.status for s in self.settings}

    @property
    def details(self) -> str:
        """The sentence, and the verdicts in all settings."""
        more = f"{self.untested} more setting{'s were' if self.untested > 1 else ' was'} not tested."
        parts = [self.sentence, more if self.untested else ""]
        if self.settings:
            by_setting = "; ".join(f"{s.name}: {STATUSES[s.status]}" for s in self.settings)
            contrary = " They contradict each other." if self.contradictory else ""
            first = f"All numbers above are of one setting, the first of {len(self.settings)} that were tested."
            parts.insert(1, f"{first} Verdicts by setting: {by_setting}.{contrary}")
        return " ".join(filter(None, parts))

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
        """Return the table with `low_adjusted`, `high_adjusted`, as wide as corrections demand, their level, and whether they exclude 0.

        These bounds are NaN where an interval is not over seeds; such rows decide nothing, and `significant` is False. They are also NaN
        for censored steps, where the p-value of the log-rank test says whether the difference is `significant`. `low` and `high` stay
        the bounds without correction. A `note` names intervals of shares that pass -1 or 1.
        """
        if "each" not in self.table:
            return self.table
        each = [tuple(map(float, text.split())) if isinstance(text, str) else () for text in self.table["each"]]
        columns = zip(*(self.table[c] for c in ("value", "low", "high", "n")), each, strict=True)
        wide = [Interval(v, low, high, n, each=x).widened(self.factor) for v, low, high, n, x in columns]
        level = 1 - significance() / self.factor
        by_test = self.table["censored"].astype(bool) & (self.table["p_unadjusted"] * self.factor <= significance())
        clear = np.array([i.sign != 0 for i in wide], dtype=bool)
        return with_adjusted(self.table, wide).assign(significant=by_test | clear, level=level)

    def unmet(self) -> dict[str, str]:
        """Return the comparisons that must have their sign for a supported claim and have not, each with the reason."""
        table = self.adjusted()
        if "role" not in table or self.status == "supported":
            return {}
        needed, tested = table[table["role"].isin(ROLES[:2])], self.status == "gated" or math.isfinite(self.p)
        met = needed["significant"] & (needed["value"] * needed["expected"] > 0) & tested
        sign = "the adjusted interval does not exclude 0 in the claimed direction"
        reasons = needed["low_adjusted"].notna().map({True: sign, False: "no interval over seeds"})
        reasons = reasons.mask(needed["censored"], "the log-rank test does not decide in the claimed direction")
        if not tested:
            few = {True: "too few seeds for a test", False: "too few seeds for an interval"}
            reasons = needed["p_unadjusted"].notna().map(few)
        return dict(zip(needed["comparison"].astype(str)[~met], reasons[~met], strict=True))

    def unmet_text(self) -> str:
        """Return the comparisons of `unmet` grouped by reason; empty without any."""
        unmet = self.unmet()
        return "; ".join(
            f"{', '.join(n for n in unmet if unmet[n] == why)}: {why}" for why in dict.fromkeys(unmet.values())
        )


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
        {"comparison": labelled(str(name)), "value": i.value, "low": i.low, "high": i.high, "n": i.n, "p_unadjusted": i.p,
         "censored": i.censored, "unit": others.get(name, unit), "each": " ".join(map(repr, i.each)), "seeds": " ".join(i.seeds)}
        for name, i in intervals.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def with_adjusted(table: pd.DataFrame, wide: Sequence[Interval]) -> pd.DataFrame:
    """Return an `interval_table` with the bounds of its intervals after a correction, and a `note` on shares that pass -1 or 1."""
    table, at = table.copy(), list(table.columns).index("high") + 1
    table.insert(at, "low_adjusted", [i.low for i in wide])
    table.insert(at + 1, "high_adjusted", [i.high for i in wide])
    bounds = table[["low", "low_adjusted", "high", "high_adjusted"]].astype(float).abs().max(axis=1)
    facts = zip(table["unit"].map(str), table["value"].astype(float).abs(), bounds, strict=True)
    passing = "an interval passes -1 or 1: so few seeds do not bound this share"
    notes = [passing if unit.startswith("share") and value <= 1 < bound else "" for unit, value, bound in facts]
    return table.assign(note=notes) if any(notes) else table


def judged_by_seed(verdict: Verdict) -> pd.DataFrame:
    """Return the judged differences of a verdict, a row for each comparison and a column for each seed."""
    rows = []
    for row in verdict.table.to_dict("records"):
        if each := str(row.get("each", "")).split():
            seeds = str(row["seeds"]).split() or [f"{i + 1} of {len(each)}" for i in range(len(each))]
            by_seed = {f"seed {seed}": float(value) for seed, value in zip(seeds, each, strict=True)}
            unit = str(row["unit"]).removeprefix("restricted mean ")
            rows.append({"comparison": row["comparison"], "unit": unit, **by_seed})
    return pd.DataFrame(rows)


def in_one_sentence(verdict: Verdict) -> str:
    """Return a verdict's first deciding comparison, after its seeds, and how many do not have their sign."""
    table = verdict.adjusted()
    rows = table[table["role"] == ROLES[0]] if "role" in table else table.head(0)
    number, tested = "no number decides", math.isfinite(verdict.p)
    if len(rows):
        row = rows.iloc[0]
        adjusted = " Holm-adjusted" if verdict.factor > 1 else ""
        between = f" [{row['low_adjusted']:+.3g}, {row['high_adjusted']:+.3g}]{adjusted}"
        between = between if math.isfinite(row["low_adjusted"]) else f", p = {row['p_unadjusted']:.2g}" * tested
        number = f"{row['comparison']} {row['value']:+.4g} {row['unit']}{between if row['n'] > 1 else ''}"
    few = "; too few seeds for a test" if verdict.status == "unresolved" and not tested else ""
    unmet = verdict.unmet() if tested else {}
    unmet_text = f" Not met: {len(unmet)} of {table['role'].isin(ROLES[:2]).sum()} comparisons." if unmet else ""
    return f"({verdict.setting.partition(' of ')[0] or 'no runs'}): {number}{few}.{unmet_text}"


def of_settings(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    """Combine the verdicts in all tested settings, by name, into the first one's: Holm-corrected for their number.

    Raises `ValueError` for an untested one. Settings that contradict each other leave the claim unresolved.
    """
    if not all(math.isfinite(v.p) for _, v in verdicts):
        raise ValueError("a setting that was not tested has no p-value to correct")
    settings = tuple(SettingVerdict(name, v.p, v.status, v.status) for name, v in verdicts)
    (verdict,) = corrected([replace(verdicts[0][1], settings=settings)])
    return replace(verdict, alone=None, scope=verdict.scope if verdict.status == verdicts[0][1].status else "")


def corrected(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts that are shown together, Holm-corrected over all settings of all claims that were tested.

    Each claim has an equal share of the error rate, and each setting an equal part of it. The probability that one or more verdicts,
    those in further settings included, are decided falsely is then at most 5 % at a confidence level of 95 %.
    """
    verdicts = list(verdicts)
    tested = [v for v in verdicts if math.isfinite(v.p)]
    p = [test.p for v in tested for test in v.tests]
    weights = [1 / len(v.tests) for v in tested for _ in v.tests]
    corrections = zip(holm(p, weights), holm_factors(p, weights), strict=True)

    def correct(verdict: Verdict) -> Verdict:
        pairs = [(test, *next(corrections)) for test in verdict.tests]
        tests = [replace(t, status=t.alone if adjusted <= significance() else "unresolved") for t, adjusted, _ in pairs]
        settings = tuple(tests) if verdict.settings else ()
        shown = replace(verdict, alone=verdict.status, status=tests[0].status, factor=pairs[0][2], settings=settings)
        return replace(shown, status="unresolved") if shown.contradictory else shown

    return [correct(v) if math.isfinite(v.p) else v for v in verdicts]


def judge_differences(differences: Mapping[Any, Interval]) -> dict[Any, Verdict]:
    """Return the verdict on each difference being below 0 (`refuted`: above), Holm-corrected over all of them."""
    verdicts = [Verdict(status, "", p=p) for status, p in (decide({"": i}, -1) for i in differences.values())]
    return dict(zip(differences, corrected(verdicts), strict=True))


def expected_by_chance(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims were tested, how many false decisions chance would make, and how many the correction leaves."""
    tested = [v for v in verdicts if math.isfinite(v.p)]
    if not tested:
        return "No claim is tested here; each says what it lacks. A p-value in its sentence is of one comparison and decides nothing."
    tests, decided = [t for v in tested for t in v.tests], ("supported", "refuted")
    n, alone, together = len(tests), sum(t.alone in decided for t in tests), sum(t.status in decided for t in tests)
    settings, of = (f" in {n} settings", "tests") if n > len(tested) else ("", "claims")
    left = sum(any(t.status in decided for t in v.tests) for v in tested)
    of_claims = f", of {left} claim{'s' * (left > 1)}" if left < together else ""
    return (
        f"{len(tested)} {'claim was' if len(tested) == 1 else 'claims were'} tested{settings}. Without correction up to "
        f"{percent(significance())} of true null {of} would be decided by chance, half in each direction: up to "
        f"{n * significance():.2g} here. Without correction {alone} {'is' if alone == 1 else 'are'} decided. Holm's correction over all "
        f"{n} leaves {together}{of_claims}; the probability that any of these is decided falsely is at most {percent(significance())}."
    )
