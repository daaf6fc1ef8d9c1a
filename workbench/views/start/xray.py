"""One model at a glance: the four answers of an X-ray from what is stored, of A or of A beside B."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.reports import xray as xrays
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.runs.run import Run
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source, Subject
from workbench.views.start.parts import check_part

MAX_LINE = 58  # characters in half a page


def measured(source: Source, subject: Subject) -> pd.DataFrame:
    """What an X-ray reads, at the subject's step and at step 0; of each measure the records on one sample."""

    def read() -> pd.DataFrame:
        frame = source.records([subject.entry], (*xrays.METRICS, xrays.BY_LAYER))
        return one_sample(frame[frame["step"].isin([0, subject.step])])

    entry = subject.entry
    return source.keep(("xray", entry.path, entry.series, entry.stamp, subject.step), read)


def missing(source: Source, subject: Subject) -> list[str]:
    """Measures that an X-ray of this model at this step needs and that are not stored."""
    frame = measured(source, subject)
    there = set(frame.loc[frame["step"] == subject.step, "metric"])
    there |= {xrays.TOGETHER} if xrays.BY_LAYER in there else set()
    return [name for name in xrays.NEEDED if name not in there]


def measure(entry: Entry, step: int, progress: Callable[[int, int], None]) -> None:
    """Measure and store what an X-ray of a run at a step reads; `progress` may raise to stop it between two measures."""
    from workbench.measurement.measuring import measure as measured_on

    run = Run.open(entry.path)
    names = [n for n in xrays.METRICS if n != xrays.SHORT or run.train.T >= 64]
    at_init = [n for n in names if n != xrays.TOGETHER] if step and 0 in run.steps else []
    plan = [(step, n) for n in names] + [(0, n) for n in at_init]
    for i, (at, name) in enumerate(plan):
        progress(i, len(plan))
        measured_on(run, name, steps=[at], n=xrays.DOCUMENTS)
    progress(len(plan), len(plan))


def command(entry: Entry, step: int) -> str:
    """What measures the same from a terminal; an imported run has no text of its own, so `FILE` stands for one of yours."""
    data = " --text FILE" if entry.imported else ""
    if step == entry.steps[-1]:
        return f"workbench xray {shlex.quote(entry.path)}{data}"
    metrics = " ".join(f"-m {name}" for name in xrays.METRICS)
    return f"workbench measure {shlex.quote(entry.path)} {metrics} --steps 0,{step} --documents {xrays.DOCUMENTS}{data}"


def _drawing(source: Source, link: Link, name: str) -> Drawing:
    """A question's sentence and picture; drawn once for what is stored."""
    check_part(link, "model")
    subjects = source.subjects(link)
    key = ("answer", name, *((s.entry.path, s.series, s.entry.stamp, s.step) for s in subjects))
    kept = source.keep(key, lambda: _draw(source, subjects, name))
    return replace(kept, figure=go.Figure(kept.figure))  # the kept one is shared


def _draw(source: Source, subjects: Sequence[Subject], name: str) -> Drawing:
    for subject in subjects:
        if absent := missing(source, subject):
            names = ", ".join(n.replace("_", " ") for n in absent)
            raise WorkbenchError(f"{subject.title}: not measured yet: {names}")
    frames = xrays.alike([measured(source, s).assign(architecture=s.entry.series) for s in subjects])
    sentence = " ".join(
        (f"{s.tag}: " if s.tag else "") + xrays.SENTENCES[name](f) for s, f in zip(subjects, frames, strict=True)
    )
    parts = [xrays.rows_of(name, frame) for frame in frames]
    figures = [(s.title, xrays.drawn(name, rows)) for s, rows in zip(subjects, parts, strict=True)]
    if len(parts) == 1:
        return Drawing(plots.narrow(figures[0][1], MAX_LINE), parts[0], sentence)
    minus = plots.difference(parts[0], parts[1])
    if len(minus):
        figures.append((plots.MINUS, xrays.drawn(name, minus)))
    else:
        sentence += f" No {plots.MINUS}: the two have no layer in common here."
    made = plots.beside(figures, str(figures[0][1].layout.title.text))
    named = [p.assign(architecture=s.series) for s, p in zip(subjects, parts, strict=True)]
    return Drawing(made, pd.concat([*named, minus], ignore_index=True), sentence)


@view("start")
def concentration(source: Source, link: Link) -> Drawing:
    """Whether attention concentrates, in which layers, and on what: the first position, nearness, or particular tokens."""
    return _drawing(source, link, "concentration")


@view("start")
def sinks(source: Source, link: Link) -> Drawing:
    """Attention that every head gives to the first token, and how long that token's value is."""
    return _drawing(source, link, "sinks")


@view("start")
def token_share(source: Source, link: Link) -> Drawing:
    """Share of the variance of values that the token alone explains."""
    return _drawing(source, link, "token_share")


@view("start")
def residual(source: Source, link: Link) -> Drawing:
    """What is lost where deep values are replaced by their token's mean, and by zero."""
    return _drawing(source, link, "residual")


ANSWERS = {"concentration": concentration, "sinks": sinks, "token_share": token_share, "residual": residual}
"""The four views, by question."""
