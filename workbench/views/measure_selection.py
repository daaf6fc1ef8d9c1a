"""Selection of a stored measure: its name, its site and its variant."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from workbench.runs.catalogue import Entry
from workbench.views.page_links import Link

PLAIN = "plain"


@dataclass(frozen=True)
class Measure:
    """The measures to choose from, and the selected one with its rows."""

    metrics: list[str]
    metric: str
    sites: list[str]
    site: str | None
    variants: list[str]
    variant: str
    rows: pd.DataFrame
    """Of the selected measure, site and variant; all runs, all steps."""


def select(link: Link, metrics: list[str], metric: str, rows: pd.DataFrame, candidates: pd.DataFrame) -> Measure:
    """Select site and variant from `candidates`, a part of `rows`; by default own values and no variant."""
    sites = sorted(candidates["site"].dropna().unique())
    site = link.choice("site", sites, "own_v", "place") if sites else None
    candidates = of_site(candidates, site)
    plain = (candidates["variant"].isna() & candidates["control"].isna()).any()
    variants = [PLAIN] * bool(plain) + sorted(candidates["variant"].dropna().unique())
    variant = link.choice("variant", variants, PLAIN)
    return Measure(metrics, metric, sites, site, variants, variant, of_variant(of_site(rows, site), variant))


def of_site(rows: pd.DataFrame, site: str | None) -> pd.DataFrame:
    """The rows of a site; all rows for None."""
    return rows if site is None else rows[rows["site"] == site]


def of_variant(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The rows of a variant; for `PLAIN` those without one."""
    return rows[rows["variant"].isna()] if variant == PLAIN else rows[rows["variant"] == variant]


def unmeasured(runs: Sequence[Entry], what: str, metric: str) -> str:
    """Explain why runs have no records of `what`, with the command that measures a metric."""
    if all(e.numbers_only for e in runs):
        return f"{runs[0].numbers_only} has no checkpoints to measure; the Training page shows what was recorded"
    if all(e.shipped for e in runs):
        return f"these shipped runs have no {what}; the Training page shows them"
    given = " --text FILE" if runs[0].imported else ""
    return f"no {what} yet. In a terminal: workbench measure {shlex.quote(runs[0].path)} -m {metric} --steps all{given}"
