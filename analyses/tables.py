"""Tables of absolute numbers for the analyses: means over seeds with their range, for each setting in which runs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from workbench.claims import Evidence
from workbench.claims.evidence import SETTING
from workbench.claims.sinks import head_kinds
from workbench.claims.verdict import InsufficientEvidence
from workbench.statistics.copying_and_sink_steps import formation_steps
from workbench.statistics.intervals import seed_band

Profile = tuple[str, dict[str, Any], dict[str, str]]
"""A metric, the axes of its rows, and the columns that tell it from the others of its table."""


def profiles(*wanted: Profile) -> Callable[[Evidence], pd.DataFrame]:
    """Return a function that makes a table of metrics by layer, at random init and after training."""

    def make(evidence: Evidence) -> pd.DataFrame:
        text = evidence.of_task("text")
        return pd.concat([profile(text, m, **axes).assign(**columns) for m, axes, columns in wanted], ignore_index=True)

    return make


def band(evidence: Evidence, rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return mean and range over seeds of each model, by some columns and by the settings in which the runs differ."""
    runs = evidence.runs.rename(columns={"data": "corpus"})  # `data` of a row is its domain
    settings = [c for c in (*SETTING, "corpus") if c in runs and runs[c].nunique(dropna=False) > 1]
    facts = runs[["run", "model", *dict.fromkeys([*settings, "lr", "parameters", "tokens"])]]
    rows = rows.drop(columns=facts.columns.drop("run"), errors="ignore").merge(facts, on="run")
    return seed_band(rows, list(dict.fromkeys(["model", *settings, *by])))


def profile(evidence: Evidence, metric: str, *, strongest: bool = False, **axes: Any) -> pd.DataFrame:
    """Return mean and range over seeds of a metric by layer, at random init and after training; `strongest`: of each run's largest head."""
    frames = []
    for step in ("first", "last"):
        try:
            rows = evidence.rows(metric, step=step, **axes)
        except InsufficientEvidence:
            if step == "last":
                raise
            continue
        when, unit = "random init" if step == "first" else "trained", rows["unit"].iloc[0]
        if strongest:
            heads = rows.groupby(["run", "seed", "layer", "head"], as_index=False)["value"].mean()
            rows = heads.groupby(["run", "seed", "layer"], as_index=False)["value"].max()
        frames.append(band(evidence, rows, ["layer"]).assign(when=when, metric=metric, unit=unit))
    return pd.concat(frames, ignore_index=True)


def final_losses(evidence: Evidence, by: Sequence[str]) -> pd.DataFrame:
    """Final validation loss of every model by some columns, domains averaged unless `data` is one of them: lowest first."""
    text = evidence.of_task("text")
    return band(text, text.losses(), by).sort_values([*by, "mean"]).assign(unit="nats")


def losses_and_sizes(evidence: Evidence) -> pd.DataFrame:
    """Final losses by model and domain, with parameters and training tokens."""
    return final_losses(evidence, ["data", "parameters", "tokens"])


def mean_losses(evidence: Evidence) -> pd.DataFrame:
    """Final losses, domains averaged: lowest first."""
    return final_losses(evidence, [])


def losses_and_cache(evidence: Evidence) -> pd.DataFrame:
    """Bytes of cache per token and final losses, domains averaged."""
    text = evidence.of_task("text")
    cache = band(text, text.rows("cache_bytes"), []).rename(columns={"mean": "cache bytes per token"})
    return mean_losses(evidence).merge(cache.drop(columns=["min", "max", "size"]), how="left")


def losses_by_rate(evidence: Evidence) -> pd.DataFrame:
    """Final loss of every model at every learning rate."""
    return final_losses(evidence, ["lr"])


def trained_coefficients(evidence: Evidence) -> pd.DataFrame:
    """Every trained coefficient at the last step."""
    rows = evidence.telemetry("coefficient")
    last = rows[rows["step"] == rows.groupby("run")["step"].transform("max")]
    return band(evidence, last, ["layer", "part"])


def formation(evidence: Evidence) -> pd.DataFrame:
    """Formation step of every run."""
    rows = evidence.of_task("repeated").telemetry("copy_loss")
    if rows.empty:
        raise InsufficientEvidence("no run was trained on repeated tokens; make some with `workbench demo`")
    return formation_steps(rows)


def sinks_and_drains(evidence: Evidence) -> pd.DataFrame:
    """Return the strongest head's sink mass, value drain and hidden peak by layer, before and after training, and heads by kind of sink."""
    strongest = profile(evidence, "sink_mass", strongest=True)
    drains = [profile(evidence, "value_drain", site=site).assign(site=site) for site in ("own_v", "v")]
    peak = profile(evidence, "hidden_peak", site="stream")
    return pd.concat([strongest, *drains, peak, *_kinds(evidence)], ignore_index=True)


def _kinds(evidence: Evidence) -> list[pd.DataFrame]:
    frames = []
    for model in evidence.models:
        for step, when in (("first", "random init"), ("last", "trained")):
            try:
                heads = head_kinds(evidence, model, step)
            except InsufficientEvidence:  # not measured there
                continue
            table = pd.crosstab([heads["run"], heads["seed"], heads["layer"]], heads["kind"])
            counts = table.melt(ignore_index=False, var_name="kind").reset_index()
            counts = band(evidence, counts, ["layer", "kind"])
            frames.append(counts.assign(when=when, metric="sink_kind", unit="heads"))
    return frames
