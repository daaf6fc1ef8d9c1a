"""Differences: settings, weights and stored measures in which models A and B differ."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, differences

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..figures import show
from ..page_frame import page, toolbar

ABOUT = (
    "What differs between models A and B, and nothing else. **Weights**: the change of each matrix, as a share of its size and by its "
    "singular directions. **Measures**: stored numbers of all seeds that both models share, at these steps. A difference of one "
    "seed says nothing about models."
)
WEIGHTS = (
    "The size is the Frobenius norm. Overlap: mean squared cosine between the first four singular directions of the change and those "
    "of A's matrix. It is 1 if the change stays within A's directions, and near the number in the subtitle by chance."
)
MEASURES = "Each measure is averaged over layers, heads and positions of a seed, then paired by seed. `workbench diff` prints all."


def differences_page(link: Link) -> None:
    if not link.on("compare"):
        st.info("Switch on *Compare* in the header row and select a model B.", icon=":material/compare_arrows:")
        return
    show(differences.settings, link)
    with toolbar("options"):
        words = differences.QUANTITIES
        quantity = widgets.choose("Quantity", "quantity", list(words), show=words.__getitem__, width=360)
    show(differences.moved_weights, link.but(quantity=quantity), about=WEIGHTS, long="Comparing weights")
    show(differences.moved_measures, link, about=MEASURES)


if __name__ == "__main__":
    page("differences", ABOUT, differences_page)
