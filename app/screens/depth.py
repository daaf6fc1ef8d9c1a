"""Depth: any measure over layers, for chosen models and steps, beside its value at random init and its baseline."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import streamlit as st

from workbench import plots
from workbench.places import module
from workbench.views import Link, depth

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..elements.figure import Point
from ..figures import show
from ..page_frame import FIGURE_PX, PANELS_PX, figures_side_by_side, page, toolbar
from ..prompt_box import OF_A_PROMPT
from ..row_table import row_table
from ..run_table import choose_models

ABOUT = (
    "Any measure, layer by layer. Solid: the chosen step. Dashed: the same models at random init. Dotted grey: what the measure "
    "gives under its baseline, for instance attention spread evenly over all earlier tokens. Only what differs from both was learned."
)


def _body(link: Link) -> None:
    with toolbar("controls"):
        if not link.on("compare"):
            link = choose_models(link)
        link, found = _choices(link)
    least = PANELS_PX if link.on("compare") or found.is_map else FIGURE_PX
    with figures_side_by_side(least) if found.has_course else st.container():
        with st.container():
            show(depth.layers, link, take=_layer)
        if found.has_course:
            with st.container():
                show(depth.course, link)
    if widgets.toggle(
        "Documents behind a number", "behind", help="Those that pull it most; a click on a point asks for its layer's"
    ):
        _behind(link.but(behind=1))


def _layer(point: Point) -> None:
    """A click on a point of a layer asks for that layer: its course, and the documents behind it."""
    if point.at is not None:
        widgets.update_url(layer=point.at[0], behind=1)


def _behind(link: Link) -> None:
    """The documents that pull a number of model A most; a chosen one becomes the prompt of all pages."""
    source = cached_source()
    bare = link.but(layer=None, head=None)
    found = depth.cell(source, bare)
    with toolbar("cell"):
        if found.layers:
            bare = bare.but(layer=widgets.choose("Layer", "layer", found.layers, found.layer, width=90))
            found = depth.cell(source, bare)
        if found.heads:
            bare = bare.but(
                head=widgets.choose("Head", "head", [None, *found.heads], None, show=str, width=90, placeholder="all")
            )
    drawing = show(depth.behind, bare, long="Reading these documents")
    if drawing is None or drawing.table["prompt"].isna().all():
        return
    table, prompt = drawing.table, st.query_params.get("prompt")

    def take(row: pd.Series) -> None:
        widgets.update_url(**dict.fromkeys(("stored", *OF_A_PROMPT)) | {"prompt": row["prompt"]})

    row_table(
        "documents", table[["document", "value", "pull", "prompt"]].rename(columns={"prompt": "how it begins"}),
        table["prompt"] == prompt, table, take, "Documents that pull the mean most",
    )  # fmt: skip
    if (table["prompt"] == prompt).any():
        widgets.page_link("attention", "The chosen document in Attention", ":material/grid_on:", a=found.entry.name)
    else:
        st.caption("Choose a document to read it on Attention and the other pages.")


def _choices(link: Link) -> tuple[Link, depth.Options]:
    """The link, completed by the select boxes, and what there is; a choice that is asked for in vain falls back with a word."""
    source = cached_source()
    bare = link.but(site=None, variant=None, view=None, seed=None, metric=None)
    found = depth.options(source, bare)
    bare = bare.but(metric=widgets.choose("Measure", "metric", found.metrics, found.metric, show=_words, width=200))
    found = depth.options(source, bare)
    if found.sites:
        site = widgets.choose("Where", "site", found.sites, found.site, show=plots.site, width=150)
        bare = bare.but(site=site)
        found = depth.options(source, bare)
    variant = widgets.choose(
        "Variant", "variant", found.variants, found.variant, show=_words, width=130, only_if_many=True
    )
    bare = bare.but(variant=variant)
    found = depth.options(source, bare)
    form = widgets.choose("View", "view", found.forms, found.form, show=depth.FORMS.__getitem__, width=150)
    if not link.on("compare"):
        bare = bare.but(seed=widgets.choose("Seed", "seed", found.seeds, "all", width=90))
    relative = widgets.toggle(
        "Relative depth", "depth", help="0 is the first layer, 1 the last: for models of different depths"
    )
    return bare.but(view=form, depth=1 if relative else None), replace(found, form=form)


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    page("depth", ABOUT, _body)
