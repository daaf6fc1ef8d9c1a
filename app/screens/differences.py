"""Differences: settings, weights and stored measures in which models A and B differ."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, depth, differences
from workbench.views.page_links import SELECTION
from workbench.views.source import run_name

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..documents_behind_number import documents_behind
from ..figure_menu import show
from ..page_layout import page, toolbar

ABOUT = (
    "What differs between models A and B, and nothing else. **Weights**: the difference of each matrix, as a share of its size and by its "
    "singular directions. **Measures**: stored numbers of all seeds that both models share, at these steps. **Documents**: the texts "
    "in which the two differ most. A difference of one seed says nothing about models."
)
WEIGHTS = (
    "The size is the Frobenius norm. Overlap: mean squared cosine between the first four singular directions of the difference and those "
    "of A's matrix. It is 1 if the difference stays within A's directions, and near the number in the subtitle by chance."
)
MEASURES = "Each measure is averaged over layers, heads and positions of a seed, then paired by seed. `workbench diff` prints all."


def differences_page(link: Link) -> None:
    source = cached_source()
    if not link.on("compare"):
        if (b := differences.partner(source, link)) is None:
            st.info("Switch on *Compare* in the header row and select a model B.", icon=":material/compare_arrows:")
            return
        (a,) = source.subjects(link)
        same = "same experiment and seed" if b.seed == a.entry.seed else "same experiment, another seed"
        label, icon = f"Compare with {run_name(b)} ({same})", ":material/compare_arrows:"
        st.markdown(f"This page compares {widgets.escaped(a.name)} with another model.")
        widgets.page_link("differences", label, icon, set=b.group, a=a.entry.name, b=b.name, step_b=None, compare="1")
        return
    show(differences.settings, link)
    related = differences.may_be_related(*differences.both_models(source, link))
    if related:
        _weights(link)
    show(differences.moved_measures, link, about=MEASURES)
    _documents(link)
    if not related:  # weights of unrelated models say little
        _weights(link)


def _weights(link: Link) -> None:
    with toolbar("options"):
        words = differences.QUANTITIES
        quantity = widgets.choose("Quantity", "quantity", list(words), show=words.__getitem__, width=360)
    show(differences.moved_weights, link.but(quantity=quantity), about=WEIGHTS, long="Comparing weights")


def _documents(link: Link) -> None:
    source = cached_source()
    st.header("Documents that differ most", anchor=False)
    names = depth.measures_by_document(source, link)
    if not names:
        st.info(
            "A and B have no values of single documents of one measure at these steps; `workbench measure` stores them."
        )
        return
    stored = {name for s in source.subjects(link) for name in s.entry.measured}
    metric = widgets.choose("Measure", "metric", names, "loss", show=widgets.spaced, width=200, elsewhere=[*stored])
    common = {k: v for k, v in link.options.items() if k in SELECTION}
    documents_behind(Link("depth", common).but(metric=metric, behind=1, minus=1))


if __name__ == "__main__":
    page("differences", ABOUT, differences_page)
