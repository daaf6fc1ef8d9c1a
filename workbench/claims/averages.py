"""What do trained averages of all earlier outputs look like?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.base import Evidence, Status, Undecided, Verdict, claim, few, joined, status_of, table_of
from workbench.statistics import Interval, over_seeds


@claim(
    supports="DenseFormer ends lower than vanilla of the same depth; its weights are strong on the diagonal, positive on the "
    "embedding early and "
    "negative late",
    refutes="weights as at the start (the identity), or no gain",
    scale="4 to 8 layers show the diagonal and the embedding's column only",
    published="OpenWebText2 perplexity, 48 blocks, three seeds: 18.61 against 17.84 (1x1), 17.87 (4x5), 18.28 (last four); "
    "dropping more than "
    "about 15 % of the smallest weights after training ruins it (paper)",
    source="Pagliardini et al. 2024, DenseFormer, arXiv 2402.02622", metrics=("loss",), models=("transformer", "denseformer"),
    shows={"metric": "coefficient"},
)  # fmt: skip
def denseformer_weights_have_structure(evidence: Evidence) -> Verdict:
    """DenseFormer lowers the loss with averages of a common structure: strong diagonal, embedding added early and removed late."""
    pair = evidence.on("text").comparable("transformer", "denseformer")
    gain = pair.difference(pair.losses(), "denseformer", "transformer")
    weights = pair.model_of(pair.telemetry[pair.telemetry["metric"] == "coefficient"], "denseformer")
    weights = weights[weights["step"] == weights.groupby("run")["step"].transform("max")]
    if weights.empty:
        raise Undecided("not_checkable", "DenseFormer's weights were not written down while it trained.")
    weights = weights.assign(
        entry=weights["part"].str.removeprefix("alpha_").astype(int), layer=weights["layer"].astype(int)
    )
    last = int(weights["layer"].max())
    diagonal = weights[weights["entry"] == weights["layer"] + 1]
    rest = weights[weights["entry"] != weights["layer"] + 1].assign(value=lambda r: r["value"].abs())
    embedding = weights[weights["entry"] == 0]
    found: dict[str, Interval] = {
        "loss": gain,
        "diagonal - largest other weight": over_seeds(
            _by_seed(diagonal) - rest.groupby(["seed", "layer"])["value"].max().groupby("seed").mean()
        ),
        "embedding's weight after the first block": over_seeds(_by_seed(embedding[embedding["layer"] == 0])),
        "embedding's weight after the last block": over_seeds(_by_seed(embedding[embedding["layer"] == last])),
    }
    expected = (-1, 1, 1, -1)
    statuses: list[Status] = [status_of(i, sign) for i, sign in zip(found.values(), expected, strict=True)]
    told = "; ".join(f"{name} {i}" for name, i in found.items())
    return Verdict(
        joined(statuses),
        f"DenseFormer: {told} (the loss in nats minus the Transformer's; expected -, +, +, -; weights start at 0 off the diagonal)"
        f"{few(gain)}, {last + 1} blocks.",
        table_of(found, "weight", {"loss": "nats"}),
    )


def _by_seed(rows: pd.DataFrame) -> pd.Series:
    return rows.groupby("seed")["value"].mean().astype(float)
