"""What do trained averages of earlier outputs look like?

Claim (Pagliardini et al. 2024, DenseFormer): lower loss than the same depth, with weights that are strong on the diagonal,
positive on the embedding early and negative late. Refuted where the weights stay as at the start, or nothing is gained.

Weight decay pulls the coefficients to 0 where it is on, and small models show the diagonal and the embedding's column only.
Trained coefficients of value residuals are in where_the_residual_belongs.
"""

import pandas as pd

from analyses.common import answer
from workbench.claims import Evidence
from workbench.statistics import seed_band

CLAIMS = ("denseformer_weights_have_structure",)
QUICK = ("transformer", "denseformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Every trained coefficient at the last step: mean over seeds with its range."""
    told = evidence.telemetry[evidence.telemetry["metric"] == "coefficient"]
    last = told[told["step"] == told.groupby("run")["step"].transform("max")]
    return seed_band(last.rename(columns={"architecture": "model"}), ["model", "layer", "part"])


def main() -> None:
    """DenseFormer's weights."""
    answer("learned_coefficients", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
