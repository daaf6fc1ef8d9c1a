"""Views: functions of a source and a link that return a drawing, registered by `@view`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.views.page_links import Link

if TYPE_CHECKING:
    from workbench.views.source import Source


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, its table, and a sentence about it, as plain text."""

    figure: go.Figure
    table: pd.DataFrame
    sentence: str = ""

    def __post_init__(self) -> None:
        # the index of a part of a larger table would become a column in Arrow
        object.__setattr__(self, "table", self.table.reset_index(drop=True))


ONE_SEED = "1 seed: no statement about architectures"
"""Beside a comparison of two models of one seed."""
View = Callable[["Source", Link], Drawing]
VIEWS: dict[str, dict[str, View]] = {}


def view(page: str, named: str | None = None) -> Callable[[View], View]:
    """Register a view under its page and its function's name, or the one that links have; a name may be used once."""

    def register(function: View) -> View:
        of_page = VIEWS.setdefault(page, {})
        function.__name__ = name = named or function.__name__
        if name in of_page and of_page[name].__module__ != function.__module__:
            raise UnknownName(f"second view of page {page}", name, of_page)
        of_page[name] = function
        return function

    return register


def views_of(page: str, only: str | None = None) -> dict[str, View]:
    """Return the views of a page by name, or one of them."""
    import importlib

    importlib.import_module(f"workbench.views.{page}")
    views = VIEWS[page]
    if only is not None and only not in views:
        raise UnknownName(f"view of page {page}", only, views)
    return {only: views[only]} if only else dict(views)


def drawings(source: Source, link: Link, only: str | None = None) -> Iterator[tuple[str, Drawing]]:
    """Yield (name, drawing) of all views of the link's page, or of one."""
    for name, function in views_of(link.page, only).items():
        yield name, function(source, link)


def timelapse(
    function: View, source: Source, link: Link, progress: Callable[[int, int], None] | None = None
) -> Drawing:
    """Return a view at each checkpoint of model A as one animated figure.

    B follows A's step if both are selected at one step, and keeps its step otherwise. Raises `WorkbenchError` if fewer than two steps
    can be drawn, or all are equal.
    """
    subjects = source.subjects(link)
    steps, made, left = list(subjects[0].entry.steps), [], {}
    along = len(subjects) == 2 and subjects[0].step == subjects[1].step
    still = subjects[1].step if len(subjects) == 2 else None
    for i, step in enumerate(steps):
        try:
            made.append((f"step {step}", function(source, link.but(step=step, step_b=step if along else still))))
        except WorkbenchError as reason:  # this step was not measured
            left[step] = str(reason)
        if progress is not None:
            progress(i + 1, len(steps))
    why = f"step {', '.join(map(str, left))}: {next(iter(left.values()))}" if left else ""
    if len(made) < 2:
        raise WorkbenchError(f"only {len(made)} of {len(steps)} checkpoints can be drawn, too few to play; {why}")
    first = made[0][1].table
    if all(d.table.equals(first) for _, d in made):
        raise WorkbenchError("the figure is equal at every checkpoint of model A, so there is nothing to play")
    figure = plots.timelapse_figure([(label, drawing.figure) for label, drawing in made])
    table = pd.concat([d.table.assign(frame=label) for label, d in made], ignore_index=True)
    notes = [f"B stays at step {still}."] if still is not None and not along else []
    if left:
        notes.append(f"{len(left)} of {len(steps)} checkpoints cannot be drawn and are left out: {why}")
    return replace(made[-1][1], figure=figure, table=table, sentence=" ".join(notes))
