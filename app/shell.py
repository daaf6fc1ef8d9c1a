"""What every page has: its frame, its figures with their tables and files, and the drawer that says where they come from."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app import jobs, url
from app.selection import choose
from app.source import source, weights_stamp
from workbench import plots
from workbench.errors import BadData, WorkbenchError
from workbench.results import facts
from workbench.runs import BUILDERS
from workbench.views import Drawing, Link, Source
from workbench.views.base import View, timelapse
from workbench.views.source import IDS, LETTERS, PROMPTS, example

LONGEST_PROMPT = 100_000  # characters
MOST_FACTS = 500
FOLLOW_RUNS = ("training", "depth", "prompt", "intervene")
"""Pages whose figures follow from their link and the runs alone."""
OF_MODELS = ("attention", "prompt", "intervene")
"""Pages that ask models A and B, and no other run."""
DRAWINGS, MOST_KEPT = 96, 400_000  # figures kept, rows behind all of them
EMPTY = "No runs here yet: `make demo` trains and measures some, `workbench import` takes in your own checkpoints."


def page(name: str, title: str, about: str, body: Callable[[Link], None]) -> None:
    """Draw a page: its title, what it answers, the selection, the body and the drawer; what cannot be done is said instead."""
    st.title(title)
    link = choose(name)
    if link is None:
        st.info(EMPTY)
        return
    st.markdown(about)
    st.session_state["drawn"] = []
    try:
        body(link)
    except WorkbenchError as error:
        st.info(url.plain(error))
    except jobs.Running:
        pass
    _drawer(link)


def show(view: View, link: Link, *, long: str | None = None) -> Drawing | None:
    """A view with its table, its files and its time-lapse; None where it cannot be drawn (and why, on the page).

    `long`: what the work is called where it may take more than a moment; it then shows progress and can be cancelled.
    """
    name, ask = view.__name__, source()
    try:
        if long is None:
            drawing = _drawn(view, ask, link)
        else:
            drawing = jobs.run(("view", name, *_asked(ask, link)), long, lambda progress: _told(view, link, progress))
    except WorkbenchError as error:
        st.info(url.plain(error), icon=":material/info:")
        return None
    except jobs.Running:
        return None
    for run, why in ask.problems.items():
        st.warning(f"{url.plain(run)} is left out: {url.plain(why)}", icon=":material/broken_image:")
    _figure(drawing, name)
    if drawing.said:
        st.markdown(url.plain(drawing.said))
    _beneath(view, link, drawing, name)
    st.session_state["drawn"].append((name, drawing.table))
    return drawing


def ready(link: Link, label: str, question: Callable[[Source, Link], Any]) -> None:
    """Until what a question needs is computed and kept; meanwhile its progress stands on the page, and it can be cancelled."""

    def work(progress: Callable[[int, int], None]) -> None:
        ask = source()
        ask.progress = progress
        question(ask, link)

    jobs.run(("ready", label, *_asked(source(), link)), label, work)


@st.cache_resource(show_spinner=False)
def _drawings() -> OrderedDict[Any, tuple[Drawing, dict[str, str]]]:
    return OrderedDict()


def _asked(ask: Source, link: Link) -> tuple[Any, ...]:
    """What a kept answer answers: the link, on what it looks at as that is now: its models, or all runs of the folder."""
    if link.page in OF_MODELS:
        now: Any = tuple((s.entry.path, s.entry.stamp, s.step, weights_stamp(s)) for s in ask.subjects(link))
    else:
        now = hash(tuple((e.path, e.series, e.stamp) for e in ask.catalogue().entries))
    return str(ask.folder), str(link), now


def _drawn(view: View, ask: Source, link: Link) -> Drawing:
    """The drawing of a link, kept on the server as long as no run of the folder changes: building figures takes time too."""
    if link.page not in FOLLOW_RUNS:
        return view(ask, link)
    key, kept = (view.__name__, *_asked(ask, link)), _drawings()
    if (found := kept.get(key)) is not None:
        ask.problems.update(found[1])
        return found[0]
    drawing = view(ask, link)
    kept[key] = drawing, dict(ask.problems)
    while len(kept) > DRAWINGS or sum(len(d.table) for d, _ in list(kept.values())) > MOST_KEPT:
        with contextlib.suppress(KeyError):  # somebody else was as fast
            kept.popitem(last=False)
    return drawing


def _told(view: View, link: Link, progress: Callable[[int, int], None]) -> Drawing:
    ask = source()
    ask.progress = progress
    return view(ask, link)


def _figure(drawing: Drawing, key: str) -> None:
    figure = drawing.figure
    figure.update_layout(font_color=None, title_subtitle_font_color=None)  # the page's theme has its own
    st.plotly_chart(figure, width="stretch", key=f"figure_{key}", config=plots.CONFIG, alt=plots.alt_text(figure))


def _beneath(view: View, link: Link, drawing: Drawing, name: str) -> None:
    """Numbers, files, the command and the time-lapse of a figure; each made only when somebody asks."""
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
        view, ask = views[title], source()
        try:
            drawing = view(ask, link)
        except WorkbenchError as error:
            st.info(url.plain(error), icon=":material/info:")
            return
        _figure(drawing, view.__name__)
        if drawing.said:
            st.markdown(url.plain(drawing.said))
        _files(view, link, drawing, view.__name__)
        st.session_state["drawn"].append((view.__name__, drawing.table))


def _files(view: View, link: Link, drawing: Drawing, name: str) -> None:
    """Buttons first: what arrives later, such as the table, would move them from under somebody's click."""
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
        played = jobs.run(("timelapse", name, *_asked(source(), link)), "Drawing every checkpoint", work)
    except WorkbenchError as error:
        st.info(url.plain(error))
        return
    except jobs.Running:
        return
    figure = played.figure
    figure.update_layout(font_color=None, title_subtitle_font_color=None)
    st.plotly_chart(figure, width="stretch", key=f"lapse_{name}", config=plots.CONFIG, alt=plots.alt_text(figure))
    if played.said:
        st.markdown(url.plain(played.said))
    st.download_button(
        "Time-lapse (HTML)", lambda: plots.html(figure, whole=True), f"{name}-steps.html", "text/html",
        key=f"lapse_html_{name}", on_click="ignore",
    )  # fmt: skip
    st.code(command(link, f"--only {name} --play --out {name}.html"), language=None, wrap_lines=True)


