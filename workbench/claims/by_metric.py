"""A table of many runs in which the rows of one metric are found without a look at the others."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
import pandas as pd

from workbench.runs.records import facts


class ByMetric:
    """Rows with the columns `run` and `metric`, sought once by each: hundreds of runs of a folder have millions of rows."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        self._found: dict[str, pd.DataFrame] = {}

    def of(self, runs: Collection[str], metric: str | None = None) -> pd.DataFrame:
        """The rows of these runs, of all metrics unless one is named, in their order."""
        rows = self.rows if metric is None else self._of_metric(metric)
        return rows[rows["run"].isin(runs)]

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics that some run has."""
        return frozenset(self._places)

    def dtypes(self, runs: Collection[str]) -> list[str]:
        """What the numbers of these runs were measured in, where their provenance says so."""
        return sorted({dtype for run in runs for dtype in self._dtypes.get(run, ())})

    def _of_metric(self, metric: str) -> pd.DataFrame:
        if metric not in self._found:
            self._found[metric] = self.rows.iloc[self._places.get(metric, np.array([], dtype=int))]
        return self._found[metric]

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        return {str(metric): np.sort(places) for metric, places in self.rows.groupby("metric").indices.items()}

    @cached_property
    def _dtypes(self) -> dict[str, set[str]]:
        known = self.rows[["run", "provenance"]].dropna().drop_duplicates()
        found: dict[str, set[str]] = {}
        for run, text in zip(known["run"], known["provenance"], strict=True):
            if dtype := facts(text).get("dtype"):
                found.setdefault(str(run), set()).add(str(dtype))
        return found
