"""Start: what was found, one model at a glance, what is in the folder, what its runs decide, and the demo's story."""

from __future__ import annotations

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.places import module
from workbench.views import Link, start

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source, root
from ..page_frame import page
from ..selection import choose
from .start_demo import story
from .start_finding import finding
from .start_verdicts import verdicts
from .start_xray import glance

ABOUT = (
    "How transformers use **values** (what attention carries from word to word) and what a shortcut for them changes. Every page "
    "shows the model that is chosen at its top, or two side by side."
)
LIVE = 2  # seconds between looks at a demo that runs


def _first_run() -> None:
    """Look again until there is a run, where a demo is on its way."""
    found = start.demo.status(root())
    if cached_source().own():
        st.rerun()
    if found and found.running:
        st.caption("The demo has begun; its first model appears here within a minute.")


def _body(link: Link) -> None:
    parts, first = _parts()
    shown = widgets.segments("Part", "show", parts, first, show=start.parts.PARTS.__getitem__)
    {"finding": finding, "model": glance, "here": _here, "verdicts": verdicts, "demo": story}[shown](
        link.but(show=shown)
    )


def _choose_for_part(name: str) -> Link | None:
    """The choices that the shown part uses: models for a model at a glance, the experiment for what is found and judged."""
    if not cached_source().catalogue().entries:
        return None
    parts, first = _parts()
    asked = st.query_params.get("show")
    shown = asked if asked in parts else first
    if shown in ("here", "demo"):
        return widgets.current_link(name)
    # what is judged is what the headline is about, unless a model is named
    headline = shown == "finding" or (shown == "verdicts" and "a" not in st.query_params)
    found = _finding() if headline else None
    return choose(name, models=shown == "model", experiment=found.group if found else None)


def _parts() -> tuple[list[str], str]:
    """The parts that have something to show, and which is shown first: where there is no finding, a model or the folder."""
    source = cached_source()
    found = start.demo.status(source.folder)
    parts = [p for p in start.parts.PARTS if p != "demo" or found or start.demo.racers(source)]
    if (found and found.running) or start.demo.only_demo(source):
        return parts, "demo"
    if _finding():
        return parts, "finding"
    return parts, "model" if any(e.steps for e in source.catalogue().entries) else "here"


def _finding() -> start.finding.Finding | None:
    """What the chosen experiment says, or the one that the rule gives where none is chosen."""
    try:
        return start.finding.finding(cached_source(), widgets.current_link("start"))
    except WorkbenchError:
        return None


def _here(link: Link) -> None:
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
        widgets.page_link("start", "Its claims, judged", ":material/gavel:", show="verdicts")


def _choose() -> None:
    """The clicked run becomes model A."""
    rows = st.session_state["runs"].selection.rows
    if rows:
        entries = cached_source().catalogue().entries
        entry = entries[rows[0]]
        widgets.update_url(
            set=entry.group, a=entry.name, step=None, models=None, show="model" if entry.steps else "here"
        )


if __name__ == "__main__":
    page("start", ABOUT, _body, _choose_for_part)
    if not cached_source().own():
        st.fragment(_first_run, run_every=LIVE)()
