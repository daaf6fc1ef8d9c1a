"""A view on a page: its figure, its sentence, and a menu with its files, link, command, definition, numbers and time-lapse."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import pandas as pd
import streamlit as st

from workbench import plots
from workbench.environment import BUILDERS, variable
from workbench.errors import WorkbenchError
from workbench.plots.comparisons_and_animations import AXES
from workbench.plots.image_export import find_browser
from workbench.plots.style import plain
from workbench.statistics.intervals import confidence, over_seeds
from workbench.views import Drawing, Link, Source, depth, pins
from workbench.views.registered_views import View, timelapse
from workbench.views.source import OF_PROMPTS, checkpoint_key
from workbench.views.token_names import number
from workbench.views.writing import COLUMN, PAGE, caption_of, fits, picture

from . import background_tasks
from . import url_widgets as widgets
from .cached_source import cached_source
from .elements import figure as element
from .measure_selection import definition_of
from .tables import number_columns, table_buttons

FOLLOW_RUNS = ("start", "training", "depth", "heads", "prompt", "intervene")
"""Pages whose figures follow from their link and the runs alone."""
MAX_DRAWINGS, MAX_BYTES = 96, 120_000_000  # figures kept, bytes of the tables behind them
NO_BROWSER = "Needs Chrome, Chromium or Edge on the machine that runs the dashboard"
TABLE_PX, NUMBER_PX = 300, 76  # height of the table of numbers, width of a column of it
ROW_NAMES = ("architecture", "layer", "head", "position", "step", "control")
NUMBERS = ("value", "low", "high", "low_adjusted", "high_adjusted", "p, adjusted", "p, raw", "n", "significant")
LAST = ("comparison", "run", "seeds", "each")
"""Columns of the table of numbers: the first ones, those after them, and the last ones, which repeat others or are long."""
IN_WORDS = {"T": "tokens per document", "n": "documents", "se": "standard error", "baseline_of": "kind of baseline"}
"""Columns in words, under the table."""
P_VALUES = {"p": "p, adjusted", "p_unadjusted": "p, raw"}
WIDTHS = {f"Single column ({COLUMN} mm)": COLUMN, f"Double column ({PAGE} mm)": PAGE}
CHIP = re.compile(r"T = [\d, ]+|n = [\d to]+ documents|[\d to]+ seeds?( per model)?")
SETTING, PALE = re.compile(r"\d+(?: to \d+)? seeds? of \d+ models?, "), re.compile("pale bars")
"""Parts of a subtitle that the page says elsewhere: the setting of a verdict, and bars where there are single numbers."""
CHIPS = {
    "T = ": "Tokens of each document", "documents": "Documents that are measured",
    "seed": "Trained models of each architecture, each with its own initial weights and batches; one says nothing about architectures",
}  # fmt: skip
"""Parts of a subtitle that are shown as chips: a word of them, and what it means."""


@dataclass(frozen=True)
class Drawn:
    """A drawing on the page: its link, its numbers, and why runs were left out."""

    link: Link
    table: pd.DataFrame
    problems: Mapping[str, str]


def show(
    view: View, link: Link, *, about: str = "", note: str = "", long: str | None = None,
    take: element.Take | None = None,
) -> Drawing | None:  # fmt: skip
    """Draw a view with its menu; if it cannot be drawn, show the reason and return None.

    Args:
        about: How the figure is read, for its menu.
        note: What the figure's caption begins with.
        long: Name of the work if it may take more than a moment; it then shows progress and can be cancelled.
        take: Called with a clicked point.
    """
    source = cached_source()
    try:
        if long is None:
            drawing = _drawn(view, source, link)
        else:
            key, work = ("view", view.__name__, *_state(source, link)), functools.partial(_with_progress, view, link)
            drawing = background_tasks.run(key, long, work)
    except WorkbenchError as error:
        st.info(widgets.escaped(error), icon=":material/info:")
        return None
    except background_tasks.Running:
        return None
    named = {run for earlier in st.session_state["drawn"] for run in earlier.problems}
    for run, why in source.problems.items():
        if run not in named:  # once on a page
            st.warning(f"{widgets.escaped(run)} is left out: {widgets.escaped(why)}", icon=":material/broken_image:")
    _with_menu(view, link, drawing, dict(source.problems), about, take, note)
    return drawing


def ready(link: Link, label: str, question: Callable[[Source, Link], Any]) -> None:
    """Show progress and raise `Running` until the answers that a question needs are computed."""
    work = functools.partial(_with_progress, question, link)
    background_tasks.run(("ready", label, *_state(cached_source(), link)), label, work)


def _with_progress(view: Callable[[Source, Link], Any], link: Link, progress: background_tasks.Progress) -> Any:
    source = cached_source()
    source.progress = progress
    return view(source, link)


@st.cache_resource(show_spinner=False)
def _drawings() -> OrderedDict[Any, tuple[Drawing, dict[str, str], int]]:
    return OrderedDict()


def _state(source: Source, link: Link) -> tuple[Any, ...]:
    """The state that a drawing depends on: the link, and its models or all runs of the folder."""
    if link.page in OF_PROMPTS:
        now: Any = tuple((s.entry.stamp, checkpoint_key(s)) for s in source.subjects(link))
    else:
        now = source.catalogue().stamp
    return str(source.folder), str(link), now


def _drawn(view: View, source: Source, link: Link) -> Drawing:
    if link.page not in FOLLOW_RUNS or link.text("path"):  # files of others change unnoticed
        return view(source, link)
    key, kept = (view.__name__, *_state(source, link)), _drawings()
    if key in kept:
        drawing, problems, _ = kept[key]
        source.problems.update(problems)
        return drawing
    drawing = view(source, link)
    size = int(drawing.table.memory_usage(index=False).sum())
    kept[key] = drawing, dict(source.problems), size
    # a table of several drawings counts once
    while len(kept) > MAX_DRAWINGS or sum({id(d.table): n for d, _, n in list(kept.values())}.values()) > MAX_BYTES:
        if len(kept) < 2:
            break
        with contextlib.suppress(KeyError):  # another visitor was as fast
            kept.popitem(last=False)
    return drawing


_sent: WeakKeyDictionary[Drawing, tuple[str, str, bytes]] = WeakKeyDictionary()
"""Title, subtitle and packed figure of drawings that are kept: packing takes time too."""


def chart(
    drawing: Drawing, key: str, take: element.Take | None = None, corner: Callable[[], None] | None = None,
    single: Sequence[tuple[str, str, str]] = (), note: str = "",
) -> None:  # fmt: skip
    """Draw a figure under its title, which is text of the page and wraps; `corner` draws the menu beside the title.

    `single`: rows of a name, a number and an interval, shown in place of a figure with one number per model.
    `note`: What the caption begins with.
    """
    if drawing not in _sent:
        figure = drawing.figure.update_layout(font_color=None, title_subtitle_font_color=None)  # the page's own colours
        _sent[drawing] = (*plots.untitled(figure), element.packed_figure(figure, take is not None))
    title, under, packed = _sent[drawing]
    with st.container(key=f"above_{key}", horizontal=True, horizontal_alignment="right"):
        if title:
            st.header(widgets.escaped(title), anchor=False)
        if corner is not None:
            corner()
    if under := note + under:
        left_out = SETTING if not single else PALE
        parts = [part for part in under.split("; ") if not left_out.match(part)]
        with st.container(horizontal=True, gap="xsmall", vertical_alignment="center", key=f"under_{key}"):
            if rest := "; ".join(p for p in parts if not CHIP.fullmatch(p)):
                st.caption(widgets.typeset(rest), width="content")
            for part in filter(CHIP.fullmatch, parts):
                about = next(words for begin, words in CHIPS.items() if begin in part)
                st.badge(part.removesuffix(" per model").removesuffix(" documents"), color="gray", help=about)
    if not single:
        element.draw_figure(packed, key, take)
        return
    with st.container(horizontal=True, key=f"numbers_{key}"):
        for name, value, interval in single:
            with st.container(border=True, width="content"):
                st.metric(widgets.escaped(name), value)
                st.caption(widgets.typeset(interval))


def _with_menu(
    view: View, link: Link, drawing: Drawing, problems: Mapping[str, str], about: str, take: element.Take | None,
    note: str = "",
) -> None:  # fmt: skip
    name = view.__name__
    with st.container(key=f"whole_{name}", gap=None):
        single = _single_values(drawing.table) if view is depth.layers and not link.on("compare") else []
        chart(drawing, f"figure_{name}", take, lambda: _menu(view, link, drawing, about), single, note)
        if drawing.sentence:
            st.markdown(widgets.typeset(drawing.sentence))
    st.session_state["drawn"].append(Drawn(link, drawing.table, problems))


def _single_values(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return a row (name, number, interval) for each model if the records hold a single number per model; else nothing."""
    rows = table[table["control"].isna() & (table["step"].isna() | (table["step"] == table["step"].max()))]
    if any(rows[axis].nunique(dropna=False) > 1 for axis in (*AXES, "step")):
        return []
    values = []
    for name in plots.ordered(rows["architecture"]):
        of, unit = rows[rows["architecture"] == name], rows["unit"].iloc[0]
        seeds = of.groupby("seed", dropna=False)["value"].mean().astype(float)
        mean, about = over_seeds(seeds), "no interval"
        if mean.n > 1:
            about = f"{confidence()} interval over {mean.n} seeds: {mean.low:.3g} to {mean.high:.3g}"
        elif of["se"].notna().any():
            about = f"± {of['se'].mean():.2g}, standard error over documents, 1 seed"
        values.append((plots.label(name), f"{number(mean.value)} {unit}", about))
    return values


