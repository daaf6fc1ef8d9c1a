"""One offline page of verdicts: what these runs decide in front, with numbers, figure and published values; the rest folded."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from workbench import plots
from workbench.analysing import Analysis, Judged
from workbench.claims import QUESTIONS, STATUSES
from workbench.files import write_text

DECIDED = ("supported", "refuted", "unresolved")
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
article { border: 1px solid #8884; border-radius: 8px; padding: .6rem 1rem; margin: 1rem 0 }
h2 { margin-top: 2.2rem } h3 { margin: .2rem 0; font-size: 1.05rem } p { margin: .4rem 0 } figure { margin: .6rem 0 }
.status { display: inline-block; border-radius: 4px; padding: 0 .5rem; font-size: 13px; font-weight: 600; border: 1px solid #8886 }
.supported { border-left: 6px solid #009E73 } .refuted { border-left: 6px solid #D55E00 }
.unresolved { border-left: 6px solid #E69F00 } .gated, .not_checkable { border-left: 6px solid #808080 }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #8884 } th:first-child, td:first-child { text-align: left }
dl { font-size: 14px; display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem } dt { opacity: .7 } dd { margin: 0 }
summary { cursor: pointer; font-size: 14px } code { font-size: 13px } .small { font-size: 14px; opacity: .8 }
"""


def write_page(analysis: Analysis, out: Path, command: str) -> Path:
    """Write `claims.html` into a folder and return its path; `command` is what reproduces it."""
    parts = ["<h1>What these runs say of the claims</h1>", _summary(analysis)]
    script = True
    for question, asked in QUESTIONS.items():
        group = [j for j in analysis.judged if j.claim.question == question and j.verdict.status in DECIDED]
        group.sort(
            key=lambda j: DECIDED.index(j.verdict.status) == len(DECIDED) - 1
        )  # what the runs decide before what they leave open
        if group:
            parts.append(f"<h2>{html.escape(asked)}</h2>")
        for j in group:
            parts.append(_article(j, script))
            script = script and j.figure is None  # the first figure carries the plotting code
    parts += [_folded(analysis.judged), _provenance(analysis, command)]
    page = out / "claims.html"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>claims</title><style>{STYLE}</style>'
    write_text(page, f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>')
    return page


def _summary(analysis: Analysis) -> str:
    counts = pd.Series([j.verdict.status for j in analysis.judged]).value_counts()
    told = ", ".join(f"{counts[status]} {words}" for status, words in STATUSES.items() if status in counts)
    runs = analysis.evidence.runs
    of = f"{len(runs)} runs of {runs['model'].nunique()} models" if len(runs) else "No run"
    return (
        f"<p>{of}; {len(analysis.judged)} claims: {told}.</p>"
        '<p class="small">A claim is <b>supported</b> or <b>refuted</b> where the numbers leave no other reading; it is '
        "<b>unresolved</b> where chance explains them as well: where the interval of a difference contains 0, whatever its size, or "
        "where fewer than three seeds were trained. A seed is one training from one random start. Numbers in brackets are 95 % "
        "intervals, over seeds (Student's t of differences within each seed) or, within one model, over documents. A nat is the unit "
        "of the loss: 0.01 nats less means that the right next token gets about 1 % more probability.</p>"
    )


def _article(j: Judged, script: bool) -> str:
    verdict = j.verdict
    drawn = ""
    if j.figure is not None:
        alt = html.escape(plots.alt_text(j.figure), quote=True)
        drawn = f'<figure role="group" aria-label="{alt}">{plots.html(j.figure, script=script)}</figure>'
    return (
        f'<article class="{verdict.status}" id="{j.claim.name}"><h3>{html.escape(j.claim.text)}</h3>'
        f'<span class="status">{html.escape(verdict.said)}</span><p>{html.escape(verdict.sentence)}</p>{_facts(j)}'
        f"{_table(verdict.table)}{drawn}</article>"
    )


def _facts(j: Judged) -> str:
    claim = j.claim
    front = {
        **({"These runs": f"{len(j.verdict.runs)}: {j.verdict.setting}"} if j.verdict.runs else {}),
        "Published": claim.published,
    }
    rules = {"Supported if": claim.supports, "Refuted if": claim.refutes, "Needs": claim.scale, "Source": claim.source}
    return f"{_list(front)}<details><summary>how it is judged</summary>{_list(rules)}</details>"


def _list(told: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{k}</dt><dd>{html.escape(v)}</dd>' for k, v in told.items())}</dl>"


def _table(frame: pd.DataFrame) -> str:
    if frame.empty:
        return ""
    shown = frame.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
    return f"<details><summary>the deciding numbers ({len(frame)} rows)</summary>{shown}</details>"


def _folded(judged: Sequence[Judged]) -> str:
    rest = [j for j in judged if j.verdict.status not in DECIDED]
    if not rest:
        return ""
    told = "".join(_article(Judged(j.claim, j.verdict), script=False) for j in rest)
    return f"<h2>Not decided here</h2><details><summary>{len(rest)} claims, and what each would need</summary>{told}</details>"


def _provenance(analysis: Analysis, command: str) -> str:
    left = "".join(f"<li>{html.escape(name)}: {html.escape(why)}</li>" for name, why in analysis.problems.items())
    runs = analysis.evidence.runs.drop(columns=["options"], errors="ignore").to_html(index=False, border=0, na_rep="")
    return (
        (f"<h2>Left out</h2><ul>{left}</ul>" if left else "")
        + f"<h2>Provenance</h2><details><summary>the runs</summary>{runs}</details><p>Reproduce: <code>{html.escape(command)}</code></p>"
    )
