"""What does a value residual approximate?

Claim (Zhou et al. 2024): averaging two layers' values under one key comes close to cross-layer attention, the identity mapping
that adds values past the pattern does not. Refuted where it is the other way round.

Everything is computed on the unmodified vanilla model. The layer's own output alone is the baseline: a good cosine is worth no
more than what it adds to that.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("same_key_averaging_approximates",)
QUICK = ("transformer", "same_key", "identity_map", "cross_layer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Cosine with cross-layer attention by layer: both approximations, and the baseline."""
    text = evidence.on("text")
    guesses = [
        profile(text, "cross_layer_approximation", variant=how).assign(approximation=how)
        for how in ("same_key", "identity", "identity_all")
    ]
    own = profile(text, "cross_layer_approximation", control="own").assign(approximation="own output alone")
    return pd.concat([*guesses, own], ignore_index=True)


def main() -> None:
    """Cosines with cross-layer attention."""
    answer("cross_layer", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
