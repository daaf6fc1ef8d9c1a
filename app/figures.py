"""A view on a page: its figure, its sentence and its menu; figures are kept on the server."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pandas as pd
import streamlit as st

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.views import Drawing, Link, Source
from workbench.views.base import View

from . import background, widgets
from .cached_source import cached_source, weights_stamp
from .elements import figure as element
from .figure_menu import menu

FOLLOW_RUNS = ("training", "depth", "heads", "prompt", "intervene")
"""Pages whose figures follow from their link and the runs alone."""
OF_MODELS = ("attention", "prompt", "intervene")
"""Pages that read models A and B, and no other run."""
MAX_DRAWINGS, MAX_BYTES = 96, 120_000_000  # figures kept, bytes of the tables behind them


def show(
    view: View, link: Link, *, about: str = "", long: str | None = None, take: element.Take | None = None
) -> Drawing | None:
    """A view with its menu; None where it cannot be drawn (and why, on the page).

    `about`: how the figure is read, for its menu. `long`: what the work is called where it may take more than a moment; it then
    shows progress and can be cancelled. `take`: called with a point that is clicked.
    """
    name, source = view.__name__, cached_source()
    try:
        if long is None:
            drawing = _drawn(view, source, link)
        else:
            drawing = background.run(
                ("view", name, *_state(source, link)), long, lambda progress: _with_progress(view, link, progress)
            )
    except WorkbenchError as error:
        st.info(widgets.escaped(error), icon=":material/info:")
        return None
    except background.Running:
        return None
    said = {run for earlier in st.session_state["drawn"] for run in earlier.problems}
    for run, why in source.problems.items():
        if run not in said:  # once on a page
            st.warning(f"{widgets.escaped(run)} is left out: {widgets.escaped(why)}", icon=":material/broken_image:")
    _whole(view, link, drawing, dict(source.problems), about, take)
    return drawing


@dataclass(frozen=True)
class Drawn:
    """What stands on the page: the link it was drawn from, its numbers, and why runs were left out of it."""

    link: Link
    table: pd.DataFrame
    problems: Mapping[str, str]


def ready(link: Link, label: str, question: Callable[[Source, Link], Any]) -> None:
    """Until what a question needs is computed and kept; meanwhile its progress stands on the page, and it can be cancelled."""
    work = functools.partial(_with_progress, question, link)
    background.run(("ready", label, *_state(cached_source(), link)), label, work)


@st.cache_resource(show_spinner=False)
def _drawings() -> OrderedDict[Any, tuple[Drawing, dict[str, str]]]:
    return OrderedDict()


def _state(source: Source, link: Link) -> tuple[Any, ...]:
    """What a kept drawing depends on: the link, and its models, or all runs of the folder, as they are now."""
    if link.page in OF_MODELS:
        now: Any = tuple((s.entry.path, s.entry.stamp, s.step, weights_stamp(s)) for s in source.subjects(link))
    else:
        now = source.catalogue().stamp
    return str(source.folder), str(link), now


def _drawn(view: View, source: Source, link: Link) -> Drawing:
    """The drawing of a link, kept on the server as long as no run of the folder changes: building figures takes time too."""
    if link.page not in FOLLOW_RUNS:
        return view(source, link)
    key, kept = (view.__name__, *_state(source, link)), _drawings()
    if key in kept:
        drawing, problems = kept[key]
        source.problems.update(problems)
        return drawing
    drawing = view(source, link)
    kept[key] = drawing, dict(source.problems)
    while len(kept) > MAX_DRAWINGS or (len(kept) > 1 and _bytes([d.table for d, _ in list(kept.values())]) > MAX_BYTES):
        with contextlib.suppress(KeyError):  # another visitor was as fast
            kept.popitem(last=False)
    return drawing


def _bytes(tables: Iterable[pd.DataFrame]) -> int:
    """Of tables of which some may be one."""
    return sum(int(table.memory_usage(index=False).sum()) for table in {id(t): t for t in tables}.values())


def _with_progress(view: Callable[[Source, Link], Any], link: Link, progress: background.Progress) -> Any:
    source = cached_source()
    source.progress = progress
    return view(source, link)


@dataclass(frozen=True)
class Sent:
    """A drawing as a page shows it: its words, which wrap in any window, and what the figure element gets."""

    title: str
    under: str
    figure: bytes


_sent: WeakKeyDictionary[Drawing, Sent] = WeakKeyDictionary()
"""Of drawings that are kept: packing a figure takes time too."""


def _packed(drawing: Drawing, clicked: bool) -> Sent:
    if drawing not in _sent:
        figure = drawing.figure.update_layout(
            font_color=None, title_subtitle_font_color=None
        )  # the page has its own ink
        _sent[drawing] = Sent(*plots.untitled(figure), element.packed(figure, clicked))
    return _sent[drawing]


def chart(
    drawing: Drawing, key: str, take: element.Take | None = None, corner: Callable[[], None] | None = None
) -> None:
    """A figure under its words; `take` as of `show`, `corner` draws what stands beside the title."""
    sent = _packed(drawing, take is not None)
    with st.container(key=f"above_{key}", horizontal=True, horizontal_alignment="right"):
        if sent.title:
            st.header(widgets.escaped(sent.title), anchor=False)
        if corner is not None:
            corner()
    if sent.under:
        st.caption(widgets.escaped(sent.under))
    element.draw(sent.figure, key, take)


def _whole(
    view: View,
    link: Link,
    drawing: Drawing,
    problems: Mapping[str, str],
    about: str = "",
    take: element.Take | None = None,
) -> None:
    """A figure, its menu in its corner, and the sentence that reads it."""
    name = view.__name__
    state = (name, *_state(cached_source(), link))
    with st.container(key=f"whole_{name}", gap=None):
        chart(drawing, f"figure_{name}", take, lambda: menu(view, link, drawing, about, state, chart))
        if drawing.sentence:
            st.markdown(widgets.escaped(drawing.sentence))
    st.session_state["drawn"].append(Drawn(link, drawing.table, problems))


def files(views: dict[str, View], link: Link) -> None:
    """Views, by their titles, that the page draws itself: one of them as a figure with its menu."""
    panel = st.expander("As figures, with their numbers and files", on_change="rerun", key="open_files")
    if not panel.open:
        return
    with panel:
        title = st.selectbox("Figure", list(views), key="w_files")
        try:
            drawing = views[title](cached_source(), link)
        except WorkbenchError as error:
            st.info(widgets.escaped(error), icon=":material/info:")
            return
        _whole(views[title], link, drawing, {})
