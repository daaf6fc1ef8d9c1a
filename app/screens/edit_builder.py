"""The boxes of the Intervene page that write an edit: what to change, in which layers and heads, and by how much."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from workbench.runs.catalogue import Entry
from workbench.views import Link, intervene

from .. import widgets
from ..cached_source import cached_source

UNTOUCHED = 0.0  # the coefficient, until its slider is moved


def edit_builder(link: Link) -> None:
    """What to change, where, in plain words; adds to the text below."""
    entry = cached_source().subjects(link)[0].entry
    kind = widgets.choose(
        "Change", "kind", kinds_of(entry, intervene.kinds()), intervene.KIND, show=intervene.kinds().__getitem__
    )
    first, second = st.columns(2)
    first.multiselect("Layers", list(range(entry.n_layers)), key="edit_layers", placeholder="all")
    second.multiselect(
        "Heads", list(range(entry.n_heads)), key="edit_heads", disabled=not intervene.has_heads(kind), placeholder="all"
    )
    if kind.startswith("coefficient"):
        st.slider("The coefficient becomes", -2.0, 2.0, UNTOUCHED, 0.1, key="edit_value")
    made = _chosen()
    first, second = st.columns(2)
    first.button("Try", key="edit_set", help=f"Make just this change: {made}", on_click=_make, width="stretch")
    second.button(
        "Add", key="edit_add", help=f"Make it beside the others: {made}", on_click=_make, args=(True,), width="stretch"
    )


def unmade() -> str | None:
    """The change that a person has chosen in the boxes and not made yet, of which no figure tells."""
    now = st.session_state
    touched = "kind" in st.query_params or now["edit_layers"] or now["edit_heads"] or now.get("edit_value")
    return made if touched and (made := _chosen()) not in st.query_params.get("edits", "").split(";") else None


def kinds_of(entry: Entry, kinds: Iterable[str]) -> list[str]:
    """Changes that can be made: the coefficients of an observed model are its own code's."""
    return [kind for kind in kinds if not (entry.observed and kind.startswith("coefficient"))]


def _chosen() -> str:
    """The change that is chosen now; a click may come before the page has drawn what was chosen."""
    now = st.session_state
    kind = now["w_kind"]
    heads = now["edit_heads"] if intervene.has_heads(kind) else []
    value = now.get("edit_value", UNTOUCHED) if kind.startswith("coefficient") else None
    return intervene.compose(kind, now["edit_layers"], heads, value)


def _make(add: bool = False) -> None:
    """Put the change that is chosen into the address, beside what is there where it is added."""
    made, before = _chosen(), st.query_params.get("edits", "") if add else ""
    st.query_params["edits"] = f"{before};{made}" if before else made
