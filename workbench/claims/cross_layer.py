"""What does a value residual approximate?"""

from __future__ import annotations

import numpy as np

from workbench.claims.base import (
    LEAST_SEEDS,
    Evidence,
    Undecided,
    Verdict,
    claim,
    joined,
    name_of,
    status_of,
    table_of,
    within,
)
from workbench.claims.loss import PAPER

TRAINED = ("cross_layer", "same_key", "identity_map")


@claim(
    supports="in a trained vanilla model same-key averaging is close to cross-layer attention in every layer, identity mapping is not",
    refutes="the reverse",
    scale="a trained vanilla model of 8 layers, three seeds; at random init, where attention is uniform, it holds without any training",
    published="same-key well above identity, axis from 0.3 to 0.9; trained, identity mapping is far worse, up to +0.5 nats, "
    "and ResFormer ends "
    "below exact cross-layer attention (figures of the paper): the largest and safest effect in it",
    source=PAPER, metrics=("cross_layer_approximation",), models=("transformer",), steps="ends",
    shows={"metric": "cross_layer_approximation", "variant": ...},
)  # fmt: skip
def same_key_averaging_approximates(evidence: Evidence) -> Verdict:
    """Averaging values under one key approximates cross-layer attention; adding values past the attention pattern does not."""
    mine = evidence.on("text").comparable("transformer").only(["transformer"])
    rows = mine.rows("cross_layer_approximation", variant=...)
    keys = ["run", "seed", "layer"]
    wide = rows.pivot_table(index=keys, columns="variant", values=["value", "se"]).reset_index()
    gap = wide[keys].droplevel(1, axis=1).assign(
        value=wide["value", "same_key"] - wide["value", "identity"],
        se=np.hypot(wide["se", "same_key"], wide["se", "identity"]),  # as if independent: wider than paired
        n=rows["n"].min(),
    )  # fmt: skip
    found = {f"layer {n}": within(part) for n, part in gap.groupby("layer")}
    status = joined(status_of(i, 1) for i in found.values())
    cosine = {how: float(wide["value", how].mean()) for how in ("same_key", "identity")}
    own = float(mine.rows("cross_layer_approximation", control="own")["value"].mean())
    if status == "supported" and cosine["same_key"] <= own:
        status = "unresolved"  # leaving the other layer out does as well
    seeds = rows["seed"].nunique()
    if status == "supported" and seeds < LEAST_SEEDS:  # documents tell one model's layers apart, not what training does
        status = "unresolved"
    few_seeds = f" ({seeds} of the {LEAST_SEEDS} seeds needed)" if seeds < LEAST_SEEDS else ""
    told = ", ".join(f"{name} {i}" for name, i in found.items())
    sentence = (
        f"Cosine with cross-layer attention: same-key {cosine['same_key']:.2f}, identity {cosine['identity']:.2f}, the layer's own output "
        f"alone {own:.2f}{_at_init(mine)}; same-key - identity by layer: {told}{few_seeds}{_trained(evidence)}."
    )
    return Verdict(status, sentence, table_of(found, "cosine"))


def _at_init(mine: Evidence) -> str:
    """The same cosines at random init, where they were measured."""
    try:
        rows = mine.rows("cross_layer_approximation", step="first", variant=...)
    except Undecided:
        return ""
    cosine = rows.groupby("variant")["value"].mean()
    return f" (at random init same-key {cosine['same_key']:.2f}, identity {cosine['identity']:.2f})"


def _trained(evidence: Evidence) -> str:
    """Losses of models trained with the approximations, where they are here."""
    try:
        group = evidence.on("text").comparable("transformer", TRAINED)
        losses = group.losses()
    except Undecided:
        return ""
    told = [f"{name_of(m)} {group.difference(losses, m, 'transformer')}" for m in TRAINED if m in group.models]
    return f"; trained so, loss minus the Transformer's: {', '.join(told)} nats"
