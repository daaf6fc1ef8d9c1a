"""What is chosen of stored measures on the pages that show them: which one, where it was taken, in which variant."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from workbench.errors import UnknownName

PLAIN = "plain"


@dataclass(frozen=True)
class Measure:
    """The measures there are to choose from, and the chosen one with its rows."""

    metrics: list[str]
    metric: str
    sites: list[str]
    site: str | None
    variants: list[str]
    variant: str
    rows: pd.DataFrame
    """Of the chosen measure, place and variant; all runs, all steps."""


def pick(kind: str, asked: str | None, choices: list[str], default: str) -> str:
    """What is asked for, else the default, else the first choice; raises `UnknownName` for what is no choice."""
    if asked is not None and asked not in choices:
        raise UnknownName(kind, asked, choices)
    return asked or (default if default in choices else choices[0])


def placed(rows: pd.DataFrame, site: str | None) -> pd.DataFrame:
    """The rows of a place; all of them where there is none to choose."""
    return rows if site is None else rows[rows["site"] == site]


def varied(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The rows of a variant, `PLAIN` being those without one."""
    return rows[rows["variant"].isna()] if variant == PLAIN else rows[rows["variant"] == variant]
