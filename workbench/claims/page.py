"""One offline page of verdicts: decided claims with numbers, figure and published values first, the others folded."""

from __future__ import annotations

import math
from pathlib import Path

from workbench.claims import DECIDED, QUESTIONS, STATUSES
from workbench.claims.analysis import Analysis
from workbench.claims.judging import Judged
from workbench.claims.verdict import expected_by_chance
from workbench.plots.page import Page, facts_html, folded, heading, numbers_html, paragraph
from workbench.statistics.intervals import MIN_SEEDS, confidence


def _reading() -> str:
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
    page.add(paragraph(expected_by_chance(verdicts)), paragraph(_reading(), "small"))
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
    rules = {"Supported if": claim.supports, "Refuted if": claim.refutes, "Needs": claim.scale, "Source": claim.source}
    parts = [
        heading(claim.text, 3), f'<span class="status">{verdict.words}</span>', paragraph(verdict.sentence),
        facts_html({**runs, "Published": claim.published}), folded("how it is judged", facts_html(rules)),
        numbers_html(verdict.table, "the deciding numbers"), figure,
    ]  # fmt: skip
    return f'<article class="{verdict.status}" id="{claim.name}">{"".join(parts)}</article>'
