"""Evidence from stored records and telemetry, without measuring; rows of a metric are read when a claim asks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import pandas as pd

from workbench.claims.by_metric import ByMetric
from workbench.claims.collect import run_facts, seeds_of, told_apart, why_unusable
from workbench.claims.evidence import RUN_COLUMNS, TELEMETRY, Evidence
from workbench.errors import BadCheckpoint
from workbench.runs.catalogue import Entry
from workbench.runs.records import SAMPLE_COLUMNS, one_sample, read_parquet, records
from workbench.runs.run import Run
from workbench.runs.table_cache import BATCH, RecordCache, TableCache, TelemetryCache

AT_ONCE = 50  # runs whose losses are compared together


def stored(
    entries: Sequence[Entry], progress: Callable[[int, int], None] | None = None, *,
    record_cache: RecordCache | None = None, telemetry_cache: TelemetryCache | None = None,
) -> tuple[Evidence, dict[str, str]]:  # fmt: skip
    """Return the evidence of runs, and why some runs have none.

    Args:
        progress: Called with (done, total).
        record_cache: Records that were read before.
        telemetry_cache: Telemetry that was read before.
    """
    kept, told = record_cache or RecordCache(), telemetry_cache or TelemetryCache()
    rows, samples, problems = dict[str, dict[str, object]](), dict[str, pd.DataFrame](), dict[str, str]()
    for begin in range(0, len(entries), BATCH):
        part = entries[begin : begin + BATCH]
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
            rows[entry.path] = run_facts(run) | {"run": entry.name}
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
    seed = seeds_of(table, dict(_marks(sound, kept, told)))

    def named(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(architecture=frame["run"].map(label), seed=frame["run"].map(seed).astype("Int64"))

    def of(runs: Collection[str]) -> list[Entry]:
        return [entry for entry in sound if entry.name in runs]

    def measured(runs: Collection[str], metric: str) -> pd.DataFrame:
        return named(one_sample(kept.rows(of(runs), [metric])[0]))

    def written(runs: Collection[str], metric: str) -> pd.DataFrame:
        return named(told.rows(of(runs), [metric])[0])

    def documents(runs: Collection[str], metric: str) -> pd.DataFrame:
        asked = losses["run"].isin(runs) & losses["provenance"].isin(set(measured(runs, metric)["provenance"]))
        return named(losses[asked])

    return Evidence(
        table.assign(seed=table["run"].map(seed)),
        ByMetric(measured, _runs_with(sound, kept), records([])),
        ByMetric(written, {m: runs for m, runs in _runs_with(sound, told).items() if m in TELEMETRY}, records([])),
        ByMetric(documents, {"loss": set(losses["run"])}, records([], SAMPLE_COLUMNS)),
    )


def _runs_with(entries: Sequence[Entry], cache: TableCache) -> dict[str, set[str]]:
    """Names of the runs that have a metric, by metric."""
    runs: dict[str, set[str]] = {}
    for entry in entries:
        for metric in cache.metrics([entry]):
            runs.setdefault(metric, set()).add(entry.name)
    return runs


def _marks(entries: Sequence[Entry], kept: RecordCache, told: TelemetryCache) -> Iterator[tuple[str, str]]:
    """Marks of runs that only their copies share, see `told_apart`."""
    for begin in range(0, len(entries), AT_ONCE):
        part = entries[begin : begin + AT_ONCE]
        losses = told.rows(part, [name for name in TELEMETRY if name.endswith("_loss")])[0]
        known = set(losses["run"])
        yield from told_apart(losses, kept.rows([e for e in part if e.name not in known])[0]).items()
