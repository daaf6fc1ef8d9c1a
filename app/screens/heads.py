"""Heads: which stand out in all models; a row chooses one, whose history and sharpest passages stand beside."""

from __future__ import annotations

import streamlit as st

from workbench import plots
from workbench.places import module
from workbench.views import Link, heads

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..elements.figure import Point
from ..figures import show
from ..page_frame import page, toolbar
from ..run_table import choose_models
from . import head_tables

ABOUT = (
    "All heads of all models in one order, by any measure that was stored for single heads. Dotted: what the measure gives under its "
    "baseline. Hollow: the same head at random init. Choose a row to follow one head. A head keeps its number only within its own run: "
    "layer 3, head 2 of another seed is another head."
)


def _body(link: Link) -> None:
    link = _asked(link)
    with toolbar("controls"):
        if not link.on("compare"):
            link = choose_models(link)
        link, picked = _choices(link)
    left, right = st.columns(2, gap="medium")
    with left:
        ranked = heads.ranked(cached_source(), link)

        def take(point: Point) -> None:
            if point.at is not None:
                head_tables.take_head(link, ranked.iloc[point.at[0]])

        show(heads.ranking, link, take=take)
        head_tables.all_heads(link, picked)
    with right:
        show(heads.history, link)
        found = show(heads.passages, link, long="Reading validation text")
        head_tables.passages(picked, found.table if found else None)


def _asked(link: Link) -> Link:
    """The link with the run and the step that the address names: without them, all runs at their last, and the first head of all."""
    if link.on("compare"):
        return link
    runs = {e.name for e in cached_source().group(link)}
    a = st.query_params.get("a")
    return link.but(a=a if a in runs else None, step=link.text("step") if "step" in st.query_params else None)


def _choices(link: Link) -> tuple[Link, heads.Head]:
    """The link, completed by the select boxes, and the chosen head; what is asked for in vain falls back with a word."""
    source = cached_source()
    bare = link.but(**dict.fromkeys(("metric", "site", "variant", "end", "layer", "head")))
    found = heads.options(source, bare)
    of_layers, asked = heads.of_layers(source, bare, found), st.query_params.get("metric")
    metric = widgets.choose(
        "Measure", "metric", found.metrics, found.metric, show=_words, width=200, elsewhere=of_layers
    )
    if asked in of_layers:
        st.caption(f"{_words(asked).capitalize()} has no number of single heads; they are ranked by {_words(metric)}.")
    bare = bare.but(metric=metric)
    found = heads.options(source, bare)
    if found.sites:
        bare = bare.but(site=widgets.choose("Where", "site", found.sites, found.site, show=plots.site, width=150))
        found = heads.options(source, bare)
    variant = widgets.choose(
        "Variant", "variant", found.variants, found.variant, show=_words, width=130, only_if_many=True
    )
    bare = bare.but(variant=variant)
    found = heads.options(source, bare)
    end = widgets.choose("Order", "end", list(heads.ENDS), found.end, show=heads.ENDS.__getitem__, width=150)
    bare = bare.but(end=end)
    picked = _picked(bare, link)
    return bare.but(a=picked.entry.name, layer=picked.layer, head=picked.head), picked


def _picked(bare: Link, link: Link) -> heads.Head:
    """The head that the address names, as far as there is one."""
    source = cached_source()
    for key in ("layer", "head"):
        asked = link.text(key)
        first = heads.head_of(source, bare)
        count = first.entry.n_layers if key == "layer" else first.entry.n_heads
        if asked is not None and asked in map(str, range(count)):
            bare = bare.but(**{key: asked})
        elif asked is not None:
            widgets.warn_ignored(key, asked, range(count))
    return heads.head_of(source, bare)


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    page("heads", ABOUT, _body)
