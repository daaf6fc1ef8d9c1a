"""Evidence -> verdicts, tables and figures of the claims: `workbench analyze runs --out results`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.claims import CLAIMS, QUESTIONS, Claim, Evidence, Verdict
from workbench.claims.collect import TELEMETRY, collect, find_runs
from workbench.claims.concentration import against_loss
from workbench.claims.verdict import corrected
from workbench.console import Progress
from workbench.errors import UnknownName, WorkbenchError
from workbench.files import write_text
from workbench.jobs.running import Workers
from workbench.runs.records import write_parquet


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and where there is one the figure that shows it with the rows behind it."""

    claim: Claim
    verdict: Verdict
    figure: go.Figure | None = None
    shown: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class Analysis:
    """Verdicts of all claims asked, the evidence behind them, and what was left out and why."""

    judged: tuple[Judged, ...]
    evidence: Evidence
    problems: dict[str, str]


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
    table = part.telemetry if metric in TELEMETRY else part.records
    rows = table[table["metric"] == metric]
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


def analyse(
    paths: Sequence[str | Path],
    *,
    questions: Sequence[str] | None = None,
    claims: Sequence[str] | None = None,
    data: Any = None,
    n: int = 64,
    workers: Workers = 1,
    progress: Progress | None = None,
) -> Analysis:
    """Verdicts of the claims for the runs at some paths (runs, or folders of them).

    Args:
        paths: runs or folders of runs. questions, claims: which claims, all unless given.
        data: a text file for runs without data of their own (imported ones); n: documents.
        workers: where it is measured, see `run_jobs`. progress: called with (done, all, run) after each run.

    Raises `BadData` where there is no finished run, `UnknownName` for another question or claim.
    """
    asked = chosen(questions, claims)
    runs, problems = find_runs(paths)
    evidence, more = collect(runs, asked, data=data, n=n, workers=workers, progress=progress)
    return Analysis(judge(evidence, asked), evidence, problems | more)


def verdicts(analysis: Analysis) -> pd.DataFrame:
    """One row per claim: question, claim, status among all claims and by itself, its p and scope, sentence, what is published."""
    rows = [
        {"question": j.claim.question, "claim": j.claim.name, "status": j.verdict.status,
         "by_itself": j.verdict.alone or j.verdict.status, "p": j.verdict.p, "scope": j.verdict.scope,
         "sentence": j.verdict.sentence, "runs": len(j.verdict.runs), "setting": j.verdict.setting,
         "text": j.claim.text, "published": j.claim.published, "source": j.claim.source}
        for j in analysis.judged
    ]  # fmt: skip
    return pd.DataFrame(rows)


def write_tables(analysis: Analysis, out: Path) -> list[Path]:
    """`verdicts`, the measured `records`, and the deciding table of every claim, each as CSV and Parquet."""
    written = [*_both(verdicts(analysis), out / "verdicts"), *_both(analysis.evidence.records, out / "records")]
    for j in analysis.judged:
        if len(j.verdict.table):
            written += _both(j.verdict.table, out / "tables" / j.claim.name)
    return written


def _both(frame: pd.DataFrame, path: Path) -> list[Path]:
    readable = frame.drop(columns="provenance", errors="ignore")  # nine tenths of the bytes; Parquet keeps it
    write_text(path.with_suffix(".csv"), readable.to_csv(index=False))
    write_parquet(frame, path.with_suffix(".parquet"))
    return [path.with_suffix(".csv"), path.with_suffix(".parquet")]


WIDTH = 1200  # pixels of a drawn figure


def write_figures(analysis: Analysis, out: Path, *, png: bool = False, svg: bool = False) -> list[Path]:
    """Every figure as an offline HTML page with its rows as a table beside it; where wanted, also drawn by a browser.

    Raises `WorkbenchError` where pictures are wanted and no browser is found; the pages are written before that.
    """
    from workbench.plots.browser import figure

    written = []
    drawn = [(j.claim.name, j.figure, j.shown) for j in analysis.judged if j.figure is not None]
    for name, shown, rows in drawn:
        page = out / "figures" / f"{name}.html"
        write_text(page, plots.html(shown, whole=True))
        written += [page, *_both(rows, page.with_suffix(""))]
    for name, shown, _ in drawn:
        for kind in [".png"] * png + [".svg"] * svg:
            path = out / "figures" / f"{name}{kind}"
            written.append(figure(plots.paper(shown), path, width=WIDTH, height=int(shown.layout.height or 500)))
    return written
