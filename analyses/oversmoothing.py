"""Do tokens grow alike with depth, who slows it, and is it linked to concentration?

Claims: entropy of attention is low where tokens are alike, also without position 0 (Zhou et al. 2024); NeuTRENO keeps tokens
less alike than softmax attention (Nguyen et al. 2023). Refuted where the correlation vanishes without position 0, or where
trained minus init shows nothing.

Each model is compared with its own random init: SVFormer and NeuTRENO have less similar tokens before any training.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("smoothing_and_concentration_are_linked", "neutreno_smooths_less")
QUICK = ("transformer", "resformer", "neutreno")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Similarity of hidden states per layer, with and without position 0."""
    text = evidence.on("text")
    plain = profile(text, "token_similarity", site="stream").assign(positions="all")
    without = profile(text, "token_similarity", site="stream", variant="excl0").assign(positions="without the first")
    return pd.concat([plain, without], ignore_index=True)


def main() -> None:
    """Similarity against init, and its link to concentration."""
    answer("oversmoothing", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
