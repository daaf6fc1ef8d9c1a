"""One model at a glance, what is in the folder, what its runs decide of the field's claims, and the demo's story."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench import findings, plots, xrays
from workbench.catalogue import Entry
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import read_json
from workbench.names import LABELS
from workbench.results import one_sample
from workbench.runs import Run
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source, Subject

if TYPE_CHECKING:
    from workbench.analysing import Judged

SHOWN = {"model": "This model", "here": "What is here", "verdicts": "Verdicts", "demo": "The demo"}
"""Parts of the page."""
LINE = 58  # characters in half a page
STATUS, QUIET = ".demo.json", 180  # seconds without a sign of life, after which a demo has stopped


def _of(link: Link, part: str) -> None:
    """Raise `WorkbenchError` where the link shows another part of the page."""
    asked = link.text("show", part)
    if asked not in SHOWN:
        raise UnknownName("part of the page", str(asked), SHOWN)
    if asked != part:
        raise WorkbenchError(f"drawn with show={part}")


# ---- this model ------------------------------------------------------------------------------------------------------


def measured(ask: Source, subject: Subject) -> pd.DataFrame:
    """What an X-ray reads, at the subject's step and at step 0; of each measure the records on one sample."""

    def read() -> pd.DataFrame:
        frame = ask.records([subject.entry], xrays.METRICS)
        return one_sample(frame[frame["step"].isin([0, subject.step])])

    entry = subject.entry
    return ask.keep(("xray", entry.path, entry.series, entry.stamp, subject.step), read)


def missing(ask: Source, subject: Subject) -> list[str]:
    """Measures that an X-ray of this model at this step needs and that are not stored."""
    frame = measured(ask, subject)
    there = set(frame.loc[frame["step"] == subject.step, "metric"])
    return [name for name in xrays.NEEDED if name not in there]


def measure(entry: Entry, step: int, progress: Callable[[int, int], None]) -> None:
    """Measure and store what an X-ray of a run at a step reads; `progress` may raise to stop it between two measures."""
    from workbench.measuring import measure as measured_on

    run = Run.open(entry.path)
    names = [n for n in xrays.METRICS if n != xrays.SHORT or run.train.T >= 64]
    at_init = [n for n in names if n != "value_ablation"] if step and 0 in run.steps else []
    plan = [(step, n) for n in names] + [(0, n) for n in at_init]
    for i, (at, name) in enumerate(plan):
        progress(i, len(plan))
        measured_on(run, name, steps=[at], n=xrays.DOCUMENTS)
    progress(len(plan), len(plan))


def command(entry: Entry, step: int) -> str:
    """What measures the same from a terminal; an imported run has no text of its own, so `FILE` stands for one of yours."""
    data = " --data FILE" if entry.imported else ""
    if step == entry.steps[-1]:
        return f"workbench xray {shlex.quote(entry.path)}{data}"
    metrics = " ".join(f"-m {name}" for name in xrays.METRICS)
    return f"workbench measure {shlex.quote(entry.path)} {metrics} --steps 0,{step} --n {xrays.DOCUMENTS}{data}"


def _answer(ask: Source, link: Link, name: str) -> Drawing:
    """A question's sentence and picture; drawn once for what is stored."""
    _of(link, "model")
    subjects = ask.subjects(link)
    key = ("answer", name, *((s.entry.path, s.series, s.entry.stamp, s.step) for s in subjects))
    kept = ask.keep(key, lambda: _draw(ask, subjects, name))
    return replace(kept, figure=go.Figure(kept.figure))  # the kept one is shared


def _draw(ask: Source, subjects: Sequence[Subject], name: str) -> Drawing:
    for subject in subjects:
        if absent := missing(ask, subject):
            told = ", ".join(n.replace("_", " ") for n in absent)
            raise WorkbenchError(f"{subject.title}: not measured yet: {told}")
    frames = xrays.alike([measured(ask, s).assign(architecture=s.entry.series) for s in subjects])
    said = " ".join(
        (f"{s.tag}: " if s.tag else "") + xrays.SENTENCES[name](f) for s, f in zip(subjects, frames, strict=True)
    )
    parts = [xrays.rows_of(name, frame) for frame in frames]
    figures = [(s.title, xrays.drawn(name, rows)) for s, rows in zip(subjects, parts, strict=True)]
    if len(parts) == 1:
        return Drawing(plots.narrow(figures[0][1], LINE), parts[0], said)
    minus = plots.difference(*parts)
    if len(minus):
        figures.append((plots.MINUS, xrays.drawn(name, minus)))
    else:
        said += f" No {plots.MINUS}: the two have no layer in common here."
    made = plots.beside(figures, str(figures[0][1].layout.title.text))
    named = [p.assign(architecture=s.series) for s, p in zip(subjects, parts, strict=True)]
    return Drawing(made, pd.concat([*named, minus], ignore_index=True), said)


