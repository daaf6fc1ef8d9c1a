"""Evidence of runs -> the verdict on each claim, corrected for the number of claims, and the figure that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.claims import CLAIMS, QUESTIONS, Claim, Evidence, Verdict
from workbench.claims.concentration import against_loss
from workbench.claims.evidence import SETTING, TELEMETRY
from workbench.claims.published_numbers import differences_by_budget, published_differences, with_published
from workbench.claims.verdict import InsufficientEvidence, corrected
from workbench.errors import UnknownName, WorkbenchError


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, the figure that shows it (if there is one) and the rows behind the figure."""

    claim: Claim
    verdict: Verdict
    figure: go.Figure | None = None
    shown: pd.DataFrame = field(default_factory=pd.DataFrame)


def chosen(questions: Sequence[str] | None = None, claims: Sequence[str] | None = None) -> list[Claim]:
    """Return the claims of some questions and names (all by default), by question; raises `UnknownName`."""
    for kind, given, known in (("question", questions, QUESTIONS), ("claim", claims, CLAIMS)):
        if wrong := next((name for name in given or () if name not in known), None):
            raise UnknownName(kind, wrong, known)
    everything = not questions and not claims
    asked = [c for c in CLAIMS.values() if everything or c.question in (questions or ()) or c.name in (claims or ())]
    return sorted(asked, key=lambda c: list(QUESTIONS).index(c.question))


def judge(
    evidence: Evidence, claims: Sequence[Claim], progress: Callable[[int, Claim, Verdict], None] = lambda *_: None
) -> tuple[Judged, ...]:
    """Return the verdict on each claim, Holm-corrected over all of them; every page and command that shows verdicts calls it.

    `progress` is called with the number of judged claims, the last of them and its verdict before the correction.
    """
    verdicts = []
    for i, claim in enumerate(claims, 1):
        verdicts.append(claim.judge(evidence))
        progress(i, claim, verdicts[-1])
    return tuple(map(Judged, claims, corrected(verdicts)))


def with_figure(judged: Judged, evidence: Evidence) -> Judged:
    """Return a judged claim with its figure and the rows behind it."""
    drawn, rows = claim_figure(judged.claim, judged.verdict, evidence)
    return replace(judged, figure=drawn, shown=rows)


def claim_figure(claim: Claim, verdict: Verdict, evidence: Evidence) -> tuple[go.Figure | None, pd.DataFrame]:
    """Return the figure of a claim's numbers in the compared runs, and its rows; None if nothing can be drawn."""
    shows, nothing = {"variant": None, **claim.shows}, (None, pd.DataFrame())
    metric = shows.pop("metric", None)
    if metric is None:
        return nothing
    if metric == "against_loss":
        try:
            rows = against_loss(evidence, verdict.runs)
        except InsufficientEvidence:  # of training logs
            return nothing
        return (plots.against_loss_figure(rows), rows) if len(rows) else nothing
    part = evidence.of_runs(evidence.runs[evidence.runs["run"].isin(verdict.runs)])
    values = part.runs.groupby(["model", "T"])[[*SETTING]].nunique(dropna=False)
    if (values > 1).any(axis=None):  # curves would be means over settings
        numbers = verdict.adjusted()
        if not {"comparison", "value", "low", "high"} <= set(numbers):
            return nothing
        return plots.intervals(numbers, claim.name.replace("_", " ").capitalize(), verdict.setting), numbers
    if metric == "loss_difference":
        rows = differences_by_budget(part.runs, part.curves())
        if len(rows):
            published = {model: published_differences(model) for model in rows["architecture"].unique()}
            return plots.budget_figure(rows, published), with_published(rows, published)
        metric = "validation_loss"
    rows = (part.telemetry if metric in TELEMETRY else part.records)(metric)
    for axis, value in shows.items():
        if value is not Ellipsis:
            rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
    if metric not in TELEMETRY:
        rows = rows[rows["step"].isin([0]) | (rows["step"] == rows.groupby("run")["step"].transform("max"))]
    try:
        if metric == "copy_loss":
            return plots.race_figure(rows), rows
        if metric == "tokens_per_second":
            return plots.pace_figure(rows), rows
        if metric == "coefficient":
            first = rows["architecture"].iloc[0] if len(rows) else None
            return plots.coefficients_figure(rows[rows["architecture"] == first]), rows
        smooth = min(100, max(1, rows["step"].nunique() // 10)) if metric == "train_loss" else 1
        return plots.plot(rows, smooth=smooth), rows
    except WorkbenchError:  # nothing was measured, or nothing that fits one figure: the verdict's sentence names it
        return nothing
