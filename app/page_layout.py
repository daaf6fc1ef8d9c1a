"""The frame of every page: header, body, and a drawer with provenance and self-check."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from workbench import prompts
from workbench.errors import WorkbenchError
from workbench.runs.records import facts
from workbench.views import Link
from workbench.views.page_links import PAGES
from workbench.views.registered_views import views_of

from . import background_tasks
from . import url_widgets as widgets
from .cached_source import cached_source
from .figure_menu import command, link_address, show
from .model_selection import choose_link, offer_weights

MAX_FACTS = 500
FIGURE_PX, PANELS_PX = 440, 560  # least width of a figure, of one of several panels beside each other
EMPTY = "No runs yet. `make demo` trains and measures some; `workbench import` imports your own checkpoints."


def page(
    name: str, about: str, body: Callable[[Link], None], choose: Callable[[str], Link | None] = choose_link
) -> None:
    """Draw a page; errors become a sentence on it.

    Args:
        about: What the page shows and how it is read.
        choose: Draws the selection and returns the link.
    """
    st.session_state["drawn"], st.session_state["told"] = [], {}
    header = toolbar("header")
    title_row(PAGES[name].title, about)
    messages = st.session_state["messages"] = st.container()
    with header:
        try:
            link = choose(name)
        except BaseException:
            widgets.navigation(None)  # the other pages stay within reach
            raise
        share = st.container(width="content", key="share")
    widgets.navigation(link)
    if link is None:
        st.info(EMPTY)
        return
    try:
        body(link)
    except WorkbenchError as error:
        st.info(widgets.escaped(str(error)[:1].upper() + str(error)[1:]))
        offer_weights(link)
    except background_tasks.Running:
        pass
    for words in st.session_state["told"]:
        messages.info(words, icon=":material/link_off:")
    with share, st.popover("Share", icon=":material/link:", type="tertiary"):
        # every option that the figures were drawn with, also the defaults
        complete = link.but(**{k: v for drawn in st.session_state["drawn"] for k, v in drawn.link.options.items()})
        st.caption("Link to this page, with every option")
        st.code(link_address(complete), language=None, wrap_lines=True)
        st.caption("Command that writes it as an offline file")
        st.code(command(complete, f"--out {link.page}.html"), language=None, wrap_lines=True)
    drawer = st.expander("Provenance and self-check", icon=":material/receipt_long:", on_change="rerun", key="drawer")
    if not drawer.open:
        return
    with drawer:
        st.markdown("**Provenance**: the weights, data and code behind the stored records on this page.")
        rows = provenance_table([drawn.table for drawn in st.session_state["drawn"]])
        if rows.empty:
            st.caption("No stored records on this page.")
        else:
            st.dataframe(rows, hide_index=True, width="stretch", key="provenance", alt="Provenance of the numbers")
        st.markdown("**Self-check** of the selected models.")
        if st.toggle("Run the self-check", key="self_check"):
            source = cached_source()
            for subject in source.subjects(link):
                try:
                    checks = source.query(prompts.check_model, subject, source.prompt(link))
                except WorkbenchError as error:
                    st.info(widgets.escaped(f"{subject.title}: {error}"))
                    continue
                st.markdown(widgets.escaped(subject.title))
                st.dataframe(checks, hide_index=True, width="stretch", key=f"check_{subject.tag}", alt="Self-check")


def title_row(title: str, about: str) -> None:
    """A row with the page's title, to which `controls()` adds the page's own controls."""
    st.session_state["controls"] = toolbar("controls")
    with controls():
        st.title(title, width="content", anchor=False)
        with st.popover("About", icon=":material/help:", type="tertiary"):
            st.markdown(about)


def controls() -> DeltaGenerator:
    """The row of the page's title and controls."""
    row: DeltaGenerator = st.session_state["controls"]
    return row


def toolbar(key: str) -> DeltaGenerator:
    """A row of controls that wraps."""
    return st.container(horizontal=True, vertical_alignment="bottom", key=key)


def figures_side_by_side(least: int = FIGURE_PX) -> DeltaGenerator:
    """Two figures in a row if each has `least` pixels, else one below the other."""
    return st.grid(2, min_column_width=least)


def wait_for_own_runs(seconds: float, words: Callable[[], str] = str) -> None:
    """While the folder has no runs, look for some every few seconds and then draw the page again; `words` says what is expected."""

    @st.fragment(run_every=seconds)
    def look() -> None:
        if cached_source().own():
            st.rerun()
        if text := words():
            st.caption(text)

    if not cached_source().own():
        look()


def all_views(name: str) -> None:
    """Draw a page without a screen: its views, one below the other."""

    def body(link: Link) -> None:
        for view in views_of(name).values():
            show(view, link)

    page(name, PAGES[name].about, body)


def provenance_table(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The distinct facts behind records, one row for each run, step and measure."""
    rows: dict[str, dict[str, Any]] = {}
    for table in tables:
        if "provenance" not in table:
            continue
        columns = [c for c in ("run", "step", "provenance") if c in table]
        for row in table.loc[table["provenance"].notna(), columns].drop_duplicates().head(MAX_FACTS).to_dict("records"):
            fact = {"run": row.get("run"), "step": row.get("step")} | facts(row["provenance"])
            first = {k: fact.pop(k) for k in ("run", "step", "metric", "weights", "data") if fact.get(k) is not None}
            fact.pop("key", None)
            rows.setdefault(json.dumps(first | fact, sort_keys=True, default=str), first | fact)
    return pd.DataFrame([{k: str(v) for k, v in fact.items()} for fact in rows.values()])
