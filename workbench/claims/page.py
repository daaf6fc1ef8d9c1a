"""One offline page of verdicts: what these runs decide in front, with numbers, figure and published values; the rest folded."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from workbench.claims import DECIDED, QUESTIONS, STATUSES
from workbench.claims.analysis import Analysis
from workbench.claims.judging import Judged
from workbench.claims.verdict import expected_by_chance
from workbench.plots.page import Page, facts, folded, heading, numbers, paragraph

READING = (
    "A claim is supported where every comparison that it needs has the claimed sign beyond its interval, and refuted where one has "
    "the other sign although its interval is widened for the number of comparisons; else it is unresolved: chance explains the "
    "numbers as well. A status by itself holds for one claim; among all claims here it has to be clearer, since of many claims some "
    "look decided by chance. A seed is one training from one random start; with fewer than three nothing is decided. Numbers in "
    "brackets are 95 % intervals, over seeds (Student's t of differences within each seed) or, where they decide nothing, over "
    "documents. A nat is the unit of the loss: 0.01 nats less means that the right next token gets about 1 % more probability."
)


def write_page(analysis: Analysis, out: Path, command: str) -> Path:
    """Write `claims.html` into a folder and return its path; `command` is what reproduces it."""
    page = Page("What these runs say of the claims")
    chance = expected_by_chance([j.verdict for j in analysis.judged])
    page.add(heading(page.title, 1), paragraph(_counts(analysis)), paragraph(chance), paragraph(READING, "small"))
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
        page.add(heading("Left out"), facts(analysis.problems))
    runs = analysis.evidence.runs.drop(columns=["options"], errors="ignore")
    page.add(heading("Provenance"), numbers(runs, "the runs"))
    return page.write(out / "claims.html", command)


def _counts(analysis: Analysis) -> str:
    counts = pd.Series([j.verdict.status for j in analysis.judged]).value_counts()
    by_status = ", ".join(f"{counts[status]} {words}" for status, words in STATUSES.items() if status in counts)
    runs = analysis.evidence.runs
    of = f"{len(runs)} runs of {runs['model'].nunique()} models" if len(runs) else "No run"
    return f"{of}; {len(analysis.judged)} claims: {by_status}."


def article(judged: Judged, figure: str = "") -> str:
    """A claim with its verdict, the published numbers, how it is judged, and the deciding numbers, as HTML."""
    claim, verdict = judged.claim, judged.verdict
    runs = {"These runs": f"{len(verdict.runs)}: {verdict.setting}"} if verdict.runs else {}
    if math.isfinite(verdict.p):
        runs["By chance"] = f"a verdict as clear with probability {verdict.p:.2g}, if nothing differed"
    rules = {"Supported if": claim.supports, "Refuted if": claim.refutes, "Needs": claim.scale, "Source": claim.source}
    parts = [
        heading(claim.text, 3), f'<span class="status">{verdict.words}</span>', paragraph(verdict.sentence),
        facts({**runs, "Published": claim.published}), folded("how it is judged", facts(rules)),
        numbers(verdict.table, "the deciding numbers"), figure,
    ]  # fmt: skip
    return f'<article class="{verdict.status}" id="{claim.name}">{"".join(parts)}</article>'
