"""Does attention concentrate less, where, and is that the shortcut's doing or the loss's?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from workbench.claims.evidence import SETTING, Evidence, deep_layers, model_mean, sound
from workbench.claims.registry import PAPER, claim
from workbench.claims.sinks import METHODS, SINK_SEEDS, gated
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds, paired_seeds

AT_INIT = 0.03  # nats: the largest distance found at random init between 256 and 2,048 tokens
THIRD = 2  # the third layer, counted from 0


@claim(
    supports="at random init the importance entropy of every layer equals the value for uniform causal attention; training lowers it "
    "from the third layer on",
    refutes="either part fails",
    scale="any; the first part is a test",
    published="entropy 7.194 to 7.204 at random init, 468M (axis of a figure in the paper); uniform causal attention has 7.2025 at "
    "2,048 tokens (our computation)",
    source=PAPER, metrics=("importance_entropy", "concentration_parts"), steps="ends",
    shows={"metric": "importance_entropy", "variant": "deficit"},
)  # fmt: skip
def concentration_is_learned(evidence: Evidence) -> Verdict:
    """Concentration of attention is learned: absent at random init, it appears with training from the third layer on."""
    mine = evidence.of_task("text").comparable("transformer")
    start = sound(mine.rows("importance_entropy", step="first", variant="deficit"))
    farthest = start.assign(value=start["value"].abs()).groupby("seed")["value"].max().astype(float)
    trained = mine.of_model(mine.rows("importance_entropy", variant="deficit"), "transformer")
    late = trained[trained["layer"] >= THIRD]
    if late.empty:
        raise InsufficientEvidence("Needs three layers or more.")
    intervals = {f"layer {n}": model_mean(rows) for n, rows in late.groupby("layer")}
    seeds = trained["seed"].nunique()
    within = {"left of the tolerance at init": over_seeds(AT_INIT - farthest)}
    few_seeds = seeds_note(seeds) or f" ({seeds} seeds)"
    models = f"{len(mine.models)} models" if len(mine.models) > 1 else model_name(mine.models[0])
    sentence = (
        f"At random init no layer is farther than {farthest.max():.2g} nats from uniform causal attention (tolerance {AT_INIT}), over "
        f"{models}. After training the Transformer's deficit is, in nats{few_seeds}: {intervals_text(intervals)}. "
        "The deficit mixes sinks, local attention and content."
    )
    return judged({**within, **intervals}, 1, sentence, "nats")


@claim(
    supports="ResFormer and SVFormer have a smaller entropy deficit in deep layers at equal step and at equal loss. The first two "
    "layers, and whether NeuTRENO keeps its sinks, are reported but not judged",
    refutes="a larger deficit at equal step or once losses are matched",
    scale="a vanilla model that has sinks, five seeds",
    published="entropy axes 1.4 to 2.8 (468M) and 2.75 to 4.50 (82M) (ticks in the paper's figures). The sequence lengths are not "
    "stated (about 20 and 100 tokens by inference), so these values are never drawn over ours",
    source=PAPER, steps="series",
    metrics=("importance_entropy", "concentration_parts", "sink_mass", "sink_rate", "token_similarity", "loss"),
    shows={"metric": "against_loss"},
)  # fmt: skip
def less_concentration_in_deep_layers(evidence: Evidence) -> Verdict:
    """ResFormer and SVFormer concentrate attention less in deep layers, beyond what their lower loss implies."""
    pair = evidence.of_task("text").comparable("transformer", METHODS)
    depth = pair.fact("n_layers")

    def measured() -> dict[str, Interval]:
        now = pair.rows("importance_entropy", variant="deficit")
        over_time = deep_layers(pair.rows("importance_entropy", step="all", variant="deficit"), depth)
        intervals: dict[str, Interval] = {}
        for model in (m for m in METHODS if m in pair.models):
            intervals[f"{model}, deep layers, equal step"] = pair.difference(deep_layers(now, depth), model)
            intervals[f"{model}, deep layers, equal loss"] = pair.at_equal_loss(over_time, model)
            intervals[f"{model}, first two layers"] = pair.difference(now[now["layer"] < THIRD], model)
        return intervals

    formed, intervals = gated(pair, measured, "nats")
    parts = {name: i for name, i in intervals.items() if "deep layers" in name}
    mass, kept = pair.rows("sink_mass"), ""
    if "neutreno" in pair.models:
        top = (pair.of_model(mass, m).groupby("seed")["value"].max().astype(float) for m in ("neutreno", "transformer"))
        kept = f"; NeuTRENO's strongest head minus the Transformer's {paired_seeds(*top)}"
    sentence = f"{formed}; deficit minus the Transformer's: {intervals_text(intervals)} nats{kept}."
    shown = {name: i for name, i in intervals.items() if name not in parts}
    return judged(parts, -1, sentence, "nats", shown=shown, min_seeds=SINK_SEEDS)


def against_loss(evidence: Evidence, like: Iterable[str]) -> pd.DataFrame:
    """Return concentration and token similarity beside the validation loss, for every checkpoint in the setting of some runs.

    Columns are run, architecture, seed, step, loss (nats), quantity, value and unit. The quantities are the entropy deficit of deep layers,
    the sink mass of the strongest head, and the similarity of hidden states in deep layers. Empty if none was measured.
    """
    setting = evidence.runs[evidence.runs["run"].isin(list(like))][list(SETTING)].drop_duplicates()
    part = evidence.of_runs(evidence.runs.merge(setting, on=list(SETTING)))
    if part.runs.empty:
        return pd.DataFrame()
    deep, keys = part.fact("n_layers"), ["run", "architecture", "seed", "step"]
    wanted = {
        "entropy deficit, deep layers": ("mean", {"metric": "importance_entropy", "variant": "deficit"}),
        "sink mass, strongest head": ("max", {"metric": "sink_mass"}),
        "token similarity, deep layers": ("mean", {"metric": "token_similarity", "site": "stream"}),
    }
    tables = []
    for quantity, (how, axes) in wanted.items():
        try:
            rows = part.rows(step="all", **axes)
        except InsufficientEvidence:  # not measured, or not a number somewhere
            continue
        rows = deep_layers(rows, deep) if "deep" in quantity else rows
        each = rows.groupby(keys, as_index=False)["value"].agg(how)
        tables.append(each.assign(quantity=quantity, unit=rows["unit"].iloc[0]))
    if not tables:
        return pd.DataFrame()
    table, losses, curves = pd.concat(tables, ignore_index=True), part.records("loss"), part.curves()
    plain = losses[losses["control"].isna() & losses["variant"].isna()]
    measured = plain.groupby(["run", "step"])["value"].mean().to_dict()

    def loss_at(run: str, step: int) -> float:
        """Loss of a run at a step, measured or interpolated between validations."""
        curve = curves.get(run)
        if (run, step) in measured or curve is None:
            return float(measured.get((run, step), np.nan))
        return float(np.interp(step, curve.index, curve, left=np.nan, right=np.nan))

    loss = [loss_at(run, int(step)) for run, step in zip(table["run"], table["step"], strict=True)]
    return table.assign(loss=loss).dropna(subset="loss").reset_index(drop=True)
