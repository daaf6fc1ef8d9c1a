"""Do tokens grow alike with depth, who slows it, and is it linked to concentration?

Claims: entropy of attention is low where tokens are alike, also without position 0 (Zhou et al. 2024); NeuTRENO keeps tokens
less alike than softmax attention (Nguyen et al. 2023). Refuted where the correlation vanishes without position 0, or where
trained minus init shows nothing.

Each model is compared with its own random init: SVFormer and NeuTRENO have less similar tokens before any training.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("smoothing",),
    table=profiles(
        ("token_similarity", {"site": "stream"}, {"positions": "all"}),
        ("token_similarity", {"site": "stream", "variant": "excl0"}, {"positions": "without the first"}),
    ),
    quick=("transformer", "resformer", "neutreno"),
)

if __name__ == "__main__":
    SCRIPT.main()
