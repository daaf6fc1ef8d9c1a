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
from workbench.claims.judging import Judged, chosen, judge, with_figure
from workbench.console import Progress
from workbench.files import write_text
from workbench.jobs.running import Workers
from workbench.runs.records import write_parquet

WIDTH = 1200  # pixels of a figure


@dataclass(frozen=True)
class Analysis:
    """Verdicts on claims, the evidence behind them, and why runs or metrics were left out."""

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
    """Measure what claims need of some runs, and judge them.

    Args:
        paths: Runs, or folders of runs.
        questions: Questions whose claims are judged; all by default.
        claims: Names of claims that are judged; all by default.
        data: Text file for runs without data of their own (imported ones).
        n: Number of documents.
        workers: Number of processes, or a cluster; see `run_jobs`.
        progress: Called with (done, all, run) after each run.

    Raises:
        BadData: There is no finished run.
        UnknownName: There is no such question or claim.
    """
    asked = chosen(questions, claims)
    runs, problems = find_runs(paths)
    evidence, more = collect(runs, asked, data=data, n=n, workers=workers, progress=progress)
    return Analysis(tuple(with_figure(j, evidence) for j in judge(evidence, asked)), evidence, problems | more)


def verdict_table(analysis: Analysis) -> pd.DataFrame:
    """Return one row per claim: its verdict, the published numbers, and how often chance would decide as clearly."""
    rows = [
        {"question": j.claim.question, "claim": j.claim.name, "status": j.verdict.status,
         "by_itself": j.verdict.alone or j.verdict.status, "p": j.verdict.p, "scope": j.verdict.scope,
         "sentence": j.verdict.sentence, "runs": len(j.verdict.runs), "setting": j.verdict.setting,
         "text": j.claim.text, "published": j.claim.published, "source": j.claim.source}
        for j in analysis.judged
    ]  # fmt: skip
    return pd.DataFrame(rows)


def write_tables(analysis: Analysis, out: Path) -> list[Path]:
    """Write the verdicts, the measured records and the table of every claim, each as CSV and Parquet; return the files."""
    written = [
        *_both(verdict_table(analysis), out / "verdicts"),
        *_both(analysis.evidence.everything(), out / "records"),
    ]
    for j in analysis.judged:
        if len(j.verdict.table):
            written += _both(j.verdict.table, out / "tables" / j.claim.name)
    return written


def _both(frame: pd.DataFrame, path: Path) -> list[Path]:
    readable = frame.drop(columns="provenance", errors="ignore")  # nine tenths of the bytes; Parquet keeps it
    write_text(path.with_suffix(".csv"), readable.to_csv(index=False))
    write_parquet(frame, path.with_suffix(".parquet"))
    return [path.with_suffix(".csv"), path.with_suffix(".parquet")]


def write_figures(analysis: Analysis, out: Path, *, png: bool = False, svg: bool = False) -> list[Path]:
    """Write every figure as an offline HTML page with its rows as a table, and as PNG or SVG if asked; return the files.

    Raises `WorkbenchError` if pictures are asked for and there is no browser; the pages are written before that.
    """
    from workbench.plots.browser import save_figure

    written = []
    drawn = [(j.claim.name, j.figure, j.shown) for j in analysis.judged if j.figure is not None]
    for name, shown, rows in drawn:
        page = out / "figures" / f"{name}.html"
        write_text(page, plots.html(shown, whole=True))
        written += [page, *_both(rows, page.with_suffix(""))]
    for name, shown, _ in drawn:
        for kind in [".png"] * png + [".svg"] * svg:
            path = out / "figures" / f"{name}{kind}"
            written.append(
                save_figure(
                    plots.paper_page(plots.paper(shown)), path, width=WIDTH, height=int(shown.layout.height or 500)
                )
            )
    return written
