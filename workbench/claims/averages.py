"""What do trained averages of all earlier outputs look like?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.evidence import Evidence, at_last_step
from workbench.claims.registry import claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.wording import numbers, seeds_note
from workbench.statistics.error_bars import over_seeds


@claim(
    supports="DenseFormer ends lower than vanilla of the same depth; its weights are strong on the diagonal, positive on the embedding "
    "early and negative late",
    refutes="it ends higher; a weight alone refutes nothing, since Adam moves each by about the learning rate a step, whatever it is for",
    scale="4 to 8 layers show the diagonal and the embedding's column only",
    published="OpenWebText2 perplexity, 48 blocks, three seeds: 18.61 against 17.84 (1x1), 17.87 (4x5), 18.28 (last four); dropping "
    "more than about 15 % of the smallest weights after training ruins it (paper)",
    source="Pagliardini et al. 2024, DenseFormer, arXiv 2402.02622", metrics=("loss",), models=("transformer", "denseformer"),
    shows={"metric": "coefficient"},
)  # fmt: skip
def denseformer_weights_have_structure(evidence: Evidence) -> Verdict:
    """DenseFormer lowers the loss with averages of a common structure: strong diagonal, embedding added early and removed late."""
    pair = evidence.of_task("text").comparable("transformer", "denseformer")
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
        f"DenseFormer: {numbers({'loss': gain, **weights_of})} (the loss in nats minus the Transformer's; expected -, +, +, -; "
        f"weights start at 0 off the diagonal){seeds_note(gain)}, {last + 1} blocks."
    )
    return judged({"loss": gain}, (-1, 1, 1, -1), sentence, "weight", {"loss": "nats"}, also=weights_of)