def files(views: dict[str, View], link: Link) -> None:
    """A panel with one of several views, by title, as a figure with its menu: views that the page draws itself."""
    panel = st.expander("Figures, numbers and files", on_change="rerun", key="open_files")
    if not panel.open:
        return
    with panel:
        title = st.selectbox("Figure", list(views), key="w_files")
        try:
            drawing = views[title](cached_source(), link)
        except WorkbenchError as error:
            st.info(widgets.escaped(error), icon=":material/info:")
            return
        _with_menu(views[title], link, drawing, {}, "", None)


def link_address(link: Link) -> str:
    """The address of a link on this server."""
    here = urlsplit(st.context.url or "")  # of the first page it has no path, not even a slash
    return urlunsplit((here.scheme, here.netloc, f"{here.path.rpartition('/')[0]}/{link}", "", ""))


def command(link: Link, options: str) -> str:
    """The command that draws a link in a terminal; it names the folder of runs if that is not `./runs`."""
    folder = cached_source().folder
    runs = "" if folder == Path("runs").resolve() else f" --runs {shlex.quote(str(folder))}"
    first = f"{BUILDERS}={shlex.quote(builders)} " if (builders := variable(BUILDERS)) else ""
    return f'{first}workbench view "{link}" {options}{runs}'


def _menu(view: View, link: Link, drawing: Drawing, about: str) -> None:
    """The menu of a figure; its contents are made only while it is open."""

    def work(progress: background_tasks.Progress) -> Drawing:
        return timelapse(view, cached_source(), link, progress)

    name = view.__name__
    panel: Any = st.popover("Figure", icon=":material/more_vert:", type="tertiary", on_change="rerun", key=f"open_{name}",
                       help="Files, link, command, definition, numbers, time-lapse")  # fmt: skip
    if not panel.open:
        return
    with panel:
        saving, code, numbers = st.tabs(["Save", "Code", "Numbers"], key=f"menu_{name}", on_change="rerun")
        if code.open:
            with code:
                _code(link, name)
        elif numbers.open:
            with numbers:
                _numbers(drawing, name)
        with saving:
            _files(link, drawing, name)
            left, right = st.columns([3, 1], vertical_alignment="bottom")
            note = left.text_input(
                "Note", key=f"note_{name}", max_chars=pins.MAX_NOTE, placeholder="for the page Kept, with #tags"
            )
            if right.button("Keep", icon=":material/push_pin:", key=f"keep_{name}", width="stretch"):
                try:
                    pins.add(cached_source().folder, link, name, note)
                except WorkbenchError as error:
                    st.warning(widgets.escaped(error))
                else:
                    st.toast("Kept; see the page Kept.", icon=":material/push_pin:")
            if about:
                st.caption(about)
            if "metric" in drawing.table:
                panel = st.expander("Definition, baseline, caution", on_change="rerun", key=f"about_{name}")
                definition_of(list(drawing.table["metric"].dropna().unique()[:4]), panel)
            if st.toggle("Play over checkpoints", key=f"play_{name}"):
                key = ("timelapse", name, *_state(cached_source(), link))
                try:
                    played: Drawing = background_tasks.run(key, "Drawing every checkpoint", work)
                except WorkbenchError as error:
                    st.info(widgets.escaped(error))
                except background_tasks.Running:
                    pass
                else:
                    chart(played, f"lapse_{name}")
                    st.download_button(
                        "Time-lapse (HTML)", lambda: plots.html(played.figure, whole=True), f"{name}-steps.html", "text/html",
                        key=f"lapse_html_{name}", on_click="ignore",
                    )  # fmt: skip
                    st.code(command(link, f"--only {name} --play --out {name}.html"), language=None, wrap_lines=True)


