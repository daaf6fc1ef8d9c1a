"""The tables of the page Heads, all heads and the chosen one's passages: a row that is selected is written into the address."""

from __future__ import annotations

from functools import partial

import pandas as pd
import streamlit as st

from workbench.views import Link, heads

from .. import widgets
from ..cached_source import cached_source
from ..prompt_box import OF_A_PROMPT
from ..row_table import row_table

COLUMNS = {"rank": "#", "name": "head", "value": "value", "se": "± se", "baseline": "baseline", "init": "random init"}


def all_heads(link: Link, picked: heads.Head) -> None:
    """All heads in a table; the chosen one's row is selected, and another row chooses another."""
    table = heads.ranked(cached_source(), link)
    shown = table[list(COLUMNS)].rename(columns=COLUMNS).dropna(axis=1, how="all")
    mine = heads.is_picked(table, picked)
    row_table(
        f"all_heads_{link.text('metric')}_{link.text('variant')}",
        shown,
        mine,
        table,
        partial(take_head, link),
        "All heads, ranked",
    )


def take_head(link: Link, row: pd.Series) -> None:
    """Write the head of a row of the ranking into the address."""
    other = {}
    if row["tag"] == "B":  # A and B change places, so that the same two stay compared
        other = {"b": link.text("a"), "step_b": link.text("step"), "step": link.text("step_b")}
    widgets.update_url(a=row["run"], layer=row["layer"], head=row["head"], **other)


def passages(picked: heads.Head, table: pd.DataFrame | None) -> None:
    """The passages as text; a chosen one becomes the prompt of all pages. Beneath, the way to Attention on it."""
    if not picked.entry.steps:
        return  # without weights there is no attention to look at
    chosen = table is not None and _texts(picked, table)
    on = "the chosen passage" if chosen else "the present prompt"
    widgets.page_link(
        "attention", f"{picked.name} in Attention, on {on}", ":material/grid_on:", a=picked.entry.name,
        layer=str(picked.layer), head=str(picked.head),
    )  # fmt: skip
    if table is not None and not chosen:
        st.caption("Choose a passage to read it there, its query held.")


def _texts(picked: heads.Head, table: pd.DataFrame) -> bool:
    """The passages in a table; whether the address has one of them."""
    prompt, lock = st.query_params.get("prompt"), st.query_params.get("lock", "")
    mine = (table["prompt"] == prompt) & (table["lock"].astype("string").fillna("") == lock)

    def take(row: pd.Series) -> None:
        gone = dict.fromkeys(("stored", *OF_A_PROMPT))
        at = None if pd.isna(row["lock"]) else int(row["lock"])
        head = {"a": picked.entry.name, "layer": picked.layer, "head": picked.head}
        widgets.update_url(**gone | head | {"prompt": row["prompt"], "lock": at})

    shown = table[["weight", "prompt"]].rename(columns={"prompt": "text around"})
    row_table("passages", shown, mine, table, take, "Passages of the chosen head")
    return bool(mine.any())
