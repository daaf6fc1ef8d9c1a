"""The frame of every page: its title and selection, its body, and the drawer that says where its numbers come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from app import background, widgets
from app.cached_source import cached_source
from app.figures import command, show
from app.sidebar import choose
from workbench import prompts
from workbench.errors import WorkbenchError
from workbench.runs.records import facts
from workbench.views import Link
from workbench.views.base import views_of
from workbench.views.link import PAGES

MAX_FACTS = 500
EMPTY = "No runs here yet: `make demo` trains and measures some, `workbench import` takes in your own checkpoints."


def page(name: str, about: str, body: Callable[[Link], None]) -> None:
    """Draw a page: its title, what it answers, the selection, the body and the drawer; what cannot be done is explained instead."""
    st.title(PAGES[name].title)
    link = choose(name)
    if link is None:
        st.info(EMPTY)
        return
    st.markdown(about)
    st.session_state["drawn"] = []
    try:
        body(link)
    except WorkbenchError as error:
        st.info(widgets.escaped(error))
    except background.Running:
        pass
    _drawer(link)


def all_views(name: str) -> None:
    """Draw a page that has no screen of its own: each of its views, one below the other."""

    def body(link: Link) -> None:
        for view in views_of(name).values():
            show(view, link)

    page(name, PAGES[name].about, body)


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
