"""Maps: vectors of tokens in a plane, how well they separate by layer, and heads grouped by their patterns."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, maps
from workbench.views.source import run_name

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..figure_menu import ready, show
from ..page_layout import controls, page
from ..prompt_box import prompt_box

ABOUT = (
    "Each point is one token of a text, placed by its vector. If points of one token lie together, the vector still holds the "
    "token's identity. A plane shows a few of many dimensions, so compare the picture with the numbers under it."
)
TOKENS = (
    "**Token identity share**: the share of the variance that the token explains. **Neighbourhood purity**: the share of the 10 nearest "
    "neighbours that have the same token. **Silhouette**: 1 if tokens form separate clusters, 0 if they overlap; by chance: of "
    "shuffled tokens. All are computed in all dimensions, and once more in the map."
)
GROUPS = (
    "Heads whose patterns have similar features lie beside each other. Previous token and induction are measured on the same text "
    "with its first half repeated."
)


def maps_page(link: Link) -> None:
    source = cached_source()
    first = source.subjects(link)[0].entry
    own = [e for e in source.catalogue().entries if e.steps and not (e.shipped or e.imported)]
    if first.shipped and own and not {"a", "set"} & set(st.query_params):
        st.caption("The runs of this folder read symbols, so the page opens on a shipped text model.")
        widgets.page_link(
            "maps", f"Token maps of {run_name(own[0])}", ":material/arrow_forward:", set=own[0].group, a=own[0].name
        )
    if first.imported:
        st.caption("The training text of an imported model is unknown: type a text.")
        link = prompt_box(link)
        link = link if link.text("stored") else link.but(prompt=source.prompt(link))
    with controls():
        site = widgets.choose("Site", "site", list(maps.SITES), show=maps.SITES.__getitem__, width=230)
        link = link.but(site=site)
        ready(link, "Loading the model", maps.layers_of)
        layers = maps.layers_of(source, link)
        layer = widgets.choose("Layer", "layer", layers, layers[-1] if layers else None, slider=True, width=220)
        method = widgets.choose("Method", "method", list(maps.METHODS), show=maps.METHODS.__getitem__, width=110)
        colour = widgets.choose("Colour", "colour", list(maps.COLOURS), width=120)
    link = link.but(layer=layer, method=method, colour=colour)
    show(maps.tokens, link, about=TOKENS, long="Drawing the map")
    show(maps.separation_by_layer, link, about=TOKENS, long="Measuring every layer")
    panel = st.expander(
        "Heads grouped by their patterns",
        icon=":material/account_tree:",
        on_change="rerun",
        key="open_heads",
        expanded="groups" in st.query_params,
    )
    if panel.open:
        with panel:
            groups = widgets.choose("Groups", "groups", list(range(2, 9)), maps.GROUPS, width=90)
            show(maps.groups, link.but(groups=groups), about=GROUPS, long="Measuring every head")


if __name__ == "__main__":
    page("maps", ABOUT, maps_page)