@view("start")
def concentration(ask: Source, link: Link) -> Drawing:
    """Whether attention concentrates, in which layers, and on what: the first position, nearness, or particular tokens."""
    return _answer(ask, link, "concentration")


@view("start")
def sinks(ask: Source, link: Link) -> Drawing:
    """Attention that every head gives to the first token, and how long that token's value is."""
    return _answer(ask, link, "sinks")


@view("start")
def token_share(ask: Source, link: Link) -> Drawing:
    """Share of the variance of values that the token alone explains."""
    return _answer(ask, link, "token_share")


@view("start")
def residual(ask: Source, link: Link) -> Drawing:
    """What is lost where deep values are replaced by their token's mean, and by zero."""
    return _answer(ask, link, "residual")


XRAY = {"concentration": concentration, "sinks": sinks, "token_share": token_share, "residual": residual}
"""The four views, by question."""

# ---- what is here ----------------------------------------------------------------------------------------------------


def table(ask: Source) -> pd.DataFrame:
    """A row for each run of the folder."""
    return pd.DataFrame(
        [
            {"run": e.name, "model": LABELS.get(e.series, e.series), "seed": e.seed, "state": _state(e),
             "trained to step": e.steps[-1] if e.steps else None, "checkpoints": len(e.steps), "measures": len(e.measured),
             "experiment": e.title}
            for e in ask.catalogue().entries
        ],
        columns=["run", "model", "seed", "state", "trained to step", "checkpoints", "measures", "experiment"],
    ).astype({"trained to step": "Int64"})  # fmt: skip


def _state(entry: Entry) -> str:
    if entry.being_written:
        return "being written now"
    if entry.kind == "recorded":
        return "recorded"
    return "finished" if entry.last in entry.steps else f"stopped before step {entry.last}"


# ---- verdicts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """A claim, what the stored records say of it, and which measures that it needs are not stored."""

    judged: Judged
    missing: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether the runs say something of it, if only that their seeds do not tell."""
        return self.judged.verdict.status in ("supported", "refuted", "unresolved")


def key(ask: Source, link: Link) -> tuple[Any, ...]:
    """What verdicts follow from: the finished runs of the experiment and when they last changed."""
    return ("verdicts", *((e.path, e.stamp) for e in _finished(ask, link)))


def _finished(ask: Source, link: Link) -> list[Entry]:
    found = [e for e in ask.group(link) if e.kind != "recorded" and (e.imported or e.last in e.steps)]
    if not found:
        raise BadData("no run of this experiment is finished yet, so there is nothing to judge")
    return found


def judgements(ask: Source, link: Link) -> tuple[Judgement, ...]:
    """Every claim judged from what the finished runs of the experiment hold; nothing is measured."""
    return ask.keep(key(ask, link), lambda: _judged(_finished(ask, link), ask.progress))


def _judged(entries: Sequence[Entry], progress: Callable[[int, int], None] | None) -> tuple[Judgement, ...]:
    from workbench.analysing import Judged, chosen, figure, stored

    total, claims = len(entries), chosen()

    def told(done: int, extra: int = 0) -> None:
        if progress is not None:
            progress(done + extra, total + len(claims))

    evidence = stored([Run.open(e.path) for e in entries], lambda done, _: told(done))
    there, found = set(evidence.records["metric"]), []
    for i, claim in enumerate(claims):
        verdict = claim.judge(evidence)
        found.append(Judgement(Judged(claim, verdict), tuple(m for m in claim.metrics if m not in there)))
        if found[-1].decided and not _compares(verdict.table):  # others are drawn from their intervals
            found[-1] = replace(found[-1], judged=Judged(claim, verdict, *figure(claim, verdict, evidence)))
        told(total, i + 1)
    return tuple(found)


def analysis(ask: Source, link: Link, question: str | None = None) -> str:
    """The command that measures what claims need and judges them."""
    entries, everything = ask.group(link), ask.catalogue().entries
    folder = Path(entries[0].path).parent
    stem = re.match(r"^[\w+.-]*?[-_]", entries[0].name)
    alike = [e.name for e in everything if stem and e.name.startswith(stem[0])]
    if len(entries) == len(everything):
        paths = shlex.quote(str(folder))
    elif alike == [e.name for e in entries]:
        paths = f"{shlex.quote(str(folder / stem[0]))}*" if stem else ""
    else:
        paths = " ".join(shlex.quote(e.path) for e in entries)
    return f"workbench analyze {paths}{f' --question {question}' if question else ''} --out results"


def verdict_table(found: Sequence[Judgement]) -> pd.DataFrame:
    """A row for each claim."""
    rows = [
        {"question": j.judged.claim.question, "claim": j.judged.claim.name, "says": j.judged.claim.text,
         "verdict": j.judged.verdict.said, "because": j.judged.verdict.sentence, "runs": len(j.judged.verdict.runs),
         "not measured": ", ".join(j.missing), "published": j.judged.claim.published, "source": j.judged.claim.source}
        for j in found
    ]  # fmt: skip
    return pd.DataFrame(rows)


@view("start")
def verdicts(ask: Source, link: Link) -> Drawing:
    """How many of the field's claims these runs support, refute or leave open, by question."""
    from workbench.claims import QUESTIONS

    _of(link, "verdicts")
    found = judgements(ask, link)
    statuses = [(QUESTIONS[j.judged.claim.question], j.judged.claim.name, j.judged.verdict.status) for j in found]
    under = f"{len(_finished(ask, link))} finished runs; from stored records alone; hover for the claims"
    return Drawing(plots.verdicts(statuses, under), verdict_table(found))


