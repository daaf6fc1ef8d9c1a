"""Do deep layers hold richer values, and what do their own values do once the first layer's are supplied?"""

from __future__ import annotations

import math

from workbench.claims.base import (
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
)
from workbench.claims.loss import PAPER
from workbench.statistics import Interval, paired_seeds


@claim(
    supports="effective values use more directions in most layers after their scale is divided out, more beyond random init, "
    "and at equal loss",
    refutes="fewer, or the difference is in the scale alone",
    scale="any trained size, three seeds",
    published="the largest eigenvalue of each layer is larger for ResFormer in most layers (paper; not normalised, so it "
    "contains the scale)",
    source=PAPER, metrics=("effective_rank",), models=("transformer", *RESFORMERS), steps="matched",
    shows={"metric": "effective_rank", "site": "v"},
)  # fmt: skip
def richer_values(evidence: Evidence) -> Verdict:
    """Value-residual models have richer representations: their values use more directions, scale aside."""
    pair = evidence.on("text").comparable("transformer", RESFORMERS)
    model = pair.named(RESFORMERS)
    rank = pair.rows("effective_rank", site="v").query("layer > 0")
    scale = pair.rows("effective_rank", site="v", variant="trace").query("layer > 0")
    own = pair.rows("effective_rank", site="own_v").query("layer > 0")
    whole = pair.difference(rank, model, "transformer")
    layers = {f"layer {n}": pair.difference(rows, model, "transformer") for n, rows in rank.groupby("layer")}
    more = sum(i.value > 0 for i in layers.values())
    start, over_time = (pair.rows("effective_rank", step=s, site="v").query("layer > 0") for s in ("first", "all"))
    change = {m: pair.by_seed(rank, m) - pair.by_seed(start, m) for m in (model, "transformer")}
    matched = {
        "beyond init": paired_seeds(
            change[model], change["transformer"]
        ),  # a sum of two sources starts with more of them
        "at equal loss": pair.at_equal_loss(over_time, model, "transformer"),
    }
    status = joined(status_of(i, 1) for i in (whole, *matched.values()))
    if status == "supported" and more <= len(layers) / 2:
        status = "unresolved"
    others = {
        "own values": pair.difference(own, model, "transformer"),
        "scale (trace)": pair.difference(scale, model, "transformer"),
    }
    sentence = (
        f"Effective rank of the values, {name_of(model)} - Transformer, layers after the first: {whole} directions{few(whole)}, more in "
        f"{more} of {len(layers)} layers; trained minus init {matched['beyond init']}, at equal loss {matched['at equal loss']}; of own "
        f"values alone {others['own values']}; change of the scale (trace of the covariance) {others['scale (trace)']}."
    )
    found = {"all layers": whole, **layers, **matched, **others}
    return Verdict(status, sentence, table_of(found, "directions", {"scale (trace)": "norm squared"}))


@claim(
    supports="own values of deep layers grow alike and shrink late, and an attention costs about as much to drop as an MLP, "
    "more so than in vanilla",
    refutes="no such trend against vanilla",
    scale="8 layers or more, three seeds",
    published="described for the last version (reported by others), no numbers",
    source=PAPER, metrics=("sublayer_removal", "layer_similarity", "value_norm"), models=("transformer", *RESFORMERS),
    shows={"metric": "sublayer_removal"},
)  # fmt: skip
def deep_layers_learn_a_correction(evidence: Evidence) -> Verdict:
    """With the first layer's values supplied, own values of deep layers act as a correction."""
    pair = evidence.on("text").comparable("transformer", RESFORMERS)
    model, depth = pair.named(RESFORMERS), int(pair.runs["n_layers"].max())
    if depth < 4:
        raise Undecided("not_checkable", f"Needs 4 layers at the least, these models have {depth}.")
    similar = pair.rows("layer_similarity", site="own_v", variant="cka")
    neighbours = similar[(similar["layer"] - similar["source"] == 1) & (similar["source"] > 0)]
    found = {
        "likeness of neighbouring own values (CKA)": pair.difference(deep_of(neighbours, depth), model, "transformer"),
        "last over middle norm of own values": _late(pair, model, depth),
        "distance between dropping attention and MLP": _balance(pair, model, depth),
    }
    expected = (1, -1, -1)
    status = joined(status_of(i, sign) for i, sign in zip(found.values(), expected, strict=True))
    told = "; ".join(f"{name} {i}" for name, i in found.items())
    first = next(iter(found.values()))
    return Verdict(
        status,
        f"{name_of(model)} - Transformer, deep layers: {told} (the last two as natural logarithms of ratios; expected +, -, -)"
        f"{few(first)}.",
        table_of(found, "logarithm of a ratio", {"likeness of neighbouring own values (CKA)": "CKA"}),
    )


def _late(pair: Evidence, model: str, depth: int) -> Interval:
    """ln of the last layer's own value norm over the middle layer's."""
    norms = pair.rows("value_norm", site="own_v")
    ends = {n: norms[norms["layer"] == n] for n in (depth - 1, depth // 2)}
    ratio = {
        m: (pair.by_seed(ends[depth - 1], m) / pair.by_seed(ends[depth // 2], m)).map(math.log)
        for m in (model, "transformer")
    }
    return paired_seeds(ratio[model], ratio["transformer"])


def _balance(pair: Evidence, model: str, depth: int) -> Interval:
    """|ln| of what dropping attention costs over what dropping the MLP costs, deep layers."""
    costs = deep_of(pair.rows("sublayer_removal"), depth)
    found = {}
    for name in (model, "transformer"):
        parts = [pair.by_seed(costs[costs["part"] == part], name) for part in ("attention", "mlp")]
        if any((p <= 0).any() for p in parts):
            raise Undecided(
                "unresolved", f"Dropping deep sublayers of {name_of(name)} does not raise the loss in every seed."
            )
        found[name] = (parts[0] / parts[1]).map(math.log).abs()
    return paired_seeds(found[model], found["transformer"])
