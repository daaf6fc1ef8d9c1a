"""The evidence that runs hold already, nothing being measured: each table is read once, a metric's rows are made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from workbench.claims.by_metric import ByMetric
from workbench.claims.collect import facts, seeds_of, why_unusable
from workbench.claims.evidence import RUN_COLUMNS, TELEMETRY, Evidence
from workbench.errors import BadCheckpoint
from workbench.runs.catalogue import Entry
from workbench.runs.records import SAMPLE_COLUMNS, one_sample, read_parquet, records
from workbench.runs.run import Run
from workbench.runs.table_cache import RecordCache, TelemetryCache

AT_ONCE = 50  # runs that are read between two reports of progress


def stored(
    entries: Sequence[Entry], progress: Callable[[int, int], None] | None = None, *,
    kept: RecordCache | None = None, told: TelemetryCache | None = None,
) -> tuple[Evidence, dict[str, str]]:  # fmt: skip
    """The evidence of runs, and why some of them hold none.

    `progress` is called with (done, all); `kept` and `told` are where a dashboard has read them before.
    """
    kept, told = kept or RecordCache(), told or TelemetryCache()
    rows, samples, problems = dict[str, dict[str, object]](), dict[str, pd.DataFrame](), dict[str, str]()
    for begin in range(0, len(entries), AT_ONCE):
        part = entries[begin : begin + AT_ONCE]
        for cache in (kept, told):
            cache.metrics(part)
        for i, entry in enumerate(part, begin + 1):
            if progress:
                progress(i, len(entries))
            run = Run.open(entry.path)
            try:
                each = read_parquet(sorted(run.path.glob("records/*.samples.parquet")), SAMPLE_COLUMNS)
            except BadCheckpoint as error:
                problems[entry.name] = str(error)
                continue
            if why := why_unusable(run):
                problems[entry.name] = why
                continue
            rows[entry.path] = facts(run) | {"run": entry.name}
            samples[entry.name] = each[each["metric"] == "loss"].assign(run=entry.name)
    problems |= kept.rows(entries, ())[1] | told.rows(entries, ())[1]
    sound = [e for e in entries if e.path in rows and e.name not in problems]
    table = pd.DataFrame([rows[e.path] for e in sound], columns=list(RUN_COLUMNS))
    found = [samples[e.name] for e in sound if len(samples[e.name])]
    losses = pd.concat(found, ignore_index=True) if found else records([], SAMPLE_COLUMNS)
    return _evidence(table, sound, kept, told, losses), problems


def _evidence(
    table: pd.DataFrame, sound: Sequence[Entry], kept: RecordCache, told: TelemetryCache, losses: pd.DataFrame
) -> Evidence:
    label = dict(zip(table["run"], table["model"], strict=True))
    seed = _seeds(table, sound, kept, told)

    def named(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(architecture=frame["run"].map(label), seed=frame["run"].map(seed).astype("Int64"))

    def measured(metric: str) -> pd.DataFrame:
        return named(one_sample(kept.rows(sound, [metric])[0]))

    def written(metric: str) -> pd.DataFrame:
        return named(told.rows(sound, [metric])[0])

    def documents(metric: str) -> pd.DataFrame:
        return named(losses[losses["provenance"].isin(set(measured(metric)["provenance"]))])

    return Evidence(
        table.assign(seed=table["run"].map(seed)),
        ByMetric(measured, kept.metrics(sound), records([])),
        ByMetric(written, told.metrics(sound) & set(TELEMETRY), records([])),
        ByMetric(documents, {"loss"}, records([], SAMPLE_COLUMNS)),
    )


def _seeds(table: pd.DataFrame, sound: Sequence[Entry], kept: RecordCache, told: TelemetryCache) -> dict[str, int]:
    """The seed of each run: of copies from what training wrote down, of those without that from their records."""
    losses = told.rows(sound, [name for name in TELEMETRY if name.endswith("_loss")])[0]
    known = set(losses["run"])
    return seeds_of(table, losses, kept.rows([e for e in sound if e.name not in known])[0])