@view("start")
def verdict(ask: Source, link: Link) -> Drawing:
    """The numbers that one claim's verdict rests on: its figure, or the intervals that decide it."""
    _of(link, "verdicts")
    judged = claim(judgements(ask, link), link).judged
    figure, numbers = judged.figure, judged.verdict.table
    if _compares(numbers):
        figure = plots.intervals(numbers, judged.claim.name.replace("_", " ").capitalize(), judged.verdict.setting)
    elif figure is None:
        raise WorkbenchError("this claim has no figure here; its sentence says why")
    else:
        figure, numbers = go.Figure(figure), judged.shown  # the kept one is shared
    return Drawing(figure, numbers, judged.verdict.sentence)


def _compares(numbers: pd.DataFrame) -> bool:
    """Whether a verdict's table holds intervals."""
    return len(numbers) > 0 and {"comparison", "value", "low", "high"} <= set(numbers.columns)


def claim(found: Sequence[Judgement], link: Link) -> Judgement:
    """The chosen claim, or the first that is decided."""
    names = {j.judged.claim.name: j for j in found}
    asked = link.text("claim")
    if asked is None:
        return next((j for j in found if j.decided), found[0])
    if asked not in names:
        raise UnknownName("claim", asked, names)
    return names[asked]


# ---- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """How far a demo is; `running` is False once it is done or has gone quiet."""

    finished: bool
    running: bool
    ready: int
    planned: int
    left_s: float | None
    failed: dict[str, str]


