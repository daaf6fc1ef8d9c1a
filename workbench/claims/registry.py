"""Registration of claims: `@claim` decorates a pure function from evidence to a verdict."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.claims.evidence import RECIPE, SETTING, Evidence
from workbench.claims.final_loss_conditions import NAMED, TESTED, tokens_per_parameter, unmet_condition
from workbench.claims.verdict import DECIDED, ROLES, InsufficientEvidence, Verdict, of_settings
from workbench.claims.verdict_wording import WORDS, differences_of, listed, scope_of, setting_of
from workbench.statistics.intervals import MIN_SEEDS

PAPER = "Zhou et al. 2024 and 2025, Value Residual Learning"
RESFORMERS = ("resformer", "resformer_constant", "resformer_learnable", "resformer_learnable_plus", "resformer_sparse")
SCALED = "values_scaled"
"""The control of every claim that the first layer's values help: own values halved, nothing of the first layer added."""


@dataclass(frozen=True)
class Claim:
    """A claim: the function that judges it, its metrics and models, and the published numbers.

    `models` are the architectures whose runs need the metrics (all if empty), at the checkpoints `steps`; `shows` has the metric and axes
    of its figure. With `final_loss`, its runs must meet the conditions of `unmet_condition`.
    """

    function: Callable[[Evidence], Verdict]
    supports: str
    refutes: str
    scale: str
    published: str
    source: str
    metrics: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    steps: str = "last"
    shows: Mapping[str, Any] = field(default_factory=dict)
    final_loss: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def question(self) -> str:
        """Its question: the name of its module."""
        return self.function.__module__.rpartition(".")[-1]

    @property
    def text(self) -> str:
        """The claim in full: the function's docstring."""
        return " ".join((inspect.getdoc(self.function) or "").split())

    def judge(self, evidence: Evidence) -> Verdict:
        """Return the verdict over all comparable settings; missing runs give a verdict too.

        Of the tested settings, those with the control come first, then those with the most training tokens per
        parameter. Outcomes do not matter.
        """
        settings: list[pd.DataFrame] = []
        only, _, _ = self._judge(replace(evidence, settings=settings))
        if len(settings) < 2:
            return only
        each: list[tuple[tuple[bool, bool, bool, float], pd.DataFrame, Verdict]] = []
        for rows in settings:
            verdict, controlled, budget = self._judge(replace(evidence, settings=[], within=frozenset(rows["run"])))
            if verdict.runs and verdict.runs in [earlier.runs for _, _, earlier in each]:
                continue  # settings of one learning rate each, compared at the best of all
            tokens = float(np.nan_to_num(budget, nan=-1.0))
            rank = (math.isfinite(verdict.p), verdict.status in ("gated", *DECIDED), controlled, tokens)
            each.append((rank, rows[[*SETTING, "device"]], verdict))
        each.sort(key=lambda one: one[0], reverse=True)  # equal ones stay in the order of `Evidence.comparable`
        tested = [one for one in each if math.isfinite(one[2].p)] or each[:1]
        others = each[len(tested) :]
        shorter = shorter_trainings([(v, rank[-1]) for rank, _, v in others]) if self.final_loss else ""
        lead, untested = self._at_equal_rates(evidence.runs, [v for _, _, v in tested]), len(others)
        lead = replace(lead, sentence=f"{lead.sentence}{shorter}")
        if len(tested) < 2:
            return replace(lead, untested=untested)
        labels = differences_of([rows for _, rows, _ in tested])
        budgets = (f", {WORDS['budget'].format(rank[-1])}" if rank[-1] >= 0 else "" for rank, _, _ in tested)
        names = [name + budget for name, budget in zip(labels, budgets, strict=True)]
        verdicts = [lead, *(v for _, _, v in tested[1:])]
        return replace(of_settings(list(zip(names, verdicts, strict=True))), untested=untested)

    def _at_equal_rates(self, runs: pd.DataFrame, tested: Sequence[Verdict]) -> Verdict:
        """Return the first verdict, unresolved if a measure's difference at unequal rates has the opposite sign at one rate."""
        lead, runs = tested[0], runs.drop_duplicates("run").set_index("run")
        compared = runs.loc[[*lead.runs]]
        if self.final_loss or lead.status not in ("supported", "refuted") or compared["lr"].nunique() < 2:
            return lead
        for other in tested[1:]:
            alike = runs.loc[[*other.runs]]
            judged = (
                "role" in lead.table and "role" in other.table
            )  # a verdict on parameters or bytes has no comparisons
            recipes = pd.concat([compared, alike])[[*RECIPE]].drop_duplicates()
            if judged and alike["lr"].nunique() == 1 and len(recipes) == 1:
                both = lead.table.merge(other.table, on=["comparison", "role"])
                opposite = both[(both["role"] == ROLES[0]) & (both["value_x"] * both["value_y"] < 0)]
                if len(opposite):
                    one, at = opposite.iloc[0], f"at one rate of {alike['lr'].iloc[0]:g}"
                    numbers = f"{one['value_x']:+.3g} at unequal rates, {one['value_y']:+.3g} {one['unit_y']} {at}"
                    sentence = (
                        f"{lead.sentence} {one['comparison'].capitalize()}: {numbers}. So the rates may explain it."
                    )
                    return replace(
                        lead, status="unresolved", p=1.0, sentence=sentence, scope=f"because the sign is opposite {at}"
                    )
        return lead

    def _judge(self, evidence: Evidence) -> tuple[Verdict, bool, float]:
        """Verdict in one setting, whether it has the claim's control, and training tokens per parameter of the compared runs."""
        evidence, left_out = evidence.measured_on_all(self.metrics, self.models)
        compared: list[pd.DataFrame] = []
        try:
            verdict = self.function(replace(evidence, compared=compared))
        except InsufficientEvidence as reason:
            verdict = reason.verdict
            if verdict.status == "unresolved" and compared:  # a result, and no lack of runs: it counts as tested
                seeds = compared[0].groupby("model")["seed"].nunique().min()
                verdict = replace(verdict, p=1.0 if seeds >= MIN_SEEDS else math.nan)
        every = evidence.runs.head(0).assign(beside=False)
        if compared:
            every = pd.concat(compared).sort_values("beside", kind="stable", key=lambda c: c.astype(bool))
            every = every.drop_duplicates("run")
        runs = every[~every["beside"].astype(bool)]  # a control need not meet the conditions
        controlled, budget = bool((every["beside"].astype(str) == "True").any()), tokens_per_parameter(runs)
        verdict = replace(verdict, sentence=f"{verdict.sentence}{left_out}")
        if self.final_loss and verdict.status in DECIDED and (unmet := unmet_condition(evidence, runs)):
            after = f" after {budget:,.1f} training tokens per parameter" if budget >= TESTED else ""
            scope = f"{untested_result(verdict)}{' after ' if budget < TESTED else f'{after}, but '}{unmet}"
            sentence = f"These numbers are preliminary. {verdict.sentence}"
            verdict = replace(verdict, sentence=sentence, status="gated", scope=scope, p=math.nan)
        elif verdict.status in ("supported", "refuted"):
            of_losses = "loss" in self.metrics or self.shows.get("metric") == "copy_loss"
            limits = [scope_of(runs)] if of_losses else []
            limits += [f"at {budget:.1f} tokens per parameter"] if self.final_loss and budget < NAMED else []
            verdict = replace(verdict, scope=" ".join(filter(None, limits)))
        dtypes = evidence.kept.dtypes(frozenset(every["run"]), self.metrics)
        setting = setting_of(every[every["beside"] != "shown"]) + (f", in {listed(dtypes)}" if dtypes else "")
        return replace(verdict, runs=tuple(every["run"]), setting=setting), controlled, budget


