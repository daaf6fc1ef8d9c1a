"""Tables of absolute numbers for the analyses: means over seeds with their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from workbench.claims import Evidence
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


def profile(evidence: Evidence, metric: str, *, by: Sequence[str] = ("layer",), **axes: Any) -> pd.DataFrame:
    """Return mean and range over seeds of a metric for each model, at random init and after training."""
    frames = []
    for step in ("first", "last"):
        try:
            rows = evidence.rows(metric, step=step, **axes)
        except InsufficientEvidence:
            if step == "last":
                raise
            continue
        band = seed_band(rows.rename(columns={"architecture": "model"}), ["model", *by])
        frames.append(
            band.assign(when="random init" if step == "first" else "trained", metric=metric, unit=rows["unit"].iloc[0])
        )
    return pd.concat(frames, ignore_index=True)


def _final_losses(evidence: Evidence) -> pd.DataFrame:
    """Final validation loss of every model and domain, nats."""
    band = seed_band(evidence.losses(), ["model", "data"])
    return band.sort_values(["data", "mean"]).assign(unit="nats")


def losses_and_sizes(evidence: Evidence) -> pd.DataFrame:
    """Final losses by model and domain, with the largest size and most tokens beside them."""
    sizes = evidence.runs.groupby("model")[["parameters", "tokens"]].max()
    return _final_losses(evidence.of_task("text")).merge(sizes, on="model")


def mean_losses(evidence: Evidence) -> pd.DataFrame:
    """Final losses, domains averaged: lowest first."""
    losses = _final_losses(evidence.of_task("text")).groupby("model", as_index=False)[["mean", "min", "max"]].mean()
    return losses.sort_values("mean").assign(unit="nats")


def losses_and_cache(evidence: Evidence) -> pd.DataFrame:
    """Bytes of cache per token and final losses, domains averaged."""
    rows = evidence.of_task("text").rows("cache_bytes")
    cache = rows.groupby("architecture")["value"].mean().rename("cache bytes per token")
    return mean_losses(evidence).merge(cache, left_on="model", right_index=True, how="left")


def losses_by_rate(evidence: Evidence) -> pd.DataFrame:
    """Final loss of every model at every learning rate."""
    losses = evidence.of_task("text").losses()
    return seed_band(losses, ["model", "lr"]).sort_values(["lr", "mean"]).assign(unit="nats")


def trained_coefficients(evidence: Evidence) -> pd.DataFrame:
    """Every trained coefficient at the last step."""
    rows = evidence.telemetry("coefficient")
    last = rows[rows["step"] == rows.groupby("run")["step"].transform("max")]
    return seed_band(last.rename(columns={"architecture": "model"}), ["model", "layer", "part"])


def formation(evidence: Evidence) -> pd.DataFrame:
    """Formation step of every run."""
    rows = evidence.of_task("repeated").telemetry("copy_loss")
    if rows.empty:
        raise InsufficientEvidence("no run was trained on repeated tokens; make some with `workbench demo`")
    return formation_steps(rows)


def sinks_and_drains(evidence: Evidence) -> pd.DataFrame:
    """Return sink mass, value drain and hidden peak by layer, at random init and after training, and heads by kind of sink."""
    mass = profile(evidence, "sink_mass", by=("layer", "head"))
    strongest = mass.loc[mass.groupby(["model", "when", "layer"])["mean"].idxmax()].drop(columns="head")
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
            table = pd.crosstab([heads["seed"], heads["layer"]], heads["kind"])
            counts = table.melt(ignore_index=False, var_name="kind").reset_index()
            band = seed_band(counts.assign(model=model), ["model", "layer", "kind"])
            frames.append(band.assign(when=when, metric="sink_kind", unit="heads"))
    return frames
