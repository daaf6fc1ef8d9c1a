"""Boxes that select a measure, its site and its variant, and its definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import streamlit as st

from workbench import plots
from workbench.views import Link, depth
from workbench.views.measure_selection import PLAIN, Measure

from . import url_widgets as widgets
from .cached_source import cached_source

M = TypeVar("M", bound=Measure)


def choose_measure(link: Link, read: Callable[[Link], M], elsewhere: Sequence[str] = ()) -> tuple[Link, M]:
    """Boxes for a measure with its definition, its site and its variant; return the link with them, and its options."""
    options, asked = read(link), st.query_params.get("metric")
    known = {name for e in cached_source().catalogue().entries for name in e.measured}
    if asked in known - {*options.metrics, *elsewhere}:
        there = ", ".join(map(widgets.spaced, options.metrics))
        words = f"This experiment has no records of {widgets.spaced(asked)}; {widgets.spaced(options.metric)} is shown."
        st.session_state.setdefault("told", {})[f"{words} It has: {there}."] = None
        elsewhere = (*elsewhere, asked)
    metric = widgets.choose(
        "Measure", "metric", options.metrics, options.metric, show=widgets.spaced, width=180, elsewhere=elsewhere
    )
    panel = st.popover("Definition", icon=":material/info:", type="tertiary", on_change="rerun", key="definition")
    definition_of([metric], panel)
    options = read(link := link.but(metric=metric))
    if options.sites:
        link = link.but(site=widgets.choose("Site", "site", options.sites, options.site, show=plots.site, width=150))
        options = read(link)
    names = {name: "none" if name == PLAIN else widgets.spaced(name) for name in options.variants}
    variant = widgets.choose(
        "Measure variant", "variant", [*names], options.variant, show=names.__getitem__, width=130, only_if_many=True
    )
    return link.but(variant=variant), read(link.but(variant=variant))


def definition_of(measures: list[str], panel: Any) -> None:
    """Definitions of measures with their baselines and cautions, read only while the panel is open: the registry needs PyTorch."""
    for measure in measures if panel.open else ():
        panel.markdown(f"**{widgets.escaped(widgets.spaced(measure))}**")
        text = depth.about(str(measure)) or "Logged by training; no description."
        panel.text(
            re.sub(r"`(\w+)`", lambda name: f"“{widgets.spaced(name[1])}”", text)
        )  # names as the menus have them
