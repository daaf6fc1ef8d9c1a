"""Do averages of all earlier outputs lower the loss, and what do they look like?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.evidence import Evidence, at_last_step
from workbench.claims.loss import at_best_rates, ends_lower
from workbench.claims.registry import claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import over_seeds, paired_seeds

ATTENTION_RESIDUALS = "Attention Residuals, arXiv 2603.15031 (2026)"
SOURCES = 3  # of a place, before their ranks say anything


@claim(
    supports="DenseFormer ends lower than vanilla of the same depth; its diagonal weights are strong; its embedding weights are "
    "positive early and negative late",
    refutes="it ends higher. A weight alone refutes nothing, since Adam moves every weight by about the learning rate per step, needed "
    "or not",
    scale="4 to 8 layers show the diagonal and the embedding's column only",
    published="OpenWebText2 perplexity, 48 blocks, three seeds: 18.61 against 17.84 (1x1), 17.87 (4x5), 18.28 (last four). Removing "
    "more than about 15 % of the smallest weights after training ruins it (paper)",
    source="Pagliardini et al. 2024, DenseFormer, arXiv 2402.02622", metrics=("loss",), models=("transformer", "denseformer"),
    shows={"metric": "coefficient"}, final_loss=True,
)  # fmt: skip
def denseformer_weights_have_structure(evidence: Evidence) -> Verdict:
    """DenseFormer lowers the loss with averages of a common structure: strong diagonal, embedding added early and removed late."""
    pair, tuning = at_best_rates(evidence.of_task("text"), "transformer", "denseformer")
    gain = pair.difference(pair.losses(), "denseformer")
    weights = at_last_step(pair.of_model(pair.written("coefficient"), "denseformer"))
    if weights.empty:
        raise InsufficientEvidence("DenseFormer's weights were not written down while it trained.")
    entry, layer = weights["part"].str.removeprefix("alpha_").astype(int), weights["layer"].astype(int)
    last = int(layer.max())
    rest = weights[entry != layer + 1].assign(value=lambda r: r["value"].abs())
    largest = rest.groupby(["seed", "layer"])["value"].max().groupby("seed").mean()

    def by_seed(chosen: pd.Series) -> pd.Series:
        return pair.by_seed(weights[chosen], "denseformer")

    weights_of = {
        "diagonal - largest other weight": over_seeds(by_seed(entry == layer + 1) - largest),
        "embedding's weight after the first block": over_seeds(by_seed((entry == 0) & (layer == 0))),
        "embedding's weight after the last block": over_seeds(by_seed((entry == 0) & (layer == last))),
    }
    sentence = (
        f"DenseFormer: {intervals_text({'loss': gain, **weights_of})} (the loss in nats minus the Transformer's; expected -, +, +, -; "
        f"weights start at 0 off the diagonal){seeds_note(gain)}, {last + 1} blocks; {tuning}."
    )
    units = {"loss": "nats"}
    return judged({"loss": gain}, (-1, 1, 1, -1), sentence, "weight", units, also=weights_of, doubt=tuning.edges)


@claim(
    supports="Attention Residuals, in every form that is here (over all sublayers, over blocks), end lower than the vanilla decoder",
    refutes="a form ends higher",
    scale="any size; published from 194M parameters on, one run each",
    published="baseline, blocks, full, one seed (paper): 1.931, 1.909, 1.899 (194M), 1.766, 1.746, 1.737 (436M), 1.719, 1.693, 1.692 "
    "(528M); by others: perplexity 128.6 to 104.5 at 100M; by others: -0.0089 and -0.0216 nats (Marin, issue 9290); by others: no gain "
    "replicated in nanochat (646) and in parameter-golf at 6 layers; by others: 29.70 to 31.76 at 1B where cumulative states are routed "
    "(arXiv 2605.18855)",
    source=ATTENTION_RESIDUALS, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def attention_residuals_lower_the_loss(evidence: Evidence) -> Verdict:
    """A softmax over all earlier outputs, by token, in place of their sum ends at a lower validation loss."""
    return ends_lower(evidence, "attention_residuals", "transformer")


@claim(
    supports="Attention Residuals end lower than DenseFormer, whose averages are the same for every token",
    refutes="they end higher",
    scale="any size, three seeds",
    published="436M, one seed: 1.737 by content, 1.749 with fixed weights in the same place, 1.767 for DenseFormer, no better than the "
    "baseline's 1.766 (paper)",
    source=ATTENTION_RESIDUALS, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def averages_by_content_beat_fixed_ones(evidence: Evidence) -> Verdict:
    """Reading earlier layers lowers the loss because the weights depend on the token."""
    return ends_lower(evidence, "attention_residuals", "denseformer")


@claim(
    supports="over the sources of a place, the cost of replacing one by its mean rises with its weight. It rises more than the cost of "
    "a random vector of its length in its place: the differences of the rank correlations are above 0",
    refutes="they are below 0",
    scale="trained Attention Residuals, three seeds; a comparison within one model, two or three sources say little",
    published="against it, outside of depth routing: the largest mass is not the largest causal effect (arXiv 2606.13168)",
    source=ATTENTION_RESIDUALS, metrics=("source_ablation", "depth_routing"), models=("attention_residuals",),
    shows={"metric": "depth_routing"},
)  # fmt: skip
def what_is_read_most_is_needed_most(evidence: Evidence) -> Verdict:
    """The weights of depth attention tell which earlier output a sublayer needs."""
    forms = [name for name in evidence.of_task("text").models if name.startswith("attention_residuals")]
    mine = evidence.of_task("text").comparable(forms or "attention_residuals")
    weights = mine.rows("depth_routing")
    means, random = mine.rows("source_ablation", variant="mean"), mine.rows("source_ablation", control="random")
    costs = {"its mean": means, "random": random}
    here = [m for m in forms if m in mine.models]
    pairs = [(model, how) for model in here for how in costs]
    ranks = {(m, how): _rank_correlations(mine.known(weights, m), mine.known(costs[how], m)) for m, how in pairs}
    parts = {model_name(m): paired_seeds(ranks[m, "its mean"], ranks[m, "random"]) for m in here}
    shown = {f"{model_name(m)}, {how} in its place": over_seeds(ranks[m, how]) for m, how in ranks}
    sentence = (
        f"Rank correlation of a source's mean weight with the rise of the loss, mean over places: "
        f"{intervals_text(shown, notes=True)}; its mean minus random: {intervals_text(parts)}."
    )
    return judged(parts, 1, sentence, "rank correlation", shown=shown)


def _rank_correlations(weights: pd.DataFrame, costs: pd.DataFrame) -> pd.Series:
    """Spearman's rank correlation of weight and cost over the sources of a place, averaged over places, by seed."""
    keys = ["seed", "site", "layer", "part"]
    means = [rows.groupby(keys)["value"].mean() for rows in (weights, costs)]
    both = pd.concat(means, axis=1, keys=["weight", "cost"]).dropna()
    places = [rows for _, rows in both.groupby(keys[:3]) if len(rows) >= SOURCES and (rows.nunique() > 1).all()]
    if not places:
        raise InsufficientEvidence(f"Needs places with {SOURCES} sources or more, and weights and costs that differ.")
    ranks = [(rows.index[0][0], rows["weight"].corr(rows["cost"], method="spearman")) for rows in places]
    return pd.DataFrame(ranks, columns=["seed", "rank"]).groupby("seed")["rank"].mean()


