"""Is the gain better information flow, or only easier optimisation?

Claim (Zhou et al. 2024): ResFormer wins at every tuned learning rate, and a vanilla model whose first layer (or first W_V)
learns faster does not reproduce the gain. Refuted where such a control, or the tuned baseline, closes the gap.

The control is a vanilla run with lr_factors, as --recipe 'lr_factors={"blocks.0.*": 5}'. Gradient norms are shown because the
papers do; a larger gradient of the first W_V is close to a tautology, since the shortcut adds terms to it.
"""

import pandas as pd

from analyses.common import answer
from workbench.claims import Evidence
from workbench.statistics import seed_band

CLAIMS = ("not_merely_easier_optimisation",)
QUICK = (
    "transformer", "resformer", ("transformer", {"lr": 1e-3}), ("resformer", {"lr": 1e-3}), ("transformer", {"lr": 2e-3}),
    ("resformer", {"lr": 2e-3}), ("transformer", {"lr_factors": {"blocks.0.*": 5.0}}),
)  # fmt: skip


def ours(evidence: Evidence) -> pd.DataFrame:
    """Final loss of every model at every learning rate."""
    losses = evidence.on("text").losses()
    return seed_band(losses, ["model", "lr"]).sort_values(["lr", "mean"]).assign(unit="nats")


def main() -> None:
    """Learning rates and controls."""
    answer("easier_optimisation", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
