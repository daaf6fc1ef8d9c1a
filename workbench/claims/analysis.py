"""Runs -> verdicts, tables, figures and a page of the claims: `workbench analyze runs --out results`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import plots
from workbench.claims import DECIDED, QUESTIONS, STATUSES, Evidence
from workbench.claims.collect_evidence import collect, find_runs
from workbench.claims.judging import Judged, chosen, judge, with_figure
from workbench.claims.verdict import expected_by_chance
from workbench.console import Progress
from workbench.file_io import write_text
from workbench.jobs.running import Workers
from workbench.plots.html_page import Page, facts_html, folded, heading, numbers_html, paragraph
from workbench.runs.tables import TEXTS, write_table_as
from workbench.statistics.intervals import MIN_SEEDS, confidence

WIDTH = 1200  # pixels of a figure


@dataclass(frozen=True)
class Analysis:
    """Verdicts on claims, the evidence behind them, and why runs or metrics were left out."""

    judged: tuple[Judged, ...]
    evidence: Evidence
    problems: dict[str, str]


def analyse(
    paths: Sequence[str | Path], *, questions: Sequence[str] | None = None, claims: Sequence[str] | None = None, data:
    Any = None, n: int = 64, workers: Workers = 1, progress: Progress | None = None,
) -> Analysis:  # fmt: skip
    """Measure what some or all claims need of the runs at some paths, on `n` documents, and judge them.

    `data` is a text file for runs without data of their own (imported ones); for `workers` see `run_jobs`. Raises `BadData` if there is no
    finished run, `UnknownName` for an unknown question or claim.
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
         "sentence": j.verdict.details, "runs": len(j.verdict.runs), "setting": j.verdict.setting,
         "text": j.claim.text, "published": j.claim.published, "source": j.claim.source}
        for j in analysis.judged
    ]  # fmt: skip
    return pd.DataFrame(rows)


def write_tables(analysis: Analysis, out: Path) -> list[Path]:
    """Write the verdicts, the measured records and the table of every claim, each as CSV and Parquet; return the files.

    The verdicts and the tables of claims are also written as LaTeX and Markdown.
    """
    written = _files(verdict_table(analysis), out / "verdicts")
    written += _files(analysis.evidence.everything(), out / "records", (".csv", ".parquet"))
    for j in analysis.judged:
        if len(j.verdict.table):
            written += _files(j.verdict.adjusted(), out / "tables" / j.claim.name)
    return written


def _files(table: pd.DataFrame, path: Path, endings: Sequence[str] = (".csv", ".parquet", *TEXTS)) -> list[Path]:
    readable = table.drop(columns="provenance", errors="ignore")  # nine tenths of the bytes; Parquet keeps it
    files = [path.with_suffix(ending) for ending in endings]
    for file in files:
        write_table_as(table if file.suffix == ".parquet" else readable, file)
    return files


def write_figures(analysis: Analysis, out: Path, *, png: bool = False, svg: bool = False) -> list[Path]:
    """Write every figure as an offline HTML page with its rows as a table, and as PNG or SVG if asked; return the files.

    Raises `WorkbenchError` if pictures are asked for and there is no browser; the pages are written before that.
    """
    from workbench.plots.image_export import save_figure

    written = []
    drawn = [(j.claim.name, j.figure, j.shown) for j in analysis.judged if j.figure is not None]
    for name, shown, rows in drawn:
        page = out / "figures" / f"{name}.html"
        write_text(page, plots.html(shown, whole=True))
        written += [page, *_files(rows, page.with_suffix(""))]
    for name, shown, _ in drawn:
        for kind in [".png"] * png + [".svg"] * svg:
            path, height = out / "figures" / f"{name}{kind}", int(shown.layout.height or 500)
            written.append(save_figure(plots.paper_page(plots.paper(shown)), path, width=WIDTH, height=height))
    return written


def how_to_read() -> str:
    """Return how a verdict is read, for the top of a page."""
    return (
        f"A claim is supported if the {confidence()} confidence interval of every comparison excludes zero on the claimed side. It is "
        "refuted if one comparison has the opposite sign, after correction for their number. Otherwise it is unresolved: chance explains "
        "the numbers as well. The status among all claims is corrected for the number of claims on this page. A seed is one training from "
        f"one random start; fewer than {MIN_SEEDS} decide nothing. Brackets hold {confidence()} intervals over seeds (Student's t of "
        "differences within each seed) or over documents, which decide nothing. A nat is the unit of the loss: 0.01 nats less means about "
        "1 % more probability for the next token."
    )


def write_page(analysis: Analysis, out: Path, command: str) -> Path:
    """Write `claims.html` into a folder and return its path; `command` is shown as the way to reproduce it."""
    page, verdicts = Page("What these runs say of the claims"), [j.verdict for j in analysis.judged]
    runs = analysis.evidence.runs
    counts = {words: sum(v.status == status for v in verdicts) for status, words in STATUSES.items()}
    by_status = ", ".join(f"{n} {words}" for words, n in counts.items() if n)
    compared = f"{len(runs)} runs of {runs['model'].nunique()} models" if len(runs) else "No run"
    page.add(heading(page.title, 1), paragraph(f"{compared}; {len(verdicts)} claims: {by_status}."))
    page.add(paragraph(expected_by_chance(verdicts)), paragraph(how_to_read(), "small"))
    for question, text in QUESTIONS.items():
        group = [j for j in analysis.judged if j.claim.question == question and j.verdict.status in DECIDED]
        if group:
            page.add(heading(text))
        for j in sorted(group, key=lambda j: j.verdict.status == "unresolved"):
            page.add(article(j, page.figure(j.figure) if j.figure is not None else ""))
    rest = [article(j) for j in analysis.judged if j.verdict.status not in DECIDED]
    if rest:
        page.add(heading("Not decided here"), folded(f"{len(rest)} claims, and what each would need", "".join(rest)))
    if analysis.problems:
        page.add(heading("Left out"), facts_html(analysis.problems))
    page.add(heading("Provenance"), numbers_html(runs.drop(columns=["options"], errors="ignore"), "the runs"))
    return page.write(out / "claims.html", command)


def article(judged: Judged, figure: str = "") -> str:
    """Return a claim as HTML: verdict, numbers, published values, and the rule that decides it."""
    claim, verdict = judged.claim, judged.verdict
    runs = {"These runs": f"{len(verdict.runs)}: {verdict.setting}"} if verdict.runs else {}
    if math.isfinite(verdict.p):
        runs["By chance"] = f"a verdict as clear with probability {verdict.p:.2g}, if nothing differed"
    if unmet := verdict.unmet_text():
        runs["Not met"] = unmet
    rules = {"Supported if": claim.supports, "Refuted if": claim.refutes, "Needs": claim.scale, "Source": claim.source}
    parts = [
        heading(claim.text, 3), f'<span class="status">{verdict.words}</span>', paragraph(verdict.details),
        facts_html({**runs, "Published": claim.published}), folded("how it is judged", facts_html(rules)),
        numbers_html(verdict.adjusted(), "the deciding numbers"), figure,
    ]  # fmt: skip
    return f'<article class="{verdict.status}" id="{claim.name}">{"".join(parts)}</article>'