def _numbers(drawing: Drawing, name: str) -> None:
    """The table of a figure: columns that vary, numbers and their intervals first, and below it the values equal in all rows."""
    table = plots.table(drawing.table).rename(columns=P_VALUES)
    if "architecture" in table:
        labels = table["architecture"].astype(object).map(plots.label, na_action="ignore")
        table["architecture"] = labels.map(plain, na_action="ignore")
    equal = [str(c) for c in table if c not in NUMBERS[:3] and len(table) > 1 and table[c].astype("str").nunique() == 1]
    shown = table.drop(columns=equal)
    first = [c for c in (*ROW_NAMES, *NUMBERS) if c in shown]
    rest = sorted((str(c) for c in shown if c not in first), key=lambda c: c in LAST)
    config: dict[str, Any] = {c: st.column_config.Column(width=NUMBER_PX) for c in first if c != "architecture"}
    config |= {c: {**column, "width": NUMBER_PX} for c, column in number_columns(shown).items()}
    st.dataframe(
        shown, width="stretch", height=TABLE_PX, hide_index=True, key=f"table_{name}", column_order=[*first, *rest],
        column_config=config, alt=f"Table of: {plots.alt_text(drawing.figure)[:300]}",
    )  # fmt: skip
    names = IN_WORDS | ({} if "se" in table else {"n": "n"})  # an interval counts what its caption says, often seeds
    values = {names.get(c, widgets.spaced(c)): table[c].iloc[0] for c in equal if c not in LAST}
    values |= {"metric": widgets.spaced(values["metric"])} if "metric" in values else {}
    words = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
             if not pd.isna(value) and value != ""]  # fmt: skip
    if words:
        st.caption(f"Equal in all rows: {widgets.typeset(', '.join(words))}.")