def _lapse(view: View, link: Link, progress: Callable[[int, int], None]) -> Drawing:
    return timelapse(view, source(), link, progress)


def prompt_box(link: Link) -> Link:
    """The prompt, mirrored in the address; a long one is stored in the runs folder and linked by its hash."""
    ask = source()
    if "torch" not in sys.modules:
        with st.spinner("Loading the numerical libraries, once for each start of the server"):
            importlib.import_module("workbench.looks.prompt")
    entry = ask.subjects(link)[0].entry
    letters, default = entry.kind in LETTERS, example(entry)
    label = "Symbols; the model reads them twice in a row" if letters else "Text"
    label = "Token ids; this model came without a tokenizer" if default == IDS else label
    about = "Ctrl+Enter runs it. " + (
        "The demo's models learned to copy 32 symbols." if letters else "Long texts are stored."
    )
    url.prompt(label, default, about, ask.folder / PROMPTS, LONGEST_PROMPT)
    link = link.but(prompt=st.query_params.get("prompt"), stored=st.query_params.get("stored"))
    try:
        ask.prompt(link)
    except BadData:  # said above the box, which then shows what is used instead
        link = link.but(stored=None)
    return link


def command(link: Link, options: str) -> str:
    """What draws a link from a terminal; it names the folder of runs where that is not `./runs`."""
    folder = source().folder
    told = "" if folder == Path("runs").resolve() else f" --runs {shlex.quote(str(folder))}"
    first = f"{BUILDERS}={shlex.quote(builders)} " if (builders := os.environ.get(BUILDERS)) else ""
    return f'{first}workbench view "{link}" {options}{told}'


# ---- the drawer ------------------------------------------------------------------------------------------------------


def _drawer(link: Link) -> None:
    """Where this page's numbers come from, whether the models hold together, and how to have it all again."""
    drawer = st.expander("Where this comes from: command, provenance, self-check", icon=":material/receipt_long:",
                         on_change="rerun", key="drawer")  # fmt: skip
    if not drawer.open:
        return
    with drawer:
        st.markdown("**Command.** Draws this page as one offline file, from the same link:")
        st.code(command(link, f"--out {link.page}.html"), language=None, wrap_lines=True)
        st.markdown("**Provenance** of the numbers on this page: weights, data and code they were measured with.")
        known = provenance([table for _, table in st.session_state["drawn"]])
        if known.empty:
            st.caption("Nothing on this page was read from stored records.")
        else:
            st.dataframe(known, hide_index=True, width="stretch", key="provenance", alt="Provenance of the numbers")
        st.markdown("**Self-check** of the chosen models: whether what they compute adds up.")
        if st.toggle("Run it", key="self_check"):
            _self_check(link)


def provenance(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The distinct facts behind records, one row for each run, step and measure."""
    rows: dict[str, dict[str, Any]] = {}
    for table in tables:
        if "provenance" not in table:
            continue
        asked = [c for c in ("run", "step", "provenance") if c in table]
        for row in table.loc[table["provenance"].notna(), asked].drop_duplicates().head(MOST_FACTS).to_dict("records"):
            fact = {"run": row.get("run"), "step": row.get("step")} | facts(row["provenance"])
            first = {k: fact.pop(k) for k in ("run", "step", "metric", "weights", "data") if fact.get(k) is not None}
            fact.pop("key", None)
            rows.setdefault(json.dumps(first | fact, sort_keys=True, default=str), first | fact)
    return pd.DataFrame([{k: str(v) for k, v in fact.items()} for fact in rows.values()])


def _self_check(link: Link) -> None:
    ask = source()
    for subject in ask.subjects(link):
        try:
            found = ask.look("checking.check", subject, ask.prompt(link))
        except WorkbenchError as error:
            st.info(url.plain(f"{subject.title}: {error}"))
            continue
        st.markdown(f"{url.plain(subject.title)}")
        st.dataframe(found, hide_index=True, width="stretch", key=f"check_{subject.tag}", alt="Self-check of a model")