def demo(folder: Path) -> Demo | None:
    """How far the demo of a folder is; None where none was started there, or its status cannot be read."""
    path = folder / STATUS
    try:
        told = read_json(path)
        newest = max([path.stat().st_mtime, *(p.stat().st_mtime for p in folder.glob("*/telemetry"))])
        left = told.get("left_s")
        return Demo(
            bool(told["finished"]), not told["finished"] and time.time() - newest <= QUIET, len(told["ready"]),
            len(told["models"]), None if left is None else float(left),
            {str(k): str(v) for k, v in dict(told["failed"]).items()},
        )  # fmt: skip
    except (WorkbenchError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def demo_runs(ask: Source, experiment: str) -> list[Entry]:
    """The demo's runs of one experiment, `race` or `text`, by the names it gives them."""
    return [e for e in ask.catalogue().entries if re.fullmatch(rf"{experiment}-.+-s\d+", e.name)]


def only_demo(ask: Source) -> bool:
    """Whether a demo was begun in the folder and nothing else is in it."""
    here = ask.catalogue().entries
    return demo(ask.folder) is not None and len(demo_runs(ask, "race")) + len(demo_runs(ask, "text")) == len(here)


def copying(ask: Source) -> pd.DataFrame:
    """The loss where copying works of the demo's race; empty before the first model has begun."""
    frame = ask.telemetry(demo_runs(ask, "race"), ["copy_loss"])
    return frame[frame["variant"].isna()]


@view("start")
def race(ask: Source, link: Link) -> Drawing:
    """The demo's race: when each model learns to copy."""
    _of(link, "demo")
    frame = copying(ask)
    if frame.empty:
        raise WorkbenchError("no model of the race has begun; the first curve appears within a minute of `make demo`")
    return Drawing(plots.race(frame), frame)


def _deep(ask: Source, metrics: Sequence[str]) -> pd.DataFrame:
    entries = demo_runs(ask, "text")
    key = ("deep", *metrics, *((e.path, e.series, e.stamp) for e in entries))
    return ask.keep(key, lambda: one_sample(ask.records(entries, metrics)))


@view("start")
def identity(ask: Source, link: Link) -> Drawing:
    """The demo's text models: how much of each layer's values is the token alone, before and after training."""
    _of(link, "demo")
    frame = _deep(ask, ["token_identity_share"])
    rows = frame[frame["site"].isin(["own_v", "v"]) & frame["control"].isna()]
    if rows.empty:
        raise WorkbenchError("measured once the first text model of the demo is trained")
    return Drawing(plots.plot(rows, form="profile"), rows)


@view("start")
def replaced(ask: Source, link: Link) -> Drawing:
    """The demo's text models: what is lost when deep values are replaced by their token's mean, or by zero."""
    _of(link, "demo")
    rows = _deep(ask, ["value_ablation"])
    if rows.empty:
        raise WorkbenchError("measured once the first text model of the demo is trained")
    return Drawing(plots.ablation(rows), rows)


def racers(ask: Source) -> list[Entry]:
    """Models of the race with checkpoints to look at."""
    return [e for e in demo_runs(ask, "race") if len(e.steps) > 1]


def pair(ask: Source, link: Link) -> tuple[list[Entry], list[int], int]:
    """Two models of the race, their common steps and the chosen one; raises `WorkbenchError` before there are any."""
    ready = racers(ask)
    if not ready:
        raise WorkbenchError("no model of the race has a checkpoint yet")
    names, found = {e.name: e for e in ready}, []
    for side, architecture in (("left", "svformer"), ("right", "transformer")):
        default = next((e.name for e in ready if e.architecture == architecture), ready[0].name)
        name = link.text(side, default)
        if name not in names:
            raise UnknownName("model of the race", str(name), names)
        found.append(names[str(name)])
    common = sorted(set(found[0].steps) & set(found[1].steps))
    step = link.whole("at", common[2 * len(common) // 3])
    if step not in common:
        raise WorkbenchError(f"the two models have no common checkpoint at step {step}; choose from {common}")
    return found, common, int(step)


@view("start")
def copying_heads(ask: Source, link: Link) -> Drawing:
    """Attention of the head that copies best after training, in two models of the race at one step."""
    _of(link, "demo")
    entries, _, step = pair(ask, link)
    maps, rows = [], []
    for entry in entries:
        layer, head = _best_head(ask, entry)
        subject = Subject(entry, step)
        kept = ask.from_kept("attention.window", "attention.keep", subject, None, layer=layer, head=head, most=256)
        name = f"{plots.label(entry.series)}, seed {entry.seed}: layer {layer}, head {head}"
        maps.append((name, kept.weights, ask.tokens(subject, None)))
        row, column = np.tril_indices(len(kept.weights))
        where = {"run": entry.name, "step": step, "layer": layer, "head": head, "query": row, "key": column}
        rows.append(pd.DataFrame({**where, "attention": kept.weights[row, column]}))
    under = f"the head that copies best after training, on one fixed sequence; training step {step}"
    return Drawing(
        plots.attention_pair(maps, "Attention of the copying head", under), pd.concat(rows, ignore_index=True)
    )


def _best_head(ask: Source, entry: Entry) -> tuple[int, int]:
    """(layer, head) with the highest induction score at the run's last step; the last layer's first where none is stored."""
    frame = ask.records([entry], ["induction_score"])
    rows = frame[(frame["step"] == entry.steps[-1]) & frame["variant"].isna() & frame["control"].isna()]
    if rows.empty:
        return entry.n_layers - 1, 0
    top = rows.sort_values("value").iloc[-1]
    return int(top["layer"]), int(top["head"])


def limits(ask: Source) -> list[str]:
    """What models of the demo's size cannot tell, a line each."""
    return findings.unresolved(_deep(ask, ["loss", "sink_mass", "sink_rate"]))
