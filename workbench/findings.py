"""What the demo's numbers say, in sentences derived from them: orders with their seeds, and what was not resolvable.

A difference counts only where the seeds of the two architectures do not overlap; everything else is called unresolved.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd

from workbench.errors import WorkbenchError
from workbench.names import LABELS

SINK_MASS = 0.3  # mean attention to position 0 from which on a head is a sink (Gu et al. 2024, arXiv 2410.10781)
NO_OP, BROADCAST, ALIKE = 0.2, 0.5, 0.5  # thresholds of ours: ratio at most, ratio at least, spread at most
LEAST_SEEDS = 3


def copying(frame: pd.DataFrame) -> pd.DataFrame:
    """The loss where copying works, of every training step; raises `WorkbenchError` where there is none."""
    rows = frame[(frame["metric"] == "copy_loss") & frame["variant"].isna()]
    if rows.empty:
        raise WorkbenchError("no copy_loss here; it is written while training on repeated tokens")
    return rows


def formation_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step each run learned to copy at: the first whose copy loss is below half of its value at step 0.

    Columns architecture, seed, formation_step (null where it has not formed), formed (the step in words), last_step.
    """
    found = []
    for (architecture, run, seed), rows in copying(frame).groupby(["architecture", "run", "seed"], dropna=False):
        curve = rows.sort_values("step").set_index("step")["value"]
        below = curve[curve < curve.iloc[0] / 2]
        step = int(below.index[0]) if len(below) else None
        row = {
            "architecture": architecture,
            "run": run,
            "seed": seed,
            "formation_step": step,
            "last_step": int(curve.index[-1]),
        }
        found.append(row | {"formed": "not formed" if step is None else f"step {step}"})
    table = pd.DataFrame(found).astype({"formation_step": "Int64", "seed": "Int64"})
    middle = table["formation_step"].astype("float64").fillna(np.inf).groupby(table["architecture"]).median()
    order = table["architecture"].map(middle)
    return (
        table.assign(order=order)
        .sort_values(["order", "architecture", "seed"])
        .drop(columns="order")
        .reset_index(drop=True)
    )


