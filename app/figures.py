"""A view on a page: its figure, sentence, table, files, command and time-lapse; figures are kept on the server."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from app import background, widgets
from app.cached_source import cached_source, weights_stamp
from workbench import plots
from workbench.checkpoints.identify import BUILDERS
from workbench.errors import WorkbenchError
from workbench.views import Drawing, Link, Source
from workbench.views.base import View, timelapse

FOLLOW_RUNS = ("training", "depth", "prompt", "intervene")
"""Pages whose figures follow from their link and the runs alone."""
OF_MODELS = ("attention", "prompt", "intervene")
"""Pages that read models A and B, and no other run."""
MAX_DRAWINGS, MAX_ROWS = 96, 400_000  # figures kept, rows behind all of them


def show(view: View, link: Link, *, long: str | None = None) -> Drawing | None:
    """A view with its table, its files and its time-lapse; None where it cannot be drawn (and why, on the page).

    `long`: what the work is called where it may take more than a moment; it then shows progress and can be cancelled.
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
    for run, why in source.problems.items():
        st.warning(f"{widgets.escaped(run)} is left out: {widgets.escaped(why)}", icon=":material/broken_image:")
    _figure(drawing, f"figure_{name}")
    _beneath(view, link, drawing, name)
    st.session_state["drawn"].append((name, drawing.table))
    return drawing


def command(link: Link, options: str) -> str:
    """What draws a link from a terminal; it names the folder of runs where that is not `./runs`."""
    folder = cached_source().folder
    runs = "" if folder == Path("runs").resolve() else f" --runs {shlex.quote(str(folder))}"
    first = f"{BUILDERS}={shlex.quote(builders)} " if (builders := os.environ.get(BUILDERS)) else ""
    return f'{first}workbench view "{link}" {options}{runs}'


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
        now = hash(tuple((e.path, e.series, e.stamp) for e in source.catalogue().entries))
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
    while len(kept) > MAX_DRAWINGS or sum(len(d.table) for d, _ in list(kept.values())) > MAX_ROWS:
        with contextlib.suppress(KeyError):  # another visitor was as fast
            kept.popitem(last=False)
    return drawing


def _with_progress(view: Callable[[Source, Link], Any], link: Link, progress: background.Progress) -> Any:
    source = cached_source()
    source.progress = progress
    return view(source, link)


def _figure(drawing: Drawing, key: str) -> None:
    figure = drawing.figure
    figure.update_layout(font_color=None, title_subtitle_font_color=None)  # the page's theme has its own
    st.plotly_chart(figure, width="stretch", key=key, config=plots.CONFIG, alt=plots.alt_text(figure))
    if drawing.sentence:
        st.markdown(widgets.escaped(drawing.sentence))


def _beneath(view: View, link: Link, drawing: Drawing, name: str) -> None:
    """Numbers, files, the command and the time-lapse of a figure; each made only when the panel is open."""
    panel = st.expander("Numbers, files, command, time-lapse", on_change="rerun", key=f"open_{name}")
    if panel.open:
        with panel:
            _files(view, link, drawing, name)


def files(views: dict[str, View], link: Link) -> None:
    """Views, by their titles, that the page draws itself: one of them as a figure with its numbers, files and time-lapse."""
    panel = st.expander("As figures: numbers, files, command, time-lapse", on_change="rerun", key="open_files")
    if not panel.open:
        return
    with panel:
        title = st.selectbox("Figure", list(views), key="w_files")
        view, source = views[title], cached_source()
        try:
            drawing = view(source, link)
        except WorkbenchError as error:
            st.info(widgets.escaped(error), icon=":material/info:")
            return
        _figure(drawing, f"figure_{view.__name__}")
        _files(view, link, drawing, view.__name__)
        st.session_state["drawn"].append((view.__name__, drawing.table))


def _files(view: View, link: Link, drawing: Drawing, name: str) -> None:
    """Buttons first: what arrives later, such as the table, would move them from under a visitor's click."""
    left, middle, right = st.columns(3)
    left.download_button(
        "Numbers (CSV)", lambda: plots.table(drawing.table).to_csv(index=False), f"{name}.csv", "text/csv",
        key=f"csv_{name}", on_click="ignore", width="stretch",
    )  # fmt: skip
    middle.download_button(
        "Figure (HTML)", lambda: plots.html(drawing.figure, whole=True), f"{name}.html", "text/html",
        key=f"html_{name}", on_click="ignore", width="stretch",
    )  # fmt: skip
    play = right.toggle("Play over checkpoints", key=f"play_{name}")
    st.caption(
        "The same from a terminal; the ending of the file decides: .svg and .png for papers, .parquet, .csv, .html"
    )
    st.code(command(link, f"--only {name} --out {name}.svg"), language=None, wrap_lines=True)
    if play:
        _play(view, link, name)
    st.dataframe(
        plots.table(drawing.table), width="stretch", hide_index=True, key=f"table_{name}",
        alt=f"Table of: {plots.alt_text(drawing.figure)[:300]}",
    )  # fmt: skip


def _play(view: View, link: Link, name: str) -> None:
    work = functools.partial(_lapse, view, link)
    try:
        played = background.run(("timelapse", name, *_state(cached_source(), link)), "Drawing every checkpoint", work)
    except WorkbenchError as error:
        st.info(widgets.escaped(error))
        return
    except background.Running:
        return
    _figure(played, f"lapse_{name}")
    st.download_button(
        "Time-lapse (HTML)", lambda: plots.html(played.figure, whole=True), f"{name}-steps.html", "text/html",
        key=f"lapse_html_{name}", on_click="ignore",
    )  # fmt: skip
    st.code(command(link, f"--only {name} --play --out {name}.html"), language=None, wrap_lines=True)


def _lapse(view: View, link: Link, progress: background.Progress) -> Drawing:
    return timelapse(view, cached_source(), link, progress)
