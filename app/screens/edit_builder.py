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
    layers = first.multiselect("Layers", list(range(entry.n_layers)), key="edit_layers", placeholder="all")
    heads = second.multiselect(
        "Heads", list(range(entry.n_heads)), key="edit_heads", disabled=not intervene.has_heads(kind), placeholder="all"
    )
    value = (
        st.slider("The coefficient becomes", -2.0, 2.0, UNTOUCHED, 0.1, key="edit_value")
        if kind.startswith("coefficient")
        else None
    )
    made = intervene.compose(kind, layers, heads if intervene.has_heads(kind) else [], value)
    first, second = st.columns(2)
    first.button("Try", key="edit_set", help=f"Make just this change: {made}", on_click=_make, width="stretch")
    second.button(
        "Add", key="edit_add", help=f"Make it beside the others: {made}", on_click=_make, args=(True,), width="stretch"
    )
    if made not in st.query_params.get("edits", "").split(";"):
        st.caption(f"Chosen and not made yet: **{widgets.escaped(made)}**. Try makes just this, Add makes it too.")


def kinds_of(entry: Entry, kinds: Iterable[str]) -> list[str]:
    """Changes that can be made: the coefficients of an observed model are its own code's."""
    return [kind for kind in kinds if not (entry.observed and kind.startswith("coefficient"))]


def _make(add: bool = False) -> None:
    """Put the change that is chosen now into the address; a click may come before the page has drawn what was chosen."""
    now = st.session_state
    kind = now["w_kind"]
    heads = now["edit_heads"] if intervene.has_heads(kind) else []
    value = now.get("edit_value", UNTOUCHED) if kind.startswith("coefficient") else None
    made = intervene.compose(kind, now["edit_layers"], heads, value)
    before = st.query_params.get("edits", "") if add else ""
    st.query_params["edits"] = f"{before};{made}" if before else made
