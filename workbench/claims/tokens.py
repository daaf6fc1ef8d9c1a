"""Do deep layers preserve the identity of the input token?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence, deep_layers, model_mean
from workbench.claims.loss import beside_scaled, ends_lower
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds, paired_seeds

SITES = {"stream": "hidden states", "z": "attention outputs"}
KEPT = 0.5  # of what zeroing costs
REACHED = 0.99  # of a lookup's bits, which a probe must read off the first layer's own values


@claim(
    supports="a linear probe reads more bits of the token off deep hidden states and attention outputs. The difference is beyond the "
    "same model at random init, and holds at equal step and at equal loss",
    refutes="fewer bits",
    scale="any trained size, three seeds; values are left out, where the first layer's are a lookup by construction",
    published="no probe in any version of the paper",
    source=PAPER, metrics=("token_probe",), models=("transformer", SCALED, *RESFORMERS), steps="matched",
    shows={"metric": "token_probe", "site": "stream"},
)  # fmt: skip
def token_information_is_preserved(evidence: Evidence) -> Verdict:
    """A value residual preserves the information of the initial token in deep layers."""
    pair = evidence.of_task("text").comparable("transformer", RESFORMERS, control=SCALED)
    model, depth = pair.first_of(RESFORMERS), pair.fact("n_layers")
    reached = pair.records("token_probe")
    reached = reached[(reached["variant"] == "of_ceiling") & reached["control"].isna()]
    weak = reached[(reached["site"] == "own_v") & (reached["layer"] == 0) & (reached["value"] < REACHED)]
    if len(weak):  # the first layer's own values determine the token
        least = weak.sort_values("value").iloc[0]
        raise InsufficientEvidence(
            f"The probe reads only {least['value']:.1%} of a lookup's bits off layer 1's own values of {least['run']} at step "
            f"{least['step']}, which hold them all: it is too weak to tell anything of other sites."
        )
    intervals, scaled, said = dict[str, Interval](), dict[str, Interval](), ""
    for site, name in SITES.items():
        each = (pair.rows("token_probe", step=step, site=site) for step in ("last", "first", "all"))
        now, start, over_time = (deep_layers(rows, depth) for rows in each)
        intervals[f"{name}, beyond init"] = pair.beyond_init(now, start, model)
        intervals[f"{name}, equal loss"] = pair.at_equal_loss(over_time, model)
        more, said = beside_scaled(pair, now, model, "bits")
        scaled |= {f"{name}, {minus}": interval for minus, interval in more.items()}
    note = seeds_note(next(iter(intervals.values())))
    sentence = f"Bits of the token, {model_name(model)} - Transformer: {intervals_text(intervals | scaled)}{note}{'' if scaled else said}."
    return judged(intervals, 1, sentence, "bits", also=scaled, doubt=not scaled)


@claim(
    supports="in a trained vanilla model the token's identity explains most of the variance of deep own values, more than at init; "
    "their mean per token costs a small part of the cost of zero; queries and keys need more context",
    refutes="the token mean keeps less than half of what zero loses",
    scale="any trained size, three seeds; a comparison within one model",
    published="the last third of the layers can look values up by token at 135M and 780M, and adding contextual ones back gives little "
    "(reported by others: Bank of Values, arXiv 2606.02780); here, exploratory, 4 layers: the token mean keeps 96 %",
    source="after Bank of Values, arXiv 2606.02780", metrics=("token_identity_share", "value_ablation"), models=("transformer",),
    steps="ends", shows={"metric": "token_identity_share", "site": "own_v"},
)  # fmt: skip
def deep_values_need_little_context(evidence: Evidence) -> Verdict:
    """In a trained vanilla model deep values need little context: the token alone supplies most of their effect."""
    mine = evidence.of_task("text").comparable("transformer").of_models(["transformer"])
    depth = mine.fact("n_layers")
    change = mine.rows("value_ablation", variant=..., site="own_v")
    change = change[change["layer"].isna()]
    # one document has no standard error, whose column must be there nevertheless
    wide = change.pivot_table(index="run", columns="variant", values=["value", "se"], dropna=False)
    if not {("value", "token_mean"), ("value", "zero")} <= set(wide.columns):
        raise InsufficientEvidence("No layer after the first has values that were replaced.")
    token, zero = wide["value", "token_mean"], wide["value", "zero"]
    if (zero <= 0).any():
        why = "Removing deep values does not raise the loss, so nothing is there to be kept."
        raise InsufficientEvidence(why, "unresolved")
    half = np.hypot(wide["se", "token_mean"], wide["se", "zero"] * token / zero) / zero
    each = pd.DataFrame({"value": 1 - token / zero, "se": half, "n": int(change["n"].min())}).reset_index()
    each = each.merge(change[["run", "seed"]].drop_duplicates(), on="run")
    kept, beyond = model_mean(each), model_mean(each.assign(value=each["value"] - KEPT))

    def share(site: str, step: str = "last") -> pd.Series:
        return mine.by_seed(deep_layers(mine.rows("token_identity_share", step=step, site=site), depth), "transformer")

    own = share("own_v")
    others = {"queries": share("q"), "keys": share("k"), "values at random init": share("own_v", "first")}
    apart = {f"share of values - {name}": paired_seeds(own, other) for name, other in others.items()}
    alike = any(apart[name].sign < 1 for name in list(apart)[:2])
    sentence = (
        f"The token's mean keeps {kept.value:.0%} [{kept.low:.0%}, {kept.high:.0%}] of the effect of values in layers 1 to "
        f"{depth - 1} (1 - its cost over the cost of zero){seeds_note(len(each))}. In layers {math.ceil(depth / 2)} to "
        f"{depth - 1} the token explains {own.mean():.0%} of the variance of own values "
        f"({others['values at random init'].mean():.0%} at init), {others['queries'].mean():.0%} of queries, "
        f"{others['keys'].mean():.0%} of keys{'. Queries or keys depend on it as much, so nothing sets values apart' if alike else ''}."
    )
    parts, shown = {f"kept beyond {KEPT:.0%}": beyond}, {"kept": kept, "share of values": over_seeds(own)}
    return judged(parts, 1, sentence, "share", also=apart, shown=shown)


@claim(
    supports="with the last third of the layers' values looked up by token, and no projection there, the model ends lower than vanilla",
    refutes="it ends higher",
    scale="any size; tables hold many parameters, so compare at equal layers and width, not at equal parameters",
    published="bits per byte 0.722 to 0.714 at 780M; 0.854 to 0.849 at 135M (there with the first layer's values instead of a table); "
    "downstream score and loss do not always agree (paper)",
    source="Bank of Values, arXiv 2606.02780 (2026)", metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def deep_values_can_be_looked_up(evidence: Evidence) -> Verdict:
    """Values of the last third of the layers can be looked up by token id without loss, and with a gain."""
    return ends_lower(evidence, "bank_of_values", "transformer")
