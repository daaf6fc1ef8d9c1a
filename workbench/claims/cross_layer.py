"""Does a value residual approximate cross-layer attention?"""

from __future__ import annotations

import contextlib

import numpy as np

from workbench.claims.evidence import Evidence, model_mean, sound
from workbench.claims.loss import at_best_rates
from workbench.claims.registry import PAPER, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note

TRAINED = ("cross_layer", "same_key", "identity_map")


@claim(
    supports="in a trained vanilla model same-key averaging is close to cross-layer attention in every layer, identity mapping is not",
    refutes="the reverse",
    scale="a trained vanilla model of 8 layers, three seeds; at random init, where attention is uniform, it holds without any training",
    published="same-key well above identity, axis from 0.3 to 0.9. Trained, identity mapping is far worse, up to +0.5 nats, and "
    "ResFormer ends below exact cross-layer attention (figures of the paper). This is the largest and safest effect in the paper",
    source=PAPER, metrics=("cross_layer_approximation",), models=("transformer",), steps="ends",
    shows={"metric": "cross_layer_approximation", "variant": ...},
)  # fmt: skip
def same_key_averaging_approximates(evidence: Evidence) -> Verdict:
    """Averaging values under one key approximates cross-layer attention; adding values past the attention pattern does not."""
    mine = evidence.of_task("text").comparable("transformer").of_models(["transformer"])
    rows = sound(mine.rows("cross_layer_approximation", variant=...))
    keys = ["run", "seed", "layer"]
    wide = rows.pivot_table(index=keys, columns="variant", values=["value", "se"]).reset_index()
    gap = wide[keys].droplevel(1, axis=1).assign(
        value=wide["value", "same_key"] - wide["value", "identity"],
        se=np.hypot(wide["se", "same_key"], wide["se", "identity"]),  # as if independent: wider than paired
        n=rows["n"].min(),
    )  # fmt: skip
    intervals = {f"layer {n}": model_mean(part) for n, part in gap.groupby("layer")}
    cosine = {how: float(wide["value", how].mean()) for how in ("same_key", "identity")}
    own = float(mine.rows("cross_layer_approximation", control="own")["value"].mean())
    at_init = trained = ""
    with contextlib.suppress(InsufficientEvidence):
        start = mine.rows("cross_layer_approximation", step="first", variant=...).groupby("variant")["value"].mean()
        at_init = f" (at random init same-key {start['same_key']:.2f}, identity {start['identity']:.2f})"
    try:  # models that were trained with the approximations
        group, tuning = at_best_rates(evidence.of_task("text"), "transformer", TRAINED, also=TRAINED)
        losses = group.losses()
        minus = {model_name(m): group.difference(losses, m) for m in TRAINED if m in group.models}
        trained = f"; trained so, loss minus the Transformer's: {intervals_text(minus, ', ')} nats, {tuning}."
    except InsufficientEvidence as reason:
        trained = f". Models trained so are not compared. {reason}"
    sentence = (
        f"Cosine with cross-layer attention: same-key {cosine['same_key']:.2f}, identity {cosine['identity']:.2f}, the layer's own output "
        f"alone {own:.2f}{at_init}; same-key - identity by layer: {intervals_text(intervals, ', ')}{seeds_note(rows['seed'].nunique())}"
        f"{trained}"
    )
    # as close without the other layer: then it is no approximation of attention to both
    return judged(intervals, 1, sentence, "cosine", doubt=cosine["same_key"] <= own)
