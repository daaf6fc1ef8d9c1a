"""Does attention concentrate less, where, and is that the shortcut's doing or the loss's?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from workbench.claims.base import (
    LEAST_SEEDS,
    SETTING,
    Evidence,
    Status,
    Undecided,
    Verdict,
    claim,
    deep_of,
    joined,
    name_of,
    status_of,
    table_of,
    within,
)
from workbench.claims.loss import PAPER
from workbench.claims.sinks import METHODS, SINK_SEEDS, gated
from workbench.statistics import Interval, paired_seeds

AT_INIT = 0.03  # nats: the largest distance found at random init between 256 and 2,048 tokens
THIRD = 2  # the third layer, counted from 0


@claim(
    supports="at random init the importance entropy equals that of uniform causal attention in every layer; training lowers "
    "it from the third "
    "layer on",
    refutes="either part fails",
    scale="any; the first part is a test",
    published="entropy 7.194 to 7.204 at random init, 468M (axis of a figure in the paper); uniform causal attention has 7.2025 at 2,048 "
    "tokens (our computation)",
    source=PAPER, metrics=("importance_entropy", "concentration_parts"), steps="ends",
    shows={"metric": "importance_entropy", "variant": "deficit"},
)  # fmt: skip
def concentration_is_learned(evidence: Evidence) -> Verdict:
    """Concentration of attention is learned: absent at random init, it appears with training from the third layer on."""
    mine = evidence.on("text").comparable("transformer")
    start = mine.rows("importance_entropy", step="first", variant="deficit")
    farthest = float(start["value"].abs().max())
    trained = mine.model_of(mine.rows("importance_entropy", variant="deficit"), "transformer")
    late = trained[trained["layer"] >= THIRD]
    if late.empty:
        raise Undecided("not_checkable", "Needs three layers or more.")
    found = {f"layer {n}": within(rows) for n, rows in late.groupby("layer")}
    status = joined(status_of(i, 1, least=2) for i in found.values())
    seeds = trained["seed"].nunique()
    if farthest > AT_INIT:
        status = "refuted"
    elif seeds < LEAST_SEEDS:  # documents tell one model's layers apart, not what training does
        status = "unresolved"
    told = ", ".join(f"{name} {i}" for name, i in found.items())
    few_seeds = f" ({seeds} of the {LEAST_SEEDS} seeds needed)" if seeds < LEAST_SEEDS else f" ({seeds} seeds)"
    sentence = (
        f"At random init no layer is farther than {farthest:.2g} nats from uniform causal attention (tolerance {AT_INIT}), over "
        f"{_and_models(mine)}; trained, the Transformer's deficit is {told} nats{few_seeds}. "
        "The deficit mixes sinks, local attention and content."
    )
    return Verdict(status, sentence, table_of(found, "nats"))


def _and_models(evidence: Evidence) -> str:
    return f"{len(evidence.models)} models" if len(evidence.models) > 1 else name_of(evidence.models[0])


@claim(
    supports="ResFormer and SVFormer have a smaller entropy deficit in deep layers at equal step and at equal loss, an equal "
    "one in the first "
    "two; NeuTRENO keeps its sinks",
    refutes="no difference once losses are matched, or a larger deficit",
    scale="a vanilla model that has sinks, five seeds",
    published="entropy axes 1.4 to 2.8 (468M) and 2.75 to 4.50 (82M) (ticks in the paper's figures); their length is not "
    "stated, about 20 and "
    "100 tokens by inference, so they are never drawn over ours",
    source=PAPER, steps="series",
    metrics=("importance_entropy", "concentration_parts", "sink_mass", "sink_rate", "token_similarity", "loss"),
    shows={"metric": "against_loss"},
)  # fmt: skip
def less_concentration_in_deep_layers(evidence: Evidence) -> Verdict:
    """ResFormer and SVFormer concentrate attention less in deep layers, beyond what their lower loss implies."""
    pair = evidence.on("text").comparable("transformer", METHODS)
    depth = int(pair.runs["n_layers"].max())
    deep = [
        f"{model}, deep layers, {at}"
        for model in METHODS
        if model in pair.models
        for at in ("equal step", "equal loss")
    ]

    def numbers() -> dict[str, Interval]:
        now = pair.rows("importance_entropy", variant="deficit")
        over_time = pair.rows("importance_entropy", step="all", variant="deficit")
        found: dict[str, Interval] = {}
        for model in (m for m in METHODS if m in pair.models):
            found[f"{model}, deep layers, equal step"] = pair.difference(deep_of(now, depth), model, "transformer")
            found[f"{model}, deep layers, equal loss"] = pair.at_equal_loss(
                deep_of(over_time, depth), model, "transformer"
            )
            found[f"{model}, first two layers"] = pair.difference(now[now["layer"] < THIRD], model, "transformer")
        return found

    formed, found = gated(pair, numbers, "nats")
    statuses: list[Status] = [status_of(found[name], -1, SINK_SEEDS) for name in deep]
    told = "; ".join(f"{name} {i}" for name, i in found.items())
    return Verdict(
        joined(statuses),
        f"{formed}; deficit minus the Transformer's: {told} nats{_kept(pair)}.",
        table_of(found, "nats"),
    )


def _kept(pair: Evidence) -> str:
    """Whether NeuTRENO keeps its sinks, where it is here."""
    if "neutreno" not in pair.models:
        return ""
    mass = pair.rows("sink_mass")
    top = {m: pair.model_of(mass, m).groupby("seed")["value"].max().astype(float) for m in ("neutreno", "transformer")}
    return f"; NeuTRENO's strongest head minus the Transformer's {paired_seeds(top['neutreno'], top['transformer'])}"


def against_loss(evidence: Evidence, like: Iterable[str]) -> pd.DataFrame:
    """Concentration and similarity beside the validation loss, of every checkpoint of every run in the setting of `like`.

    Rows with run, architecture, seed, step, `loss` (nats) and one `quantity`, `value` and `unit` each: the deficit of deep
    layers, the sink mass of the strongest head, the similarity of hidden states in deep layers. Empty where none was measured.
    """
    setting = evidence.runs[evidence.runs["run"].isin(list(like))][list(SETTING)].drop_duplicates()
    part = evidence.of(evidence.runs.merge(setting, on=list(SETTING)))
    if part.runs.empty:
        return pd.DataFrame()
    deep, keys = int(part.runs["n_layers"].max()), ["run", "architecture", "seed", "step"]
    wanted = {
        "entropy deficit, deep layers": ("mean", {"metric": "importance_entropy", "variant": "deficit"}),
        "sink mass, strongest head": ("max", {"metric": "sink_mass"}),
        "token similarity, deep layers": ("mean", {"metric": "token_similarity", "site": "stream"}),
    }
    found = []
    for quantity, (how, axes) in wanted.items():
        try:
            rows = part.rows(step="all", **axes)
        except Undecided:  # not measured, or not a number somewhere
            continue
        rows = deep_of(rows, deep) if "deep" in quantity else rows
        each = rows.groupby(keys, as_index=False)["value"].agg(how)
        found.append(each.assign(quantity=quantity, unit=rows["unit"].iloc[0]))
    if not found:
        return pd.DataFrame()
    table = pd.concat(found, ignore_index=True)
    table.insert(4, "loss", _losses_at(part, table))
    return table.dropna(subset="loss").reset_index(drop=True)


def _losses_at(part: Evidence, table: pd.DataFrame) -> list[float]:
    """The loss of each row's run at its step: measured there, else from training, linear between its validations."""
    measured = part.records[(part.records["metric"] == "loss") & part.records["control"].isna()]
    known = measured[measured["variant"].isna()].groupby(["run", "step"])["value"].mean().to_dict()
    curves = part.curves()

    def at(run: str, step: int) -> float:
        curve = curves.get(run)
        if (run, step) in known or curve is None:
            return float(known.get((run, step), np.nan))
        return float(np.interp(step, curve.index, curve, left=np.nan, right=np.nan))

    return [at(run, int(step)) for run, step in zip(table["run"], table["step"], strict=True)]