def untested_result(verdict: Verdict) -> str:
    """Return what runs show of a claim on the final loss whose conditions they do not meet."""
    rows = verdict.adjusted()
    clear = "role" in rows and bool(rows.loc[rows["role"] != ROLES[-1], "significant"].any())
    shown = {"supported": "the comparisons have the claimed sign", "refuted": "a comparison has the opposite sign"}
    return shown.get(verdict.status, "the comparisons are not all clear" if clear else "no difference is found")


def shorter_trainings(untested: Sequence[tuple[Verdict, float]]) -> str:
    """Return the result of a claim with one deciding comparison in settings that were not tested, by budget."""
    results = [(v.table[v.table["role"] == ROLES[0]], n) for v, n in untested if "role" in v.table and n >= 0]
    enough = ((n, rows.iloc[0]) for rows, n in results if len(rows) == 1 and rows["n"].iloc[0] >= MIN_SEEDS)
    single = sorted(enough, key=lambda one: one[0])
    parts = [f"{row['value']:+.3g} {row['unit']} at {n:.3g}" for n, row in single]
    early = f" Below {TESTED:.0f}, differences are of early training." if any(n < TESTED for n, _ in single) else ""
    return f" Other settings that were not tested: {', '.join(parts)} tokens per parameter.{early}" if parts else ""


CLAIMS: dict[str, Claim] = {}


def claim(**facts: Any) -> Callable[[Callable[[Evidence], Verdict]], Callable[[Evidence], Verdict]]:
    """Register a function as a claim with the facts of `Claim`; its docstring is the claim's text. Raises `ValueError` for a taken name."""

    def register(function: Callable[[Evidence], Verdict]) -> Callable[[Evidence], Verdict]:
        made = Claim(function, **facts)
        if made.name in CLAIMS:
            raise ValueError(f"claim {made.name!r} is registered already")
        CLAIMS[made.name] = made
        return function

    return register