def formation_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Formation steps as people read them: a row per architecture, fastest first, a column per seed."""
    wide = steps.pivot_table(index="architecture", columns="seed", values="formed", aggfunc="first", sort=False)
    wide = wide.loc[list(dict.fromkeys(steps["architecture"]))].fillna("")
    names = [LABELS.get(str(a), str(a)) for a in wide.index]
    return wide.rename(columns=lambda s: f"seed {s}").assign(model=names).set_index("model").reset_index()


def race_verdict(steps: pd.DataFrame) -> str:
    """The order of the architectures in words, and which neighbours the seeds do not tell apart; derived from the numbers."""
    groups = {
        a: rows["formation_step"].astype("float64").fillna(np.inf)
        for a, rows in steps.groupby("architecture", sort=False)
    }
    if len(groups) < 2:
        return "One architecture so far: nothing to compare."
    names = sorted(groups, key=lambda a: float(groups[a].median()))
    close = [(a, b) for a, b in pairwise(names) if not groups[a].max() < groups[b].min()]
    order = " before ".join(_short(a) for a in names)
    if (seeds := min(len(g) for g in groups.values())) < LEAST_SEEDS:
        return f"{order}: {seeds} of the {LEAST_SEEDS} seeds needed, so the order is not established."
    if not close:
        return f"{order}: seeds disjoint."
    pairs = "; ".join(f"{_short(a)} and {_short(b)}" for a, b in close)
    return f"{order} by the middle seed; overlapping, so unresolved: {pairs}."


def race_meaning(steps: pd.DataFrame) -> str:
    """What the order means, empty unless every seed of the value paths is ahead of, and none of the key residual's is,
    the vanilla model."""
    formed = {a: rows["formation_step"].astype("float64").fillna(np.inf) for a, rows in steps.groupby("architecture")}
    if not {"svformer", "resformer", "transformer", "residual_k"} <= formed.keys():
        return ""
    ahead = max(formed["svformer"].max(), formed["resformer"].max()) < formed["transformer"].min()
    return (
        "Values handed on make copying easier; the same shortcut on keys does not."
        if ahead and formed["residual_k"].min() >= formed["transformer"].min()
        else ""
    )


def values_verdict(frame: pd.DataFrame) -> str:
    """One sentence on deep values: identity share trained against init, and what the token mean keeps."""
    share = frame[(frame["metric"] == "token_identity_share") & (frame["site"] == "own_v") & frame["control"].isna()]
    share = share[(share["layer"] > 0) & (share["architecture"] == "transformer")]
    trained, init = share[share["step"] > 0], share[share["step"] == 0]
    ablation = frame[
        (frame["metric"] == "value_ablation") & frame["layer"].isna() & (frame["architecture"] == "transformer")
    ]
    if trained.empty or init.empty or ablation.empty:
        return "Not decided yet: the vanilla models are still training."
    low, high = trained.groupby("layer")["value"].mean().agg(["min", "max"])
    low0, high0 = init.groupby("layer")["value"].mean().agg(["min", "max"])
    change = {v: ablation[ablation["variant"] == v]["value"] for v in ("token_mean", "zero")}
    seeds = ablation["seed"].nunique()
    return (
        f"In the vanilla Transformer {low:.0%}-{high:.0%} of the variance of later layers' own values is the token's identity "
        f"(at random init {low0:.0%}-{high0:.0%}). Replacing all of them by their per-token mean costs {_span(change['token_mean'])} "
        f"nats, by zero {_span(change['zero'])}; {seeds} seeds, range."
    )


def _span(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:+.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:+.3f} to {high:+.3f}"


def unresolved(frame: pd.DataFrame) -> list[str]:
    """One line each on what the records of small models do not settle: losses inside seed bands, sinks, published sizes."""
    return [*_loss_lines(frame), *_sink_lines(frame), *TOO_SMALL]


SINK_FLOOR = 0.05  # of a layer's heads: below, single documents pass the threshold by chance
TOO_SMALL = (
    "Published savings in parameters and tokens, results at a billion parameters and long contexts cannot be checked here.",
)


def _last(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = frame[(frame["metric"] == metric) & frame["variant"].isna()]
    return rows[rows["step"] == rows.groupby("run")["step"].transform("max")]


def _loss_lines(frame: pd.DataFrame) -> list[str]:
    rows = _last(frame, "loss")
    spans = rows.groupby("architecture")["value"].agg(["min", "mean", "max", "size"]).sort_values("mean")
    if len(spans) < 2 or spans["size"].min() < 2:
        return ["Final losses are compared once two architectures have two seeds each."]
    close = [
        f"{_short(a)} and {_short(b)}" for a, b in pairwise(spans.index) if spans.loc[a, "max"] >= spans.loc[b, "min"]
    ]
    order = ", ".join(f"{_short(a)} {spans.loc[a, 'mean']:.2f}" for a in spans.index)
    told = f"unresolved, because their seeds overlap: {'; '.join(close)}" if close else "no two overlap over seeds"
    return [
        f"Final losses in nats: {order}; {told}. All have one learning rate, tuned for none of them, and few steps: a lead "
        "says who learns fastest here, not who ends best."
    ]


def _sink_lines(frame: pd.DataFrame) -> list[str]:
    mass, rate = _last(frame, "sink_mass"), _last(frame, "sink_rate")
    found, even = mass[mass["control"].isna()]["value"], mass[mass["control"].notna()]["value"]
    if found.empty or even.empty:
        return []
    heads = rate[rate["control"].isna()].groupby(["architecture", "layer"])["value"].mean()
    formed = float(heads.max()) if len(heads) else 0.0
    if formed > SINK_FLOOR:
        return [
            f"Some heads count as attention sinks here, at most {formed:.0%} of a layer's heads; see sink rate on Depth."
        ]
    return [
        f"No attention sink formed: the strongest head gives the first token {found.max():.1%} of its attention, even "
        f"attention would give {even.max():.1%}. So claims about sinks and drained values are not tested here."
    ]


def _short(architecture: Any) -> str:
    return LABELS.get(str(architecture), str(architecture)).removesuffix(" (control)")


def sink_kind(mass: float, ratio: float, spread: float) -> Literal["none", "no-op", "broadcast", "mixed"]:
    """What a head's sink does, from the three numbers of `sink_output`; every threshold is this project's own.

    `none`: mass up to 0.3, no sink. `no-op`: ratio up to 0.2, the sink writes little of what the head writes, so attention
    rests there. `broadcast`: ratio from 0.5 on and spread up to 0.5, the head writes mostly one vector, to every position.
    `mixed`: a sink between the two.
    """
    if not mass > SINK_MASS:
        return "none"
    if ratio <= NO_OP:
        return "no-op"
    return "broadcast" if ratio >= BROADCAST and spread <= ALIKE else "mixed"
