"""What A and B answer to one question about a prompt that is changed, and the bars of the tokens they then expect."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pandas as pd
from plotly.subplots import make_subplots

from workbench import plots, prompts
from workbench.errors import BadData, WorkbenchError
from workbench.plots.style import BARS, at_least, pale
from workbench.views.base import Drawing
from workbench.views.link import Link
from workbench.views.source import Source, Subject, read_alike

T = TypeVar("T")
MAX_TOKENS = 14
AXIS, EACH = 80, 18  # pixels: of the axis below, of a token's bars
Answers = tuple[list[tuple[Subject, T]], list[str]]


def answers_of(source: Source, link: Link, question: Callable[[Subject], T]) -> Answers[T]:
    """The answers about A and B, and why one of them has none; raises where neither has."""
    answers, refused = list[tuple[Subject, T]](), list[str]()
    subjects = source.subjects(link)
    for subject in subjects:
        try:
            answers.append((subject, question(subject)))
        except WorkbenchError as reason:
            if len(subjects) == 1 or len(refused) == 1:
                raise
            refused.append(f"{subject.title} is left out: {reason}")
    return answers, refused


def second(link: Link) -> str:
    """The second prompt; raises `BadData` where there is none."""
    text = link.text("other")
    if not text:
        raise BadData("this edit takes something from a second prompt: give one")
    return text


def likeliest(
    answers: Sequence[tuple[Subject, prompts.Effect]], refused: Sequence[str], title: str, change: str,
    most: int = MAX_TOKENS,
) -> Drawing:  # fmt: skip
    """Bars of the `most` likeliest next tokens of each model; `change`: what was changed, in words, where anything was."""
    tops = [[e.top_before.head(most - most // 3), e.top_after, e.top_before] for _, e in answers]
    own = [pd.concat(top).drop_duplicates("id").head(most) for top in tops]
    alike = (
        len(answers) == 2
        and len({len(e.before) for _, e in answers}) == 1
        and read_alike(*(s.entry for s, _ in answers))
    )
    if alike:  # the same tokens of both, so that they can be compared
        both = pd.concat([r.head(most // 2) for r in own]).drop_duplicates("id")
        own = [both.assign(before=e.before[both["id"]], after=e.after[both["id"]]) for _, e in answers]
    panels = [(s.title, s.series, rows.assign(model=s.title)) for (s, _), rows in zip(answers, own, strict=True)]
    if alike:
        a, b = (rows[["before", "after"]] for _, _, rows in panels)
        panels.append((plots.MINUS, plots.MINUS, panels[0][2].assign(model=plots.MINUS, **(a - b))))
    figure = make_subplots(
        1, len(panels), subplot_titles=[html.escape(p[0]) for p in panels] if len(panels) > 1 else None,
        horizontal_spacing=0.04 if alike else 0.16,
    )  # fmt: skip
    for column, (name, series, rows) in enumerate(panels, 1):
        names = plots.unique([html.escape(str(t), quote=False) for t in rows["text"]])
        bars = {"before": pale(series, 0.4), "after": plots.colour(series)}
        for when, colour in bars.items() if change else [("after", bars["after"])]:
            figure.add_bar(
                y=names, x=rows[when], orientation="h", name=f"{name}, {when}", marker_color=colour, showlegend=False,
                hovertemplate=f"%{{y}}: %{{x:.2%}} {when * bool(change)}<extra></extra>", row=1, col=column,
            )  # fmt: skip
        shared = {"matches": "x"} if column > 1 and name != plots.MINUS else {}
        unit = f"probability, {plots.MINUS}" if name == plots.MINUS else "probability"
        figure.update_xaxes(title_text=unit, tickformat=".0%", row=1, col=column, **shared)
        figure.update_yaxes(showticklabels=column == 1 or not alike, row=1, col=column)
    figure.update_yaxes(autorange="reversed", type="category")
    bars_say = f"pale: before; full: after; {change}; " if change else ""
    plots.dressed(figure, title, f"{alone(answers)}{bars_say}one text", AXIS + EACH * most)
    if len(panels) > 1:
        at_least(figure, BARS * len(panels))
    table = pd.concat([rows for _, _, rows in panels], ignore_index=True)
    return Drawing(figure, table, ". ".join(refused))


def alone(answers: Sequence[tuple[Subject, Any]]) -> str:
    """The model of a figure of one, which no legend names."""
    return f"{html.escape(answers[0][0].title)}; " if len(answers) == 1 else ""
