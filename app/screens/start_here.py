"""What is here on the Start page: the runs of the folder as a table, of which a click chooses one."""

from __future__ import annotations

import streamlit as st

from workbench.views import Link, start

from .. import widgets
from ..cached_source import cached_source, root


def here(link: Link) -> None:
    """A row for each run; a clicked one becomes model A, and where to look at it stands above."""
    source = cached_source()
    found = source.catalogue()
    table = start.folder.table(source)
    writing = int((table["state"] == "being written now").sum())
    where = f"in `{root()}`" if source.own() else f"that ship with the project, as `{root()}` has none of its own"
    st.markdown(
        f"**{len(table)} runs** {where}{f', {writing} being written now' if writing else ''}. Click a row to look at that model."
    )
    _without_weights(st.query_params.get("a"))
    st.dataframe(
        table, hide_index=True, width="stretch", height=min(600, 40 + 35 * len(table)), key="runs", on_select=_choose,
        selection_mode="single-row", alt="The runs of the folder",
    )  # fmt: skip
    if found.problems:
        st.warning(
            f"{len(found.problems)} folders look like runs and cannot be read; they are named at the foot of the page."
        )
    st.markdown(
        "`measures`: how many measures are stored; more: `workbench measure RUN -m NAME`. Runs of one experiment may be compared."
    )


def _without_weights(name: str | None) -> None:
    """Where to look at the chosen run, if it has no weights to look into."""
    entry = next((e for e in cached_source().catalogue().entries if e.name == name), None)
    if entry is None or entry.steps:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="next"):
        st.markdown(f"**{widgets.escaped(entry.name)}** has no weights here, but numbers:", width="content")
        widgets.page_link("training", "Its training", ":material/trending_down:")
        widgets.page_link("depth", "Its measures", ":material/layers:")
        widgets.page_link("start", "Its claims, judged", ":material/gavel:", show="verdicts", alone="1")


def _choose() -> None:
    """The clicked run becomes model A."""
    rows = st.session_state["runs"].selection.rows
    if rows:
        entries = cached_source().catalogue().entries
        entry = entries[rows[0]]
        widgets.update_url(
            set=entry.group, a=entry.name, step=None, models=None, show="model" if entry.steps else "here"
        )
