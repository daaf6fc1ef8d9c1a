"""Do the values of deep layers need context?

Claim (after Bank of Values, arXiv 2606.02780): in a trained vanilla model most of the variance of deep own values is the
token's identity, and replacing them by their mean per token costs a small part of what zeroing costs. Refuted where the
token mean costs about as much as zero. Values of the last third that are looked up by token should then cost no loss: refuted where
they do. Controls: the same share at random init, of queries and keys, and under shuffled ids.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    claims=("deep_values_need_little_context", "deep_values_can_be_looked_up"),
    table=profiles(
        *(("token_identity_share", {"site": site}, {"site": site}) for site in ("own_v", "q", "k")),
        *(
            ("value_ablation", {"site": "own_v", "variant": how}, {"site": "own_v", "replacement": how})
            for how in ("token_mean", "mean", "zero")
        ),
    ),
    quick=("transformer",),
)

if __name__ == "__main__":
    SCRIPT.main()
