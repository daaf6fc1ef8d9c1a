"""What stands below the picture of the Attention page: the enlarged head elsewhere, and the numbers of every head."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from workbench.views import Link, attention, heads, prompt
from workbench.views.link import SELECTION

from .. import widgets
from ..figures import show
from ..page_frame import figures_side_by_side
from ..row_table import row_table


def numbers(choice: attention.Choice, found: list[attention.Seen]) -> None:
    """A row for each head; the enlarged one's is selected, and another row enlarges another."""
    table = attention.statistics(found)
    rows = table[table["head"].notna()].reset_index(drop=True)
    evenly = found[0].overview.uniform
    st.header("Numbers per head", anchor=False)
    says = "; ".join(f"{words} {evenly[name]:.3g}" for name, words in attention.STATISTICS.items())
    of = f"{choice.length}" if choice.alike else f"A's {choice.length}"
    st.caption(
        f"If attention were spread evenly over {of} tokens: {says}. {attention.MEANS.capitalize()}. "
        "Choose a row to enlarge that head."
    )

    def chosen(row: pd.Series) -> None:
        widgets.update_url(layer=int(row["layer"]), head=int(row["head"]))

    mine = (rows["layer"] == choice.layer) & (rows["head"] == choice.head)
    alt = "Entropy, effective keys and attention to the first token of every head"
    row_table("heads", rows.rename(columns=attention.STATISTICS), mine, rows, chosen, alt)


def this_head(link: Link, choice: attention.Choice) -> None:
    """The enlarged head elsewhere: whose values it used where the held query, or the last token, is, and its measures over training."""
    panel = st.expander("This head: whose values it used, and how it came to be", on_change="rerun", key="open_head")
    if not panel.open:
        return
    head = {"layer": choice.layer, "head": choice.head}
    at = choice.length - 1 if choice.lock is None else choice.lock
    common = {k: v for k, v in link.options.items() if k in SELECTION}
    with panel, figures_side_by_side():
        with st.container():
            show(prompt.attribution, Link("prompt", common).but(position=at, **head))
        with st.container():
            show(heads.history, Link("heads", common).but(**head))
