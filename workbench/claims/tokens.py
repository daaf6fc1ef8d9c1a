"""What happens to the identity of the input token in deep layers?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.claims.base import (
    LEAST_SEEDS,
    RESFORMERS,
    Evidence,
    Undecided,
    Verdict,
    claim,
    deep_of,
    few,
    joined,
    name_of,
    status_of,
    table_of,
    within,
)
from workbench.claims.loss import PAPER
from workbench.statistics import Interval, paired_seeds

SITES = {"stream": "hidden states", "z": "attention outputs"}
KEPT = 0.5  # of what zeroing costs
REACHED = 0.99  # of a lookup's bits, which a probe must read off the first layer's own values


@claim(
    supports="a linear probe reads more bits of the token off deep hidden states and attention outputs, beyond the same model at random "
    "init, at equal step and at equal loss",
    refutes="fewer bits",
    scale="any trained size, three seeds; values are left out, where the first layer's are a lookup by construction",
    published="no probe in any version of the paper",
    source=PAPER, metrics=("token_probe",), models=("transformer", *RESFORMERS), steps="matched",
    shows={"metric": "token_probe", "site": "stream"},
)  # fmt: skip
def token_information_is_preserved(evidence: Evidence) -> Verdict:
    """A value residual preserves the information of the initial token in deep layers."""
    pair = evidence.on("text").comparable("transformer", RESFORMERS)
    model, depth = pair.named(RESFORMERS), int(pair.runs["n_layers"].max())
    _refuse_weak(pair.records)
    found: dict[str, Interval] = {}
    for site, said in SITES.items():
        now, start, over_time = (
            deep_of(pair.rows("token_probe", step=step, site=site), depth) for step in ("last", "first", "all")
        )
        gained = {name: pair.by_seed(now, name) - pair.by_seed(start, name) for name in (model, "transformer")}
        found[f"{said}, beyond init"] = paired_seeds(gained[model], gained["transformer"])
        found[f"{said}, equal loss"] = pair.at_equal_loss(over_time, model, "transformer")
    status = joined(status_of(i, 1) for i in found.values())
    told = "; ".join(f"{name} {i}" for name, i in found.items())
    first = next(iter(found.values()))
    return Verdict(
        status, f"Bits of the token, {name_of(model)} - Transformer: {told}{few(first)}.", table_of(found, "bits")
    )


def _refuse_weak(records: pd.DataFrame) -> None:
    """Raise `Undecided` where the probe misses what is there for certain: the first layer's own values name their token."""
    reached = records[(records["metric"] == "token_probe") & (records["variant"] == "of_ceiling")]
    reached = reached[(reached["site"] == "own_v") & (reached["layer"] == 0) & reached["control"].isna()]
    weak = reached[reached["value"] < REACHED]
    if len(weak):
        least = weak.sort_values("value").iloc[0]
        raise Undecided(
            "not_checkable",
            f"The probe reads only {least['value']:.1%} of a lookup's bits off layer 1's own values of {least['run']} at step "
            f"{least['step']}, which hold them all: it is too weak to tell anything of other sites.",
        )


@claim(
    supports="in a trained vanilla model the token's identity explains most of the variance of deep own values, more than at "
    "init, and their "
    "mean per token costs a small part of what zero costs; queries and keys need more context",
    refutes="the token mean costs about as much as zero",
    scale="any trained size, three seeds; a comparison within one model",
    published="the last third of the layers can look values up by token at 135M and 780M, adding contextual ones back gives little "
    "(reported by others: Bank of Values, arXiv 2606.02780); here, exploratory, 4 layers: 96 % kept",
    source="after Bank of Values, arXiv 2606.02780", metrics=("token_identity_share", "value_ablation"), models=("transformer",),
    steps="ends", shows={"metric": "token_identity_share", "site": "own_v"},
)  # fmt: skip
def deep_values_need_little_context(evidence: Evidence) -> Verdict:
    """In a trained vanilla model deep values need little context: the token alone supplies most of what they do."""
    mine = evidence.on("text").comparable("transformer").only(["transformer"])
    depth = int(mine.runs["n_layers"].max())
    change = mine.rows("value_ablation", variant=..., site="own_v")
    change = change[change["layer"].isna()]
    kept = _kept(change)
    shares = {
        site: within(deep_of(mine.rows("token_identity_share", site=site), depth)) for site in ("own_v", "q", "k")
    }
    start = within(deep_of(mine.rows("token_identity_share", step="first", site="own_v"), depth))
    beyond = Interval(kept.value - KEPT, kept.low - KEPT, kept.high - KEPT, kept.n)
    status = status_of(beyond, 1, least=1)
    lacking = []
    if not max(shares["q"].high, shares["k"].high) < shares["own_v"].low:
        lacking.append("queries and keys are as much a matter of the token as values, so nothing sets values apart")
    if not start.high < shares["own_v"].low:
        lacking.append("the share at random init explains that of the values")
    if (
        seeds := change["seed"].nunique()
    ) < LEAST_SEEDS:  # documents tell sites of one model apart, not what training does
        lacking.append(f"{seeds} of the {LEAST_SEEDS} seeds needed are here")
    if status == "supported" and lacking:
        status = "unresolved"
    sentence = (
        f"The token's mean keeps {kept.value:.0%} [{kept.low:.0%}, {kept.high:.0%}] of what deep values do (1 - its cost "
        f"over that of zero); the "
        f"token explains {shares['own_v'].value:.0%} of the variance of deep own values ({start.value:.0%} at init), "
        f"{shares['q'].value:.0%} of queries, {shares['k'].value:.0%} of keys"
        + "".join(f"; {why}" for why in lacking)
        + "."
    )
    return Verdict(status, sentence, table_of({"kept": kept, "share at init": start, **shares}, "share"))


def _kept(change: pd.DataFrame) -> Interval:
    """1 - change(token mean) / change(zero): over seeds where there are three, else with the errors over documents."""
    # one document has no standard error, whose column must be there nevertheless
    wide = change.pivot_table(index="run", columns="variant", values=["value", "se"], dropna=False)
    if not {("value", "token_mean"), ("value", "zero")} <= set(wide.columns):
        raise Undecided("not_checkable", "No layer after the first has values that were replaced.")
    token, zero = wide["value", "token_mean"], wide["value", "zero"]
    if (zero <= 0).any():
        raise Undecided("unresolved", "Removing deep values does not raise the loss, so nothing is there to be kept.")
    kept = 1 - token / zero
    half = np.hypot(wide["se", "token_mean"], wide["se", "zero"] * token / zero) / zero
    rows = pd.DataFrame({"seed": range(len(kept)), "value": kept.to_numpy(), "se": half.to_numpy()})
    rows = rows.assign(n=int(change["n"].min()))
    return within(rows)
