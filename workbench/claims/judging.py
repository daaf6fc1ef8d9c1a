"""Evidence -> verdicts of claims, corrected for their number, and the figure that shows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.claims import CLAIMS, QUESTIONS, Claim, Evidence, Verdict
from workbench.claims.concentration import against_loss
from workbench.claims.evidence import TELEMETRY
from workbench.claims.verdict import corrected
from workbench.errors import UnknownName, WorkbenchError


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and where there is one the figure that shows it with the rows behind it."""

    claim: Claim
    verdict: Verdict
    figure: go.Figure | None = None
    shown: pd.DataFrame = field(default_factory=pd.DataFrame)


def chosen(questions: Sequence[str] | None = None, claims: Sequence[str] | None = None) -> list[Claim]:
    """Claims of these questions and of these names (all unless given), question by question; raises `UnknownName`."""
    for kind, given, known in (("question", questions, QUESTIONS), ("claim", claims, CLAIMS)):
        if wrong := next((name for name in given or () if name not in known), None):
            raise UnknownName(kind, wrong, known)
    everything = not questions and not claims
    asked = [c for c in CLAIMS.values() if everything or c.question in (questions or ()) or c.name in (claims or ())]
    return sorted(asked, key=lambda c: list(QUESTIONS).index(c.question))


def judge(evidence: Evidence, claims: Sequence[Claim]) -> tuple[Judged, ...]:
    """The verdict and the figure of every claim, corrected over all of them."""
    found = corrected([claim.judge(evidence) for claim in claims])
    return tuple(Judged(c, v, *figure(c, v, evidence)) for c, v in zip(claims, found, strict=True))


def figure(claim: Claim, verdict: Verdict, evidence: Evidence) -> tuple[go.Figure | None, pd.DataFrame]:
    """The numbers a claim is about, of the runs its verdict compared, and their rows; None where there are none."""
    shows, nothing = {"variant": None, **claim.shows}, (None, pd.DataFrame())
    metric = shows.pop("metric", None)
    if metric is None:
        return nothing
    if metric == "against_loss":
        rows = against_loss(evidence, verdict.runs)
        return (plots.against_loss(rows), rows) if len(rows) else nothing
    part = evidence.of_runs(evidence.runs[evidence.runs["run"].isin(verdict.runs)])
    rows = (part.telemetry if metric in TELEMETRY else part.records)(metric)
    for axis, value in shows.items():
        if value is not Ellipsis:
            rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
    if metric not in TELEMETRY:
        rows = rows[rows["step"].isin([0]) | (rows["step"] == rows.groupby("run")["step"].transform("max"))]
    try:
        return _drawn(str(metric), rows), rows
    except WorkbenchError:  # nothing was measured, or nothing that fits one figure: the verdict says so itself
        return nothing


def _drawn(metric: str, rows: pd.DataFrame) -> go.Figure:
    if metric == "copy_loss":
        return plots.race(rows)
    if metric == "tokens_per_second":
        return plots.pace(rows)
    if metric == "coefficient":
        return plots.coefficients(rows[rows["architecture"] == rows["architecture"].iloc[0]] if len(rows) else rows)
    if metric == "train_loss":
        return plots.plot(rows, smooth=min(100, max(1, int(rows["step"].max() or 0) // 10)) if len(rows) else 1)
    return plots.plot(rows)
