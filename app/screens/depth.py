"""Depth: any measure over layers for the selected models and steps, with its value at random init and its baseline."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from workbench.places import module
from workbench.views import Link, depth, depth_weights

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..documents_behind_number import documents_behind
from ..elements.figure import Point
from ..figure_menu import show
from ..import_and_measure import measure_box
from ..measure_selection import choose_measure
from ..model_selection import choose_models
from ..page_layout import FIGURE_PX, PANELS_PX, controls, figures_side_by_side, page

ABOUT = (
    "Any measure, layer by layer. Solid: the selected step. Dashed: the same models at random init. Dotted grey: the measure under "
    "its baseline, for instance uniform attention. Only differences from both were learned. Head numbers mean nothing across seeds "
    "or models, so a mean or a difference of equal head numbers compares unrelated heads."
)


def depth_page(link: Link) -> None:
    with controls():
        if not link.on("compare"):
            link = choose_models(link)
        weights = widgets.toggle("Learned depth weights", "weights", help="Of model A's checkpoint, or of another one")
    if weights or (link.text("path") and "weights" not in st.query_params):
        path = widgets.text_line(
            "Checkpoint", "path", placeholder="model A; or a folder or file with weights", width=420
        )
        show(depth_weights.checkpoint_coefficients, link.but(weights=1, path=path or None))
    with controls():
        link, options = _choices(link)
    paired = depth.has_pairs(cached_source(), link, options)
    alone = [depth.experts, depth.routers] if options.metric in depth.ROUTING else [depth.layers]
    drawn = alone + [depth.differences] * paired + [depth.course] * options.has_course

    def take(point: Point) -> None:
        if point.at is not None:
            widgets.update_url(layer=point.at[0], behind=1)

    least = PANELS_PX if link.on("compare") and not paired else FIGURE_PX
    apart = options.is_map or len(alone) > 1 or options.has_panels  # these take the full width
    for row in [drawn[:1], drawn[1:]] if apart else [drawn]:
        with figures_side_by_side(least) if len(row) > 1 else st.container():
            for view in row:
                with st.container():
                    show(view, link, take=take if view in (depth.layers, depth.differences) else None)
    source = cached_source()
    runs = [s.entry for s in source.subjects(link)] if link.on("compare") else source.chosen(link)
    runs = [e for e in runs if e.steps and not e.shipped]
    panel = st.expander("Measure these models", icon=":material/add_chart:", on_change="rerun", key="open_measure")
    if panel.open and runs:
        with panel:
            metric = st.selectbox("Measure", depth.measures_by_layer(), key="w_measure", format_func=widgets.spaced)
            step = options.step if options.step is not None else max(e.steps[-1] for e in runs)
            key, label = f"depth_{metric}_{step}", f"Measure{runs[0].at_step(step).replace(',', ' at')}"
            if measure_box(key, runs, [(step, metric)], label, depth.DOCUMENTS):
                widgets.update_url(metric=metric)
                st.rerun()
    if widgets.toggle("Documents behind a number", "behind", help="Or click a point"):
        minus = link.on("compare") and widgets.toggle("Difference of A and B", "minus")
        documents_behind(link.but(behind=1, minus=1 if minus else None))


def _choices(link: Link) -> tuple[Link, depth.DepthOptions]:
    source = cached_source()
    bare = link.but(site=None, variant=None, view=None, seed=None, metric=None)
    bare, options = choose_measure(bare, lambda asked: depth.depth_options(source, asked))
    form = widgets.choose("View", "view", options.forms, options.form, show=depth.FORMS.__getitem__, width=150)
    with st.popover("More", icon=":material/tune:"):
        if not link.on("compare"):
            bare = bare.but(seed=widgets.choose("Seed", "seed", options.seeds, "all"))
        spread = widgets.choose_spread()
        relative = widgets.toggle("Relative depth", "depth", help="0: first layer, 1: last layer")
    return bare.but(view=form, spread=spread, depth=1 if relative else None), replace(options, form=form)


if __name__ == "__main__":
    page("depth", ABOUT, depth_page)
