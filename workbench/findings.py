"""What the demo's numbers say, in sentences derived from them: orders with their seeds, and what was not resolvable.

A difference counts only where the seeds of the two architectures do not overlap; everything else is called unresolved.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from workbench.plots import formation_steps, label

SINK_FLOOR = 0.3
"""Mean attention to position 0 from which a head is called a sink; the threshold of Gu et al. (2024)."""


def ordered(values: pd.DataFrame) -> str:
    """`A (56-69) < B (80-82) ~ C (89-99)` from columns architecture and value: `<` where all seeds are apart, else `~`."""
    groups = values.dropna(subset=["value"]).groupby("architecture")["value"]
    bands = sorted((float(g.mean()), float(g.min()), float(g.max()), str(a)) for a, g in groups)
    text = ""
    for before, (_, low, high, name) in zip([None, *bands], bands, strict=False):
        sign = "" if before is None else " < " if before[2] < low else " ~ "
        text += f"{sign}{label(name)} ({low:.4g}-{high:.4g})"
    return text


def race_verdict(formations: pd.DataFrame) -> str:
    """One sentence on the race: the order of formation steps and whether the seeds resolve it."""
    formed = formations.dropna(subset=["formation_step"])
    if formed["architecture"].nunique() < 2:
        return "Not decided yet: fewer than two architectures have learnt to copy."
    missing = sorted({label(a) for a in formations["architecture"]} - {label(a) for a in formed["architecture"]})
    order = ordered(formed.rename(columns={"formation_step": "value"}))
    seeds = int(formed.groupby("architecture")["seed"].nunique().min())
    if seeds < 3:
        verdict = f"unresolved with {seeds} seed{'s' * (seeds > 1)}; three are the least"
    else:
        verdict = (
            "every neighbouring pair is apart in all seeds"
            if "~" not in order
            else "unresolved where ~ stands: seeds overlap"
        )
    tail = f"; not formed: {', '.join(missing)}" if missing else ""
    return f"Steps until copying: {order}; {seeds} seeds, {verdict}{tail}."


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


def unresolved(frame: pd.DataFrame, telemetry: pd.DataFrame) -> list[str]:
    """One line each on what these runs cannot decide, with the number that shows it."""
    return [line for line in (*_losses(telemetry), *_sinks(frame), *_always()) if line]


def _losses(telemetry: pd.DataFrame) -> Iterable[str]:
    losses = telemetry[(telemetry["metric"] == "validation_loss") & telemetry["run"].str.startswith("text")]
    if losses.empty:
        return
    last = losses[losses["step"] == losses.groupby("run")["step"].transform("max")]
    mean = last.groupby(["architecture", "seed"], as_index=False).agg({"value": "mean"})
    yield (
        f"Validation loss, nats, mean of domains, seed range: {ordered(mean)}. One learning rate, not tuned for each "
        "architecture, and a few hundred steps: at this length a lead says who starts faster, not who ends lower."
    )


def _sinks(frame: pd.DataFrame) -> Iterable[str]:
    mass = frame[(frame["metric"] == "sink_mass") & (frame["step"] > 0)]
    if mass.empty:
        return
    uniform = mass[mass["control"] == "uniform_causal"]["value"].iloc[0]
    largest = mass[mass["control"].isna()]["value"].max()
    facts = f"largest mean attention of a head to position 0: {largest:.3f}; uniform causal {uniform:.3f}; floor {SINK_FLOOR}"
    if largest >= SINK_FLOOR:
        yield f"Sinks formed ({facts}); comparing them takes five seeds."
    else:
        yield f"No attention sink formed ({facts}), so nothing is said on sinks, value drain and hidden peaks."


def _always() -> Iterable[str]:
    yield "Parameter and token savings, downstream accuracy and long-context claims need sizes that are not trained here."


__all__ = ["formation_steps", "ordered", "race_verdict", "unresolved", "values_verdict"]
