"""Do deep layers hold richer values, and what do their own values do once the first layer's are supplied?"""

from __future__ import annotations

import math

from workbench.claims.evidence import Evidence, deep_layers
from workbench.claims.loss import beside_scaled
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds, paired_seeds


@claim(
    supports="own values use more directions in most layers, with their scale divided out; the same holds beyond random init and at "
    "equal loss; the sum with the first layer's values has more directions by construction, trained or not, so it is shown and not "
    "judged",
    refutes="fewer, or the difference is in the scale alone",
    scale="any trained size, three seeds",
    published="the largest eigenvalue is larger for ResFormer in most layers (paper; not normalised, so it contains the scale)",
    source=PAPER, metrics=("effective_rank",), models=("transformer", SCALED, *RESFORMERS), steps="matched",
    shows={"metric": "effective_rank", "site": "own_v"},
)  # fmt: skip
def richer_values(evidence: Evidence) -> Verdict:
    """Value-residual models have richer representations: their values use more directions, scale aside."""
    pair = evidence.of_task("text").comparable("transformer", RESFORMERS, control=SCALED)
    model = pair.first_of(RESFORMERS)
    mixed, scale, own, start, over_time = (
        pair.rows("effective_rank", **axes).query("layer > 0")
        for axes in (
            {"site": "v"}, {"site": "v", "variant": "trace"}, {"site": "own_v"}, {"site": "own_v", "step": "first"},
            {"site": "own_v", "step": "all"},
        )
    )  # fmt: skip
    scaled, told = beside_scaled(pair, own, model, "directions")
    parts = {
        "own values, all layers": pair.difference(own, model), "beyond init": pair.beyond_init(own, start, model),
        "at equal loss": pair.at_equal_loss(over_time, model),
    }  # fmt: skip
    whole, effective = parts["own values, all layers"], pair.difference(mixed, model)
    layers = {f"layer {n}": pair.difference(rows, model) for n, rows in own.groupby("layer")}
    more = sum(i.value > 0 for i in layers.values())
    shown = {**layers, "effective values": effective, "scale (trace)": pair.difference(scale, model)}
    made = f", {min(1 - whole.value / effective.value, 1):.0%} of it the construction's" if effective.value > 0 else ""
    sentence = (
        f"Effective rank of own values, {model_name(model)} - Transformer, layers after the first: {whole} directions{seeds_note(whole)}, "
        f"more in {more} of {len(layers)} layers; trained minus init {parts['beyond init']}, at equal loss {parts['at equal loss']}; "
        f"effective values, to which the first layer's are added, {effective}{made}; change of their scale (trace of the covariance) "
        f"{shown['scale (trace)']}{told}."
    )
    units = {"scale (trace)": "norm squared"}
    doubt = more <= len(layers) / 2 or not scaled
    return judged(parts, 1, sentence, "directions", units, also=scaled, shown=shown, doubt=doubt)


@claim(
    supports="own values of deep layers grow alike and shrink late; dropping an attention costs about as much as dropping an MLP, more "
    "so than in vanilla; in vanilla the two costs differ",
    refutes="one of the three trends is reversed against vanilla",
    scale="8 layers or more, three seeds",
    published="described for the last version (reported by others), no numbers",
    source=PAPER, metrics=("sublayer_removal", "layer_similarity", "value_norm"), models=("transformer", *RESFORMERS),
    shows={"metric": "sublayer_removal"},
)  # fmt: skip
def deep_layers_learn_a_correction(evidence: Evidence) -> Verdict:
    """With the first layer's values supplied, own values of deep layers act as a correction."""
    pair = evidence.of_task("text").comparable("transformer", RESFORMERS)
    model, depth = pair.first_of(RESFORMERS), pair.fact("n_layers")
    if depth < 4:
        raise InsufficientEvidence(f"Needs 4 layers at the least, these models have {depth}.")
    similar = pair.rows("layer_similarity", site="own_v", variant="cka")
    neighbours = similar[(similar["layer"] - similar["source"] == 1) & (similar["source"] > 0)]
    balance, apart = _balance(pair, model, depth)
    intervals = {
        "likeness of neighbouring own values (CKA)": pair.difference(deep_layers(neighbours, depth), model),
        "last over middle norm of own values": late_norms(pair, model, depth),
        "distance between dropping attention and MLP": balance,
    }
    sentence = (
        f"{model_name(model)} - Transformer, deep layers: {intervals_text(intervals)} (the last two as natural logarithms of ratios; "
        f"expected +, -, -){seeds_note(next(iter(intervals.values())))}."
    )
    units = {"likeness of neighbouring own values (CKA)": "CKA"}
    return judged(intervals, (1, -1, -1), sentence, "logarithm of a ratio", units, doubt=not apart)


def late_norms(pair: Evidence, model: str, depth: int) -> Interval:
    """Return the difference of ln(norm of own values in the last layer / in the middle one), paired by seed."""
    norms = pair.of_models(["transformer", model]).rows("value_norm", site="own_v")  # a row for every position
    last, middle = (norms[norms["layer"] == n] for n in (depth - 1, depth // 2))
    ratios = ((pair.by_seed(last, m) / pair.by_seed(middle, m)).map(math.log) for m in (model, "transformer"))
    return paired_seeds(*ratios)


def _balance(pair: Evidence, model: str, depth: int) -> tuple[Interval, bool]:
    """Difference of ln(cost of dropping attention / cost of dropping the MLP) in deep layers, below 0 if nearer to 1.

    All seeds count with the sign of the Transformer's mean, since the distance of one seed from 1 would grow with its noise. The second
    value says whether the Transformer's ratio differs from 1.
    """
    costs = deep_layers(pair.rows("sublayer_removal"), depth)
    ratio = {}
    for name in (model, "transformer"):
        parts = [pair.by_seed(costs[costs["part"] == part], name) for part in ("attention", "mlp")]
        if any((p <= 0).any() for p in parts):
            why = f"Dropping deep sublayers of {model_name(name)} does not raise the loss in every seed."
            raise InsufficientEvidence(why, "unresolved")
        ratio[name] = (parts[0] / parts[1]).map(math.log)
    vanilla = over_seeds(ratio["transformer"])
    side = -1 if vanilla.value < 0 else 1
    return paired_seeds(side * ratio[model], side * ratio["transformer"]), vanilla.sign != 0
