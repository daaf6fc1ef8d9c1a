"""What was found on the Start page: one sentence from the numbers, its figures, where to go next; definitions fold."""

from __future__ import annotations

import streamlit as st

from workbench.models.registry import ARCHITECTURES
from workbench.views import Link, start

from .. import widgets
from ..cached_source import cached_source
from ..figures import show
from ..page_frame import figures_side_by_side

WORDS = {
    "Value": "what attention carries from one token to a later one; an attention weight says how much of it.",
    "Value path": "a shortcut that hands the first layer's values, made of the bare tokens, to deeper layers.",
    "Copying": "predicting a sequence that stood there before, by looking back at what followed last time (an *induction head*).",
    "Paired seeds": "models that start from the same weights and read the same batches, compared seed by seed.",
    "Unresolved": "the seeds do not tell the two apart; that is no proof that they are alike.",
}


def finding(link: Link) -> None:
    """The headline of the chosen experiment."""
    found = start.finding.finding(cached_source(), link)
    st.header(widgets.escaped(start.finding.headline(found)), anchor=False)
    with figures_side_by_side():
        for view in (start.finding.finding_differences, start.finding.finding_curves):
            with st.container():
                show(view, link)
    _next(found)
    with st.expander("What these words mean"):
        words = WORDS | {
            a.label: f"{a.plain}." for name in found.intervals if (a := ARCHITECTURES.get(name.split(" ")[0]))
        }
        st.markdown("\n".join(f"- **{word}**: {said}" for word, said in words.items()))


def _next(found: start.finding.Finding) -> None:
    """Three ways on."""
    with st.container(horizontal=True, key="next"):
        widgets.page_link("training", "Watch them learn", ":material/trending_down:", set=found.group)
        widgets.page_link("attention", "Look into a model", ":material/grid_on:")
        widgets.page_link("start", "Every claim, judged", ":material/gavel:", set=found.group, show="verdicts")
