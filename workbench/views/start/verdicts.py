"""What the finished runs of an experiment decide of the field's claims, from stored records alone."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source
from workbench.views.start.parts import check_part

if TYPE_CHECKING:
    from workbench.claims.analysis import Judged

NOTHING_TESTED = "These runs test no claim: a verdict needs three seeds or more of the models that it compares."


@dataclass(frozen=True)
class Judgement:
    """A claim, what the stored records say of it, and which measures that it needs are not stored."""

    judged: Judged
    missing: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether the runs say something of it, if only that their seeds do not tell."""
        return self.judged.verdict.status in ("supported", "refuted", "unresolved")


def key(source: Source, link: Link) -> tuple[Any, ...]:
    """What verdicts follow from: the finished runs of the experiment and when they last changed."""
    return ("verdicts", *((e.path, e.stamp) for e in _finished(source, link)))


def _looked_at(source: Source, link: Link) -> Sequence[Entry]:
    """The runs of the experiment, or of all: a claim then takes the settings of the folder that have what it asks for."""
    return source.catalogue().entries if link.on("all") else source.group(link)


def _finished(source: Source, link: Link) -> list[Entry]:
    finished = [e for e in _looked_at(source, link) if e.finished]
    if not finished:
        raise BadData("no run of this experiment is finished yet, so there is nothing to judge")
    return finished


def judgements(source: Source, link: Link) -> tuple[Judgement, ...]:
    """Every claim judged from what the finished runs of the experiment hold; nothing is measured."""
    judged, problems = source.keep(key(source, link), lambda: _judged(_finished(source, link), source.progress))
    source.problems.update(problems)
    return judged


def _judged(
    entries: Sequence[Entry], progress: Callable[[int, int], None] | None
) -> tuple[tuple[Judgement, ...], dict[str, str]]:
    from workbench.claims.analysis import Judged, chosen, figure
    from workbench.claims.collect import stored
    from workbench.claims.verdict import corrected

    total, claims = len(entries), chosen()

    def report(done: int, extra: int = 0) -> None:
        if progress is not None:
            progress(done + extra, total + len(claims))

    evidence, problems = stored([Run.open(e.path) for e in entries], lambda done, _: report(done))
    stored_metrics, judged, alone = set(evidence.records["metric"]), list[Judgement](), []
    for i, claim in enumerate(claims):
        alone.append(claim.judge(evidence))
        report(total, i + 1)
    for claim, verdict in zip(claims, corrected(alone), strict=True):
        judged.append(Judgement(Judged(claim, verdict), tuple(m for m in claim.metrics if m not in stored_metrics)))
        if judged[-1].decided and not _compares(verdict.table):  # others are drawn from their intervals
            judged[-1] = replace(judged[-1], judged=Judged(claim, verdict, *figure(claim, verdict, evidence)))
    return tuple(judged), problems


def command(source: Source, link: Link, question: str | None = None) -> str:
    """The command that measures what claims need and judges them."""
    entries, everything = _looked_at(source, link), source.catalogue().entries
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


def table(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """A row for each claim."""
    rows = [
        {"question": j.judged.claim.question, "claim": j.judged.claim.name, "says": j.judged.claim.text,
         "verdict": j.judged.verdict.words, "because": j.judged.verdict.sentence, "runs": len(j.judged.verdict.runs),
         "not measured": ", ".join(j.missing), "published": j.judged.claim.published, "source": j.judged.claim.source}
        for j in judgements
    ]  # fmt: skip
    return pd.DataFrame(rows)


@view("start")
def verdicts(source: Source, link: Link) -> Drawing:
    """How many of the field's claims these runs support, refute or leave open, by question."""
    from workbench.claims import QUESTIONS
    from workbench.claims.verdict import expected_by_chance

    check_part(link, "verdicts")
    judged = judgements(source, link)
    statuses = [(QUESTIONS[j.judged.claim.question], j.judged.claim.name, j.judged.verdict.status) for j in judged]
    under = f"{len(_finished(source, link))} finished runs; from stored records alone; click a claim to read it"
    found = [j.judged.verdict for j in judged]
    tested = any(math.isfinite(v.p) for v in found)
    says = expected_by_chance(found) if tested else NOTHING_TESTED
    return Drawing(plots.verdicts(statuses, under), table(judged), says)


@view("start")
def verdict(source: Source, link: Link) -> Drawing:
    """The numbers that one claim's verdict rests on: its figure, or the intervals that decide it."""
    check_part(link, "verdicts")
    judged = claim(judgements(source, link), link).judged
    figure, numbers = judged.figure, judged.verdict.table
    if _compares(numbers):
        figure = plots.intervals(numbers, judged.claim.name.replace("_", " ").capitalize(), judged.verdict.setting)
    elif figure is None:
        raise WorkbenchError("this claim has no figure here; its sentence says why")
    else:
        figure, numbers = go.Figure(figure), judged.shown  # the kept one is shared
    return Drawing(figure, numbers, judged.verdict.sentence)


def _compares(numbers: pd.DataFrame) -> bool:
    return len(numbers) > 0 and {"comparison", "value", "low", "high"} <= set(numbers.columns)


def claim(judgements: Sequence[Judgement], link: Link) -> Judgement:
    """The chosen claim, or the first that is decided."""
    names = {j.judged.claim.name: j for j in judgements}
    chosen = link.text("claim")
    if chosen is None:
        return next((j for j in judgements if j.decided), judgements[0])
    if chosen not in names:
        raise UnknownName("claim", chosen, names)
    return names[chosen]
