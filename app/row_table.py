"""A table whose rows are a choice: the one that the address means is selected, and another that is selected is written there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

HEIGHT = 300  # pixels


def row_table(
    key: str, shown: pd.DataFrame, mine: pd.Series, rows: pd.DataFrame, take: Callable[[pd.Series], None], alt: str
) -> None:
    """A table in which the first row of `mine` is selected; `take(row)` is called with another that a person selects."""
    chosen = [i for i, yes in enumerate(mine) if yes][:1]
    st.session_state[key] = {"selection": {"rows": chosen, "columns": [], "cells": []}}

    def changed() -> None:
        for i in st.session_state[key]["selection"]["rows"]:
            take(rows.iloc[i])

    numbers: dict[Any, Any] = {c: st.column_config.NumberColumn(format="%.3g") for c in shown.select_dtypes("float")}
    st.dataframe(
        shown, hide_index=True, width="stretch", height=HEIGHT, key=key, on_select=changed, selection_mode="single-row", alt=alt,
        column_config=numbers | {"#": st.column_config.NumberColumn(width=45)},
    )  # fmt: skip
