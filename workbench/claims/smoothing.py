"""Do tokens grow alike with depth, who slows it, and is it linked to concentration?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from workbench.claims.evidence import Evidence
from workbench.claims.loss import beside_scaled
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.sinks import gated
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds

POINTS = 6  # pairs of a layer and a model, before a rank correlation says anything


@claim(
    supports="over layers and models entropy is low where tokens are alike, also without position 0",
    refutes="the correlation turns, with or without position 0",
    scale="a trained vanilla model that has sinks",
    published="Llama 8B and Mistral 7B at up to 2,048 tokens: entropy shaped as a W between 2 and 6, similarity as an M between 0.05 "
    "and 0.30 (paper)",
    source=PAPER, metrics=("importance_entropy", "concentration_parts", "token_similarity", "sink_mass", "sink_rate"), steps="series",
    shows={"metric": "token_similarity", "site": "stream"},
)  # fmt: skip
def smoothing_and_concentration_are_linked(evidence: Evidence) -> Verdict:
    """Over-smoothing and concentration of attention are linked."""
    mine = evidence.of_task("text").comparable("transformer")
    models = f"{len(mine.models)} model{'s' * (len(mine.models) > 1)}"

    def measured() -> dict[str, Interval]:
        intervals = {}
        for variant, positions in ((None, "all positions"), ("excl0", "without position 0")):
            for step, at in (("last", "equal step"), ("all", "equal loss")):
                similar = mine.rows("token_similarity", step=step, site="stream", variant=variant)
                if variant is None:
                    entropy = mine.rows("importance_entropy", step=step)
                else:  # without position 0: minus the profile and content parts, up to a constant
                    parts = mine.rows("concentration_parts", step=step, variant=...)
                    parts = parts[parts["variant"].isin(["profile", "content"])].assign(value=lambda r: -r["value"])
                    entropy = parts.groupby(["run", "seed", "step", "layer"])["value"].sum().reset_index()
                pair = [entropy, similar]
                pair = [mine.at_common_loss(rows) for rows in pair] if step == "all" else pair
                known = not any(rows.empty for rows in pair)
                intervals[f"{positions}, {at}"] = _correlation(*pair) if known else over_seeds([])
        return intervals

    formed, intervals = gated(mine, measured, f"rank correlation over the layers of {models}")
    over = f"rank correlation of entropy and similarity over the layers of {models}"
    return judged(intervals, -1, f"{formed}; {over}: {intervals_text(intervals, notes=True)}.", "rank correlation")


def _correlation(entropy: pd.DataFrame, similarity: pd.DataFrame) -> Interval:
    """Spearman's rank correlation over (model, layer) within each seed, then its mean over seeds."""
    keys = ["run", "seed", "layer"]
    both = entropy[[*keys, "value"]].merge(similarity[[*keys, "value"]], on=keys, suffixes=("_e", "_s"))
    parts = [rows for _, rows in both.groupby("seed") if len(rows) >= POINTS and rows["value_e"].nunique() > 1]
    if not parts:
        raise InsufficientEvidence(f"Needs {POINTS} layers, over all models of a seed, for a rank correlation.")
    return over_seeds([rows["value_e"].corr(rows["value_s"], method="spearman") for rows in parts])


@claim(
    supports="the mean cosine of pairs of a trained NeuTRENO's hidden states is below the vanilla model's, at equal step and at equal "
    "loss",
    refutes="it is above",
    scale="any trained size, three seeds; the difference at random init is reported, not judged",
    published="a figure for vision transformers only (reported by others)",
    source="Nguyen et al. 2023, NeuTRENO, arXiv 2312.00751", metrics=("token_similarity",), models=("transformer", "neutreno"),
    steps="matched", shows={"metric": "token_similarity", "site": "stream"},
)  # fmt: skip
def neutreno_smooths_less(evidence: Evidence) -> Verdict:
    """NeuTRENO keeps tokens less alike than softmax attention."""
    return _smooths_less(evidence, ("neutreno",))


@claim(
    supports="the mean cosine of pairs of the trained value residual's hidden states is below the vanilla model's, at equal step and at "
    "equal loss. It is also below the mean cosine of the control with halved values",
    refutes="it is above",
    scale="any trained size, three seeds; the difference at random init is reported, not judged",
    published="stated in words. Against it: ExoFormer (arXiv 2601.08131, 2026), whose layers reuse normed values, queries and keys: "
    "2.13 points better and half of the sink, yet tokens 95 % alike",
    source=PAPER, metrics=("token_similarity",), models=("transformer", SCALED, *RESFORMERS), steps="matched",
    shows={"metric": "token_similarity", "site": "stream"},
)  # fmt: skip
def value_residuals_smooth_less(evidence: Evidence) -> Verdict:
    """Reusing the first layer's values keeps tokens less alike in deep layers."""
    return _smooths_less(evidence, RESFORMERS, control=True)


def _smooths_less(evidence: Evidence, models: Sequence[str], *, control: bool = False) -> Verdict:
    """Judge whether a model's tokens are less alike after training than the Transformer's.

    The difference at random init is not subtracted: models with equally similar trained tokens would then differ.
    """
    pair = evidence.of_task("text").comparable("transformer", models, control=SCALED)
    model = pair.first_of(models)
    each = (pair.rows("token_similarity", step=step, site="stream") for step in ("last", "first", "all"))
    last, first, over_time = (rows.query("layer > 0") for rows in each)
    trained, start = pair.difference(last, model), pair.difference(first, model)
    matched = pair.at_equal_loss(over_time, model)
    scaled, told = beside_scaled(pair, last, model, "(trained)") if control else ({}, "")
    sentence = (
        f"Similarity of hidden states (mean cosine of pairs), {model_name(model)} - {model_name('transformer')}, layers after the "
        f"embedding: trained {trained}{seeds_note(trained)}, at equal loss {matched}; at random init {start}{told}."
    )
    parts, shown = {"trained": trained, "at equal loss": matched}, {"at random init": start}
    return judged(parts, -1, sentence, "cosine", also=scaled, shown=shown, doubt=control and not scaled)