@claim(
    supports="in Attention Residuals, removing the embedding instead of the previous layer raises the loss more for values than for "
    "queries or keys",
    refutes="it costs less than with queries or with keys",
    scale="trained Attention Residuals, three seeds; queries, keys and values share one routing here, so their needs are compared",
    published="values keep reading the embedding, queries and keys recent layers (a probe with a routing for each: others' code, "
    "unpublished). Against it: ExoFormer (arXiv 2601.08131) also gains by reuse of queries and keys, once they are normed",
    source="a probe by others (2026), unpublished; " + ATTENTION_RESIDUALS, metrics=("reader_ablation",),
    models=("attention_residuals",), shows={"metric": "reader_ablation"},
)  # fmt: skip
def values_read_the_embedding_queries_and_keys_the_latest(evidence: Evidence) -> Verdict:
    """Deep values keep reading the embedding, while queries and keys read the latest outputs."""
    forms = [name for name in evidence.of_task("text").models if name.startswith("attention_residuals")]
    mine = evidence.of_task("text").comparable(forms or "attention_residuals")
    model = mine.first_of(forms)
    rows = mine.known(mine.rows("reader_ablation"), model)
    each = rows.groupby(["seed", "site", "part"])["value"].mean().unstack("part").astype(float)
    early = (each["embed"] - each["latest"]).unstack("site")
    others = {"queries": early["q"], "keys": early["k"]}
    parts = {f"values - {name}": paired_seeds(early["v"], other) for name, other in others.items()}
    means = each.groupby("site").mean().iterrows()
    costs = "; ".join(f"{site} {row['embed']:+.3f} and {row['latest']:+.3f}" for site, row in means)
    sentence = (
        f"{model_name(model)}, rise of the loss without the embedding and without the layer before, mean over layers: {costs} nats; "
        f"their difference, {intervals_text(parts, notes=True)} nats."
    )
    return judged(parts, 1, sentence, "nats")
