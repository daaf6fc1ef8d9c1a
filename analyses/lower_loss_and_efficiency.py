"""Does a value residual lower the loss, and what does that save or cost?

Claims (Zhou et al. 2024 and 2025): at equal size and data ResFormer ends 0.027 to 0.032 nats below the Transformer, reaches
its loss with fewer parameters and fewer tokens, at the same memory and compute, ahead of NeuTRENO and DenseFormer, and gains
downstream. Refuted where the difference is 0 or above over seeds, or turns once the baseline has its own best learning rate.

Absolute losses come before differences; a difference inside its interval over seeds is unresolved. Savings are read off
several forms of the curve side by side, since the forms differ by points of per cent on the same numbers.
"""

import pandas as pd

from analyses.common import answer, final_losses
from workbench.claims import Evidence

CLAIMS = ("lower_loss", "fewer_parameters", "fewer_tokens", "same_cost", "ahead_of_relatives", "downstream_gains")
QUICK = ("transformer", "resformer", "neutreno", "denseformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Final losses by model and domain, with the largest size and most tokens beside them."""
    sizes = evidence.runs.groupby("model")[["parameters", "tokens"]].max()
    return final_losses(evidence.on("text")).merge(sizes, on="model")


def main() -> None:
    """Losses, savings, cost and rivals."""
    answer("lower_loss_and_efficiency", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
