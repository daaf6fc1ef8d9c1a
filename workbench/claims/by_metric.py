"""Lazy table of many runs: the rows of some runs and one metric are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pandas as pd

from workbench.runs.recent import Recent, bytes_of
from workbench.runs.records import facts

MAX_BYTES = 50_000_000  # of the rows that stay in memory, the last ones in any case


class ByMetric:
    """A table with columns `run` and `metric` that is too large to hold in memory.

    Args:
        fetch: Returns the rows of some runs and one metric, in the order of all runs.
        runs_with: Names of the runs that have a metric, by metric.
        none: The table without rows.
    """

    def __init__(
        self,
        fetch: Callable[[Collection[str], str], pd.DataFrame],
        runs_with: Mapping[str, Collection[str]],
        none: pd.DataFrame,
    ) -> None:
        self.fetch, self.runs_with, self.none = fetch, runs_with, none
        self.metrics = frozenset(runs_with)
        self._found = Recent[tuple[frozenset[str], str], pd.DataFrame](MAX_BYTES, bytes_of)

    @classmethod
    def of_rows(cls, rows: pd.DataFrame) -> ByMetric:
        """Return a lazy table of rows in memory."""
        places = {str(metric): np.sort(at) for metric, at in rows.groupby("metric").indices.items()}

        def fetch(runs: Collection[str], metric: str) -> pd.DataFrame:
            found = rows.iloc[places[metric]]
            return found[found["run"].isin(runs)]

        return cls(fetch, {m: set(rows["run"].iloc[at]) for m, at in places.items()}, rows.head(0))

    def of(self, runs: frozenset[str], metric: str) -> pd.DataFrame:
        """Return the rows of a metric of some runs."""
        if metric not in self.metrics or not runs:
            return self.none
        return self._found.get((runs, metric), lambda: self.fetch(runs, metric))

    def of_all(self, runs: frozenset[str]) -> pd.DataFrame:
        """Return the rows of all metrics of some runs."""
        found = [self.of(runs, metric) for metric in sorted(self.metrics)]
        return pd.concat(found or [self.none]).sort_index(kind="stable")

    def dtypes(self, runs: frozenset[str], metrics: Collection[str]) -> list[str]:
        """Return the data types that these metrics were measured in, from their provenance."""
        texts = {text for metric in metrics for text in self.of(runs, metric)["provenance"].dropna().unique()}
        return sorted({str(dtype) for text in texts if (dtype := facts(text).get("dtype"))})
