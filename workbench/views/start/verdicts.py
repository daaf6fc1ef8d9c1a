"""What the finished runs of a folder, or of one experiment, decide of the field's claims, from stored records alone."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.claims import DECIDED, QUESTIONS, Claim, Verdict, all_verdicts
from workbench.claims.all_verdicts import Verdicts
from workbench.claims.judging import chosen, figure
from workbench.claims.verdict import expected_by_chance
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.runs.catalogue import Entry
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source
from workbench.views.start.parts import check_part

NOTHING_TESTED = "These runs test no claim: a verdict needs three seeds or more of the models that it compares."


@dataclass(frozen=True)
class Judgement:
    """A claim, what the stored records say of it, and which measures that it needs are not stored."""

    claim: Claim
    verdict: Verdict
    missing: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether the runs say something of it, if only that their seeds do not tell."""
        return self.verdict.status in DECIDED


def key(source: Source, link: Link) -> tuple[Any, ...]:
    """What verdicts follow from: the finished runs and when they last changed."""
    return ("verdicts", *((e.path, e.stamp) for e in _finished(source, link)))


def _looked_at(source: Source, link: Link) -> Sequence[Entry]:
    """The runs of the folder, of which a claim takes all settings that have what it asks for; or those of one experiment alone."""
    found = source.catalogue()
    return (
        source.group(link)
        if link.on("alone")
        else [e for e in found.entries if Path(found.folder) in Path(e.path).parents]
    )


def _finished(source: Source, link: Link) -> list[Entry]:
    finished = [e for e in _looked_at(source, link) if e.finished]
    if not finished:
        raise BadData("no run here is finished yet, so there is nothing to judge")
    return finished


def judgements(source: Source, link: Link) -> tuple[Judgement, ...]:
    """Every claim judged from what the finished runs hold; nothing is measured."""
    found = source.keep(key(source, link), lambda: _verdicts(source, link))
    source.problems.update(found.problems)
    return tuple(
        Judgement(c, found.of[c.name], tuple(m for m in c.metrics if m not in found.metrics)) for c in chosen()
    )


def _verdicts(source: Source, link: Link) -> Verdicts:
    """What is kept beside the runs of the folder, else judged now, and kept where the folder is the user's own."""
    entries, folder = _finished(source, link), Path(source.catalogue().folder)
    marked = "" if link.on("alone") else all_verdicts.mark(entries)
    found = all_verdicts.load(folder, marked) if marked else None
    if found is None:
        found = source.judge(entries)
        if marked and source.own():
            with contextlib.suppress(WorkbenchError):  # a folder that may only be read keeps none
                all_verdicts.save(folder, marked, found)
    return found


def command(source: Source, link: Link, question: str | None = None) -> str:
    """The command that measures what claims need and judges them."""
    entries, found = _looked_at(source, link), source.catalogue()
    everything, folder = found.entries, Path(entries[0].path).parent
    stem = re.match(r"^[\w+.-]*?[-_]", entries[0].name)
    alike = [e.name for e in everything if stem and e.name.startswith(stem[0])]
    if not link.on("alone") or len(entries) == len(everything):
        paths = shlex.quote(found.folder)
    elif alike == [e.name for e in entries]:
        paths = f"{shlex.quote(str(folder / stem[0]))}*" if stem else ""
    else:
        paths = " ".join(shlex.quote(e.path) for e in entries)
    return f"workbench analyze {paths}{f' --question {question}' if question else ''} --out results"


def table(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """A row for each claim."""
    rows = [
        {"question": j.claim.question, "claim": j.claim.name, "says": j.claim.text,
         "verdict": j.verdict.words, "because": j.verdict.sentence, "runs": len(j.verdict.runs),
         "not measured": ", ".join(j.missing), "published": j.claim.published, "source": j.claim.source}
        for j in judgements
    ]  # fmt: skip
    return pd.DataFrame(rows)


@view("start")
def verdicts(source: Source, link: Link) -> Drawing:
    """How many of the field's claims these runs support, refute or leave open, by question."""
    check_part(link, "verdicts")
    judged = judgements(source, link)
    statuses = [(QUESTIONS[j.claim.question], j.claim.name, j.verdict.status) for j in judged]
    under = f"{len(_finished(source, link))} finished runs; from stored records alone; click a claim to read it"
    found = [j.verdict for j in judged]
    tested = any(math.isfinite(v.p) for v in found)
    says = expected_by_chance(found) if tested else NOTHING_TESTED
    return Drawing(plots.verdicts(statuses, under), table(judged), says)


@view("start")
def verdict(source: Source, link: Link) -> Drawing:
    """The numbers that one claim's verdict rests on: its figure, or the intervals that decide it."""
    check_part(link, "verdicts")
    judged = claim(judgements(source, link), link)
    numbers = judged.verdict.table
    if _compares(numbers):
        title = judged.claim.name.replace("_", " ").capitalize()
        return Drawing(plots.intervals(numbers, title, judged.verdict.setting), numbers, judged.verdict.sentence)
    drawn, rows = source.keep((*key(source, link), judged.claim.name), lambda: _figure(source, link, judged))
    if drawn is None:
        raise WorkbenchError("this claim has no figure here; its sentence says why")
    return Drawing(go.Figure(drawn), rows, judged.verdict.sentence)  # the kept one is shared


def _figure(source: Source, link: Link, judged: Judgement) -> tuple[go.Figure | None, pd.DataFrame]:
    """What the claim is about, of the runs that its verdict compared."""
    from workbench.claims.stored import stored  # imports torch

    runs = set(judged.verdict.runs)
    evidence, _ = stored([e for e in _finished(source, link) if e.name in runs], **source.caches)
    return figure(judged.claim, judged.verdict, evidence)


def _compares(numbers: pd.DataFrame) -> bool:
    return len(numbers) > 0 and {"comparison", "value", "low", "high"} <= set(numbers.columns)


def claim(judgements: Sequence[Judgement], link: Link) -> Judgement:
    """The chosen claim, or the first that is decided."""
    names = {j.claim.name: j for j in judgements}
    chosen = link.text("claim")
    if chosen is None:
        return next((j for j in judgements if j.decided), judgements[0])
    if chosen not in names:
        raise UnknownName("claim", chosen, names)
    return names[chosen]
