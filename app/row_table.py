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

    def taken(places: list[int]) -> None:
        for i in places:
            take(rows.iloc[i])

    _table(key, shown, [i for i, yes in enumerate(mine) if yes][:1], taken, alt, "single-row")


def rows_table(key: str, shown: pd.DataFrame, chosen: list[int], take: Callable[[list[int]], None], alt: str) -> None:
    """A table in which several rows are selected; `take(places)` is called with those that a person leaves selected."""
    _table(key, shown, chosen, take, alt, "multi-row")


def _table(
    key: str, shown: pd.DataFrame, chosen: list[int], take: Callable[[list[int]], None], alt: str, mode: Any
) -> None:
    st.session_state[key] = {"selection": {"rows": chosen, "columns": [], "cells": []}}
    numbers: dict[Any, Any] = {c: st.column_config.NumberColumn(format="%.3g") for c in shown.select_dtypes("float")}
    st.dataframe(
        shown, hide_index=True, width="stretch", height=min(HEIGHT, 40 + 35 * len(shown)), key=key, selection_mode=mode,
        on_select=lambda: take(st.session_state[key]["selection"]["rows"]), alt=alt,
        column_config=numbers | {"#": st.column_config.NumberColumn(width=45)},
    )  # fmt: skip
