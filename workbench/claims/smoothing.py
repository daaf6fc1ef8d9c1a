"""Do tokens grow alike with depth, who slows it, and is it linked to concentration?"""

from __future__ import annotations

import pandas as pd
from scipy import stats

from workbench.claims.base import Evidence, Undecided, Verdict, claim, few, joined, name_of, status_of, table_of
from workbench.claims.loss import PAPER
from workbench.claims.sinks import gated
from workbench.statistics import Interval, over_seeds, paired_seeds

POINTS = 6  # pairs of a layer and a model, before a rank correlation says anything


@claim(
    supports="over layers and models entropy is low where tokens are alike, also without position 0",
    refutes="the correlation vanishes or turns without position 0",
    scale="a trained vanilla model that has sinks",
    published="Llama 8B and Mistral 7B at up to 2,048 tokens: entropy shaped as a W between 2 and 6, similarity as an M "
    "between 0.05 and 0.30 (paper)",
    source=PAPER, metrics=("importance_entropy", "token_similarity", "sink_mass", "sink_rate"), steps="series",
    shows={"metric": "token_similarity", "site": "stream"},
)  # fmt: skip
def smoothing_and_concentration_are_linked(evidence: Evidence) -> Verdict:
    """Over-smoothing and concentration of attention are linked."""
    mine = evidence.on("text").comparable("transformer")

    models = f"{len(mine.models)} model{'s' * (len(mine.models) > 1)}"

    def numbers() -> dict[str, Interval]:
        found = {}
        for variant, said in ((None, "all positions"), ("excl0", "without position 0")):
            pair = (
                {"metric": "importance_entropy"},
                {"metric": "token_similarity", "site": "stream", "variant": variant},
            )
            found[f"{said}, equal step"] = _correlation(*(mine.rows(**axes) for axes in pair))
            matched = [mine.at_common_loss(mine.rows(step="all", **axes)) for axes in pair]
            found[f"{said}, equal loss"] = over_seeds([]) if any(m.empty for m in matched) else _correlation(*matched)
        return found

    formed, found = gated(mine, numbers, f"rank correlation over the layers of {models}")
    status = joined(status_of(i, -1) for i in found.values())
    told = "; ".join(f"{name} {i}{few(i)}" for name, i in found.items())
    return Verdict(
        status,
        f"{formed}; rank correlation of entropy and similarity over the layers of {models}: {told}.",
        table_of(found, "rank correlation"),
    )


def _correlation(entropy: pd.DataFrame, similarity: pd.DataFrame) -> Interval:
    """Spearman's rank correlation over (model, layer) within each seed, then over seeds."""
    keys = ["run", "seed", "layer"]
    both = entropy[[*keys, "value"]].merge(similarity[[*keys, "value"]], on=keys, suffixes=("_e", "_s"))
    parts = [rows for _, rows in both.groupby("seed") if len(rows) >= POINTS and rows["value_e"].nunique() > 1]
    if not parts:
        raise Undecided("not_checkable", f"Needs {POINTS} layers, over all models of a seed, for a rank correlation.")
    return over_seeds([float(stats.spearmanr(rows["value_e"], rows["value_s"]).statistic) for rows in parts])


@claim(
    supports="training raises NeuTRENO's pairwise similarity per layer less than vanilla's, each against its own random init, at "
    "equal step and at equal loss",
    refutes="the difference of trained minus init is nil or reversed",
    scale="any trained size, three seeds; low similarity at random init is there before any training and is no finding",
    published="a figure for vision transformers only (reported by others)",
    source="Nguyen et al. 2023, NeuTRENO, arXiv "
    "2312.00751", metrics=("token_similarity",), models=("transformer", "neutreno"), steps="matched",
    shows={"metric": "token_similarity", "site": "stream"},
)  # fmt: skip
def neutreno_smooths_less(evidence: Evidence) -> Verdict:
    """NeuTRENO keeps tokens less alike than softmax attention."""
    pair = evidence.on("text").comparable("transformer", "neutreno")
    ends = {
        step: pair.rows("token_similarity", step=step, site="stream").query("layer > 0") for step in ("last", "first")
    }
    change = {m: pair.by_seed(ends["last"], m) - pair.by_seed(ends["first"], m) for m in ("neutreno", "transformer")}
    over_time = pair.rows("token_similarity", step="all", site="stream").query("layer > 0")
    start = ends["first"].groupby("run")["value"].mean()
    risen = over_time.assign(value=over_time["value"] - over_time["run"].map(start))
    found = {
        "trained minus init": paired_seeds(change["neutreno"], change["transformer"]),
        "at equal loss minus init": pair.at_equal_loss(risen, "neutreno", "transformer"),
        "trained alone": pair.difference(ends["last"], "neutreno", "transformer"),
    }
    first = found["trained minus init"]
    sentence = (
        f"Similarity of hidden states (mean cosine of pairs), NeuTRENO - {name_of('transformer')}, layers after the embedding: "
        "trained minus init "
        f"{first}{few(first)}, at equal loss {found['at equal loss minus init']}; "
        f"trained alone {found['trained alone']} (contains the difference at init)."
    )
    status = joined(status_of(found[name], -1) for name in ("trained minus init", "at equal loss minus init"))
    return Verdict(status, sentence, table_of(found, "cosine"))
