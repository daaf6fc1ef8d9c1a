"""Does a value residual approximate cross-layer attention?

Claim (Zhou et al. 2024): averaging two layers' values under one key comes close to cross-layer attention, the identity mapping
that adds values past the pattern does not. Refuted where it is the other way round.

Everything is computed on the unmodified vanilla model. The layer's own output alone is the baseline: a good cosine is worth no
more than what it adds to that.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("cross_layer",),
    table=profiles(
        *(
            ("cross_layer_approximation", {"variant": how}, {"approximation": how})
            for how in ("same_key", "identity", "identity_all")
        ),
        ("cross_layer_approximation", {"control": "own"}, {"approximation": "own output alone"}),
    ),
    quick=("transformer", "same_key", "identity_map", "cross_layer"),
)

if __name__ == "__main__":
    SCRIPT.main()
