"""Depth: any measure over layers, for chosen models and steps, beside its value at random init and its baseline."""

from __future__ import annotations

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from app.page_frame import page
from app.sidebar import choose_models
from workbench import plots
from workbench.views import Link, depth

ABOUT = (
    "Any measure, layer by layer. Solid: the chosen step. Dashed: the same models at random init. Dotted grey: what the measure "
    "gives under its baseline, for instance attention spread evenly over all earlier tokens. Only what differs from both was learned."
)


def _body(link: Link) -> None:
    if not link.on("compare"):
        link = choose_models(link)
    link = _choices(link)
    show(depth.layers, link)
    _explain(link)


def _choices(link: Link) -> Link:
    """The link, completed by the select boxes; a choice that the link asks for in vain falls back with a word."""
    first, second, third = st.columns(3)
    source = cached_source()
    bare = link.but(site=None, variant=None, view=None, seed=None, metric=None)
    with first:
        metric = widgets.choose("Measure", "metric", depth.options(source, bare).metrics, depth.METRIC, show=_words)
    bare = bare.but(metric=metric)
    found = depth.options(source, bare)
    with second:
        site = widgets.choose("Where", "site", found.sites, found.site, show=plots.site) if found.sites else None
    bare = bare.but(site=site)
    found = depth.options(source, bare)
    with third:
        variant = widgets.choose("Variant", "variant", found.variants, found.variant, show=_words)
    bare = bare.but(variant=variant)
    found = depth.options(source, bare)
    first, second, third = st.columns(3)
    with first:
        view = widgets.choose("View", "view", found.forms, found.form, show=depth.FORMS.__getitem__)
    if not link.on("compare"):
        with second:
            bare = bare.but(seed=widgets.choose("Seed", "seed", found.seeds, "all"))
    with third:
        relative = widgets.toggle(
            "Relative depth", "depth", help="0 is the first layer, 1 the last: for models of different depths"
        )
    return bare.but(view=view, depth=1 if relative else None)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _explain(link: Link) -> None:
    """The measure in words; opened on demand, since the registry needs the numerical libraries."""
    about = st.expander("What this measure is, and its caution", on_change="rerun", key="w_explain")
    if about.open:
        with about:
            st.text(depth.about(str(link.text("metric"))) or "No description.")


if __name__ == "__main__":
    page("depth", ABOUT, _body)
