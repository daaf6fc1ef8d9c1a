"""The frame of every page: one header line, its body, and the drawer that says where its numbers come from."""

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
from workbench.views.base import views_of
from workbench.views.link import PAGES

from . import background, widgets
from .cached_source import cached_source
from .figures import show
from .links import address, command
from .selection import choose

MAX_FACTS = 500
FIGURE_PX, PANELS_PX = 440, 560  # what a figure needs, one of several panels beside each other
EMPTY = "No runs here yet: `make demo` trains and measures some, `workbench import` takes in your own checkpoints."


def page(name: str, about: str, body: Callable[[Link], None], choose: Callable[[str], Link | None] = choose) -> None:
    """Draw a page: its header, the body and the drawer; what cannot be done is explained instead.

    `about`: what the page answers and how it is read, behind the question mark; `choose`: draws what can be chosen.
    """
    st.session_state["drawn"], st.session_state["told"] = [], {}
    with toolbar("header"):
        st.title(PAGES[name].title, width="content", anchor=False)
        with st.popover("About", icon=":material/help:", type="tertiary"):
            st.markdown(about)
        link = choose(name)
        share = st.container(width="content", key="share")
    told = st.container()
    if link is None:
        st.info(EMPTY)
        return
    try:
        body(link)
    except WorkbenchError as error:
        st.info(widgets.escaped(error))
    except background.Running:
        pass
    for words in st.session_state["told"]:
        told.info(words, icon=":material/link_off:")
    with share:
        _share(link)
    _drawer(link)


def toolbar(key: str) -> DeltaGenerator:
    """One row of controls as wide as they need to be; what does not fit wraps."""
    return st.container(horizontal=True, vertical_alignment="bottom", key=key)


def figures_side_by_side(least: int = FIGURE_PX) -> DeltaGenerator:
    """Two figures in a row where each has the room it needs, in pixels, else one below the other."""
    return st.grid(2, min_column_width=least)


def _share(link: Link) -> None:
    """The whole state of the page: each choice that its figures were drawn with, also those that were never made."""
    whole = link.but(**{k: v for drawn in st.session_state["drawn"] for k, v in drawn.link.options.items()})
    with st.popover("Share", icon=":material/link:", type="tertiary"):
        st.caption("This view as a link; it names every choice, also those left as they were.")
        st.code(address(whole), language=None, wrap_lines=True)
        st.caption("This page as one offline file:")
        st.code(command(whole, f"--out {link.page}.html"), language=None, wrap_lines=True)


def all_views(name: str) -> None:
    """Draw a page that has no screen of its own: each of its views, one below the other."""

    def body(link: Link) -> None:
        for view in views_of(name).values():
            show(view, link)

    page(name, PAGES[name].about, body)


def _drawer(link: Link) -> None:
    """Where this page's numbers come from, and whether the models hold together."""
    drawer = st.expander("Where this comes from: provenance and self-check", icon=":material/receipt_long:",
                         on_change="rerun", key="drawer")  # fmt: skip
    if not drawer.open:
        return
    with drawer:
        st.markdown("**Provenance** of the numbers on this page: weights, data and code they were measured with.")
        known = provenance([drawn.table for drawn in st.session_state["drawn"]])
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
        for row in table.loc[table["provenance"].notna(), asked].drop_duplicates().head(MAX_FACTS).to_dict("records"):
            fact = {"run": row.get("run"), "step": row.get("step")} | facts(row["provenance"])
            first = {k: fact.pop(k) for k in ("run", "step", "metric", "weights", "data") if fact.get(k) is not None}
            fact.pop("key", None)
            rows.setdefault(json.dumps(first | fact, sort_keys=True, default=str), first | fact)
    return pd.DataFrame([{k: str(v) for k, v in fact.items()} for fact in rows.values()])


def _self_check(link: Link) -> None:
    source = cached_source()
    for subject in source.subjects(link):
        try:
            found = source.query(prompts.check_model, subject, source.prompt(link))
        except WorkbenchError as error:
            st.info(widgets.escaped(f"{subject.title}: {error}"))
            continue
        st.markdown(f"{widgets.escaped(subject.title)}")
        st.dataframe(found, hide_index=True, width="stretch", key=f"check_{subject.tag}", alt="Self-check of a model")
