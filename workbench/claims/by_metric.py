"""A table of many runs whose rows are made for one metric at a time, when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np
import pandas as pd

from workbench.runs.records import facts

MAX_BYTES = 250_000_000  # of the metrics that stay in memory, the last one in any case


class ByMetric:
    """Rows with the columns `run` and `metric`: a thousand runs have millions, of which a claim reads those of a few metrics.

    `fetch` makes the rows of one of the `metrics`.
    """

    def __init__(self, fetch: Callable[[str], pd.DataFrame], metrics: Collection[str], none: pd.DataFrame) -> None:
        self.fetch, self.metrics, self.none = fetch, frozenset(metrics), none
        self._found: OrderedDict[str, pd.DataFrame] = OrderedDict()
        self._dtypes: dict[str, dict[str, set[str]]] = {}

    @classmethod
    def of_rows(cls, rows: pd.DataFrame) -> ByMetric:
        """A whole table."""
        places = {str(metric): np.sort(at) for metric, at in rows.groupby("metric").indices.items()}
        return cls(lambda metric: rows.iloc[places[metric]], places, rows.head(0))

    def of(self, runs: Collection[str], metric: str) -> pd.DataFrame:
        """The rows of a metric of these runs, in their order."""
        rows = self._rows(metric)
        return rows[rows["run"].isin(runs)]

    def whole(self) -> pd.DataFrame:
        """The rows of all metrics."""
        return pd.concat([self._rows(metric) for metric in sorted(self.metrics)] or [self.none]).sort_index(
            kind="stable"
        )

    def dtypes(self, runs: Collection[str], metrics: Collection[str]) -> list[str]:
        """What these metrics of these runs were measured in, where their provenance says so."""
        known = [self._measured_in(metric) for metric in metrics if metric in self.metrics]
        return sorted({dtype for of in known for run in runs for dtype in of.get(run, ())})

    def _measured_in(self, metric: str) -> dict[str, set[str]]:
        if metric not in self._dtypes:
            pairs, found = self._rows(metric)[["run", "provenance"]].dropna().drop_duplicates(), dict[str, set[str]]()
            for run, text in zip(pairs["run"], pairs["provenance"], strict=True):
                if dtype := facts(text).get("dtype"):
                    found.setdefault(run, set()).add(str(dtype))
            self._dtypes[metric] = found
        return self._dtypes[metric]

    def _rows(self, metric: str) -> pd.DataFrame:
        if metric not in self.metrics:
            return self.none
        if metric not in self._found:
            self._found[metric] = self.fetch(metric)
            while len(self._found) > 1 and sum(map(_bytes, self._found.values())) > MAX_BYTES:
                self._found.popitem(last=False)
        self._found.move_to_end(metric)
        return self._found[metric]


def _bytes(rows: pd.DataFrame) -> int:
    return int(rows.memory_usage(index=False).sum())
