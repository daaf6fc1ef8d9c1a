"""One offline HTML page of a runs folder: figures with alt text and tables, provenance, and what was not checkable."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import findings, plots
from workbench.errors import BadData
from workbench.files import write_text
from workbench.results import load_records
from workbench.runs import Run, list_runs

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem } table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #8884 } th { text-align: left }
figure { margin: 1rem 0 } figcaption { font-size: 14px; opacity: .8 } summary { cursor: pointer; font-size: 14px }
.verdict { border-left: 4px solid #0072B2; padding: .3rem .8rem } code { font-size: 13px }
"""
BESIDE = {
    "importance_entropy": ("Concentration of attention", None),
    "token_similarity": ("How alike tokens become", "stream"),
    "sink_mass": ("Attention to position 0, mean of heads", None),
    "value_drain": ("Norm of the first token's own value against the others'", "own_v"),
    "hidden_peak": ("Norm of the first token's state against the others'", "stream"),
}


def write_report(runs: Path, out: Path) -> Path:
    """Write the page and return its path; raises `BadData` where the folder has no run that can be read."""
    found, problems = list_runs(runs)
    if not found:
        raise BadData(f"no readable runs under {runs}; make some with `workbench demo` or `workbench train`")
    frame = load_records([run.path for run in found])
    telemetry = pd.concat([run.telemetry() for run in found], ignore_index=True)
    page = _Page()
    body = "".join(_sections(page, found, frame, telemetry, problems))
    title = "workbench report"
    write_text(
        out,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><body>{body}',
    )
    return out


class _Page:
    """Figures of one page; only the first carries the plotting code."""

    def __init__(self) -> None:
        self.first = True

    def figure(self, figure: Any, frame: pd.DataFrame, caption: str) -> str:
        """A figure with its caption, alt text and table."""
        drawn, self.first = plots.html(figure, script=self.first), False
        alt = html.escape(plots.alt_text(figure), quote=True)
        return f'<figure role="group" aria-label="{alt}">{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>{_table(frame)}'


def _table(frame: pd.DataFrame, label: str = "the numbers") -> str:
    shown = frame.dropna(axis=1, how="all").drop(columns=["provenance"], errors="ignore").head(400)
    return f"<details><summary>{label} ({len(frame)} rows)</summary>{shown.to_html(index=False, border=0, na_rep='')}</details>"


def _text(*lines: str, kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{html.escape(line)}</p>' for line in lines)


def _sections(
    page: _Page, runs: list[Run], frame: pd.DataFrame, telemetry: pd.DataFrame, problems: dict[str, str]
) -> Iterator[str]:
    yield "<h1>What these models show</h1>"
    yield _text(
        f"{len(runs)} runs: {', '.join(sorted({run.architecture for run in runs}))}. Bands are the range over seeds; dashed lines are "
        "random init (step 0), dotted ones the metric's own baseline. A value-residual model gives later layers a direct path to the "
        "first layer's values, which depend on the token alone."
    )
    yield from _race(page, telemetry)
    yield from _values(page, frame)
    yield from _beside(page, frame, telemetry)
    yield "<h2>Not resolvable with these runs</h2>"
    yield _text(*findings.unresolved(frame))
    yield "<h2>Provenance</h2>" + _provenance(runs, frame, problems)


def _race(page: _Page, telemetry: pd.DataFrame) -> Iterator[str]:
    losses = telemetry[(telemetry["metric"] == "copy_loss") & telemetry["variant"].isna()]
    if losses.empty:
        return
    formations = findings.formation_steps(losses)
    yield "<h2>The race to induction</h2>"
    said = f"{findings.race_verdict(formations)} {findings.race_meaning(formations)}"
    yield _text(said, kind="verdict")
    yield _text(
        "The copy always begins at the same distance, so a head that counts does as well as one that recognises tokens."
    )
    yield page.figure(
        plots.race(losses),
        formations,
        "Loss where copying works; below half of its start a run has learnt it.",
    )


def _values(page: _Page, frame: pd.DataFrame) -> Iterator[str]:
    share = frame[(frame["metric"] == "token_identity_share") & (frame["site"] == "own_v")]
    ablated = frame[frame["metric"] == "value_ablation"]
    if share.empty:
        return
    yield "<h2>What deep values carry</h2>"
    yield _text(findings.values_verdict(frame), kind="verdict")
    yield page.figure(
        plots.plot(share), share, "Share of the variance of each layer's own values that the token's identity explains."
    )
    if len(ablated):
        yield page.figure(
            plots.ablation(ablated),
            ablated,
            "Validation loss when values are replaced by their mean per token, or by zero.",
        )


def _beside(page: _Page, frame: pd.DataFrame, telemetry: pd.DataFrame) -> Iterator[str]:
    yield "<h2>Beside them</h2>"
    losses = telemetry[(telemetry["metric"] == "validation_loss") & telemetry["run"].str.startswith("text")]
    for domain, rows in losses.groupby("data"):
        yield page.figure(plots.plot(rows), rows, f"Validation loss, {domain}.")
    for metric, (caption, site) in BESIDE.items():
        rows = frame[(frame["metric"] == metric) & frame["variant"].isna()]
        rows = rows[rows["site"] == site] if site else rows
        if len(rows):
            yield page.figure(plots.plot(rows, form="profile"), rows, caption)
    norms = telemetry[(telemetry["metric"] == "gradient_norm") & telemetry["run"].str.startswith("text")]
    if len(norms):
        last = norms[norms["step"] == norms["step"].max()]
        yield page.figure(plots.gradient_map(norms), last, "Gradient norms by matrix and layer (table: the last step).")
    coefficients = telemetry[telemetry["metric"] == "coefficient"]
    if len(coefficients):
        last = coefficients[coefficients["step"] == coefficients["step"].max()]
        yield page.figure(plots.coefficients(coefficients), last, "Learned coefficients: DenseFormer's averages.")


def _provenance(runs: list[Run], frame: pd.DataFrame, problems: dict[str, str]) -> str:
    rows = [
        {
            "run": run.name, "architecture": run.architecture, "options": json.dumps(run.info.get("options", {})), "seed": run.seed,
            "steps": run.progress, "data": run.info["data"].get("hash"),
            **run.info.get("versions", {}), "created": run.info.get("created"),
        }
        for run in runs
    ]  # fmt: skip
    assumed = frame["provenance"].str.contains('"assumed":true').any() if len(frame) else False
    lines = (
        ["Some architectures were assumed, because their checkpoints do not say: they are marked in the figures."]
        if assumed
        else []
    )
    lines += [f"{name} was left out: {problem}" for name, problem in problems.items()]
    lines += ["Reproduce with: make demo (or workbench demo --runs FOLDER), then workbench report."]
    return _text(*lines) + _table(pd.DataFrame(rows), "the runs")
