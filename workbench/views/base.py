"""How a view is registered: `@view` on a function of a source and a link that returns a drawing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.views.link import Link

if TYPE_CHECKING:
    from workbench.views.source import Source


@dataclass(frozen=True)
class Drawing:
    """A figure, the table behind it, and a sentence that reads it, as plain text."""

    figure: go.Figure
    table: pd.DataFrame
    said: str = ""


View = Callable[["Source", Link], Drawing]
VIEWS: dict[str, dict[str, View]] = {}


def view(page: str) -> Callable[[View], View]:
    """Register a view under its page and its function's name; a name may be used once."""

    def register(function: View) -> View:
        of_page = VIEWS.setdefault(page, {})
        name = function.__name__
        if name in of_page and of_page[name].__module__ != function.__module__:
            raise UnknownName(f"second view of page {page}", name, of_page)
        of_page[name] = function
        return function

    return register


def drawings(ask: Source, link: Link, only: str | None = None) -> Iterator[tuple[str, Drawing]]:
    """(name, drawing) of all views of the link's page, or of one; raises `UnknownName` for another."""
    import importlib

    importlib.import_module(f"workbench.views.{link.page}")
    found = VIEWS[link.page]
    if only is not None and only not in found:
        raise UnknownName(f"view of page {link.page}", only, found)
    for name in [only] if only else found:
        yield name, found[name](ask, link)


def timelapse(function: View, ask: Source, link: Link, progress: Callable[[int, int], None] | None = None) -> Drawing:
    """A view at each step that model A has a checkpoint of, as one figure that plays; B goes along where it has the step."""
    steps, made = list(ask.subjects(link)[0].entry.steps), []
    for i, step in enumerate(steps):
        with contextlib.suppress(WorkbenchError):  # not every step was measured
            made.append((f"step {step}", function(ask, link.but(step=step, step_b=None))))
        if progress is not None:
            progress(i + 1, len(steps))
    if len(made) < 2:
        raise WorkbenchError(f"only {len(made)} of {len(steps)} checkpoints can be drawn here, too few to play")
    figure = plots.timelapse([(label, drawing.figure) for label, drawing in made])
    table = pd.concat([d.table.assign(frame=label) for label, d in made], ignore_index=True)
    left = len(steps) - len(made)
    said = f"{left} of {len(steps)} checkpoints cannot be drawn here and are left out." if left else ""
    return replace(made[-1][1], figure=figure, table=table, said=said)
