"""Tables with selectable rows, formats of their numbers, and download buttons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from workbench.runs.tables import latex_table, markdown_table

TABLE_PX = 300  # height of a table


def row_table(
    key: str, shown: pd.DataFrame, selected: pd.Series, rows: pd.DataFrame, take: Callable[[pd.Series], None], alt: str
) -> None:
    """A table with the first row of `selected` selected; `take(row)` is called with another row that a visitor selects."""

    def taken(places: list[int]) -> None:
        for i in places:
            take(rows.iloc[i])

    _table(key, shown, [i for i, yes in enumerate(selected) if yes][:1], taken, alt, "single-row")


def rows_table(key: str, shown: pd.DataFrame, chosen: list[int], take: Callable[[list[int]], None], alt: str) -> None:
    """A table with several selected rows; `take(places)` is called with the rows that a visitor leaves selected."""
    _table(key, shown, chosen, take, alt, "multi-row")


def number_columns(table: pd.DataFrame) -> dict[Any, Any]:
    """Formats of columns with decimals: three significant digits, whole numbers from 1,000. A mean has the decimals of its smallest `±`."""
    formats = dict[Any, str]()
    for c in table.select_dtypes("float"):
        largest, least = (float(x) for x in table[c].abs().replace(0, math.nan).agg(["max", "min"]))
        digits = len(f"{largest:.0f}") if 1000 <= largest < math.inf else 3  # else 0.3 beside 2,000 would be shown as 0
        formats[c] = "%.0f" if largest >= 1000 and least >= 10 else f"%.{digits}g"
    for half in (c for c in formats if " ± " in str(c) and (table[c] > 0).any()):
        decimals = max(0, 1 - math.floor(math.log10(table[half].where(table[half] > 0).min())))
        formats |= dict.fromkeys((half, str(half).partition(" ± ")[0]), f"%.{decimals}f")
    return {c: st.column_config.NumberColumn(format=text) for c, text in formats.items()}


def _table(
    key: str, shown: pd.DataFrame, chosen: list[int], take: Callable[[list[int]], None], alt: str, mode: Any
) -> None:
    st.session_state[key] = {"selection": {"rows": chosen, "columns": [], "cells": []}}
    st.dataframe(
        shown, hide_index=True, width="stretch", height=min(TABLE_PX, 40 + 35 * len(shown)), key=key, selection_mode=mode,
        on_select=lambda: take(st.session_state[key]["selection"]["rows"]), alt=alt,
        column_config=number_columns(shown) | {"#": st.column_config.NumberColumn(width=45)},
    )  # fmt: skip


def table_buttons(table: pd.DataFrame, name: str) -> None:
    """Download buttons for a table as CSV, LaTeX (booktabs) and Markdown, written when they are clicked."""
    writers = {
        "Numbers (CSV)": ("table", "csv", "text/csv", lambda: table.to_csv(index=False)),
        "Table (LaTeX)": ("functions", "tex", "text/x-tex", lambda: latex_table(table)),
        "Table (Markdown)": ("markdown", "md", "text/markdown", lambda: markdown_table(table)),
    }
    for label, (icon, ending, kind, write) in writers.items():
        st.download_button(
            label, write, f"{name}.{ending}", kind, key=f"{label}_{name}", on_click="ignore", type="tertiary", icon=f":material/{icon}:"
        )  # fmt: skip