def _code(link: Link, name: str) -> None:
    """The link, the command and the notebook cell of a figure."""
    st.caption("Link")
    st.code(link_address(link), language=None, wrap_lines=True)
    st.caption("Command (.svg, .png, .html, .csv, .tex, .md, .parquet)")
    st.code(command(link, f"--only {name} --out {name}.svg"), language=None, wrap_lines=True)
    st.caption("Notebook cell")
    st.code(
        "from pathlib import Path\n\nfrom workbench.views import Link, Source, drawings\n\n"
        f"source, link = Source(Path({str(cached_source().folder)!r})), Link.parse({str(link)!r})\n"
        f"[(_, drawing)] = drawings(source, link, {name!r})\n"
        "drawing.figure  # and drawing.table",
        language="python", wrap_lines=True,
    )  # fmt: skip


def _files(link: Link, drawing: Drawing, name: str) -> None:
    """Download buttons, first in the menu: what arrives later, such as the table, would move them from under a click."""

    def image(ending: str, ground: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out, caption = Path(folder) / f"figure.{ending}", caption_of(cached_source(), link)
            return picture(drawing.figure, out, background=ground, caption=caption, mm=WIDTHS[width]).read_bytes()

    no_browser, widths = find_browser() is None, [w for w, mm in WIDTHS.items() if fits(drawing.figure, mm)]
    key = f"width_{name}"
    width = str(st.segmented_control("Width of SVG and PNG", widths, default=widths[0], required=True, key=key))
    if len(widths) < len(WIDTHS):
        st.caption("The panels of this figure do not fit into a single column.")
    ending_of = "_".join(re.sub(r"[^\w.-]+", "-", str(link.text(k)))[:40] for k in ("set", "a", "b") if link.text(k))
    file = f"{name}_{ending_of}".strip("_")
    buttons: list[tuple[str, str, str, str, Callable[[], bytes | str]]] = [
        ("SVG", "shape_line", "svg", "image/svg+xml", lambda: image("svg", "white")),
        ("PNG", "image", "png", "image/png", lambda: image("png", "white")),
        ("PNG, transparent", "background_replace", "png", "image/png", lambda: image("png", "rgba(0,0,0,0)")),
        ("Figure (HTML)", "html", "html", "text/html", lambda: plots.html(drawing.figure, whole=True)),
    ]  # fmt: skip
    with st.container(horizontal=True, gap="xsmall"):
        for label, icon, ending, kind, make in buttons:
            off = no_browser and kind.startswith("image")
            st.download_button(
                label, make, f"{file}.{ending}", kind, key=f"{label}_{name}", on_click="ignore", disabled=off, type="tertiary",
                icon=f":material/{icon}:", help=NO_BROWSER if off else None,
            )  # fmt: skip
        table_buttons(plots.table(drawing.table), file)
