"""Runs -> verdicts, tables and figures of the claims: `workbench analyze runs --out results`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import plots
from workbench.claims import Evidence
from workbench.claims.collect import collect, find_runs
from workbench.claims.judging import Judged, chosen, judge
from workbench.console import Progress
from workbench.files import write_text
from workbench.jobs.running import Workers
from workbench.runs.records import write_parquet


@dataclass(frozen=True)
class Analysis:
    """Verdicts of all claims asked, the evidence behind them, and what was left out and why."""

    judged: tuple[Judged, ...]
    evidence: Evidence
    problems: dict[str, str]


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
    written = [*_both(verdicts(analysis), out / "verdicts"), *_both(analysis.evidence.everything(), out / "records")]
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
