"""Where does the residual belong: which tensor, which source, which layers, which weight?

Claims (Zhou et al. 2024 and 2025): the value path is the place (the same shortcut on queries, keys, attention or the hidden
state does not help), the first layer the source, late layers profit most, and every weight from 0.2 to 5 helps. Refuted where
a control ends as low, a later source helps as much, or trained coefficients do not grow with depth.

The controls are architectures of their own: residual_q, residual_k, residual_attention, residual_hidden. Other sources,
layers and weights are options of resformer and resformer_constant.
"""

import pandas as pd

from analyses.common import answer, final_losses
from workbench.claims import Evidence

CLAIMS = ("value_path_is_the_place", "first_layer_is_the_source", "late_layers_profit", "robust_to_its_weight")
QUICK = (
    "transformer", "resformer", "residual_q", "residual_k", "residual_attention", "residual_hidden", "resformer_sparse",
    "resformer_learnable", "resformer_constant", ("resformer", {"source_layer": 1}), ("resformer_sparse", {"layers": [1]}),
    ("resformer_constant", {"lambda_v1": 0.2}), ("resformer_constant", {"lambda_v1": 0.5}), ("resformer_constant", {"lambda_v1": 5.0}),
)  # fmt: skip


def ours(evidence: Evidence) -> pd.DataFrame:
    """Final losses, domains averaged: lowest first."""
    found = final_losses(evidence.on("text")).groupby("model", as_index=False)[["mean", "min", "max"]].mean()
    return found.sort_values("mean").assign(unit="nats")


def main() -> None:
    """Tensor, source, layers and weight."""
    answer("where_the_residual_belongs", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
