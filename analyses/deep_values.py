"""Do the values of deep layers need context?

Claim (after Bank of Values, arXiv 2606.02780): in a trained vanilla model most of the variance of deep own values is the
token's identity, and replacing them by their mean per token costs a small part of what zeroing costs. Refuted where the
token mean costs about as much as zero. Controls: the same share at random init, of queries and keys, and under shuffled ids.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("deep_values_need_little_context",)
QUICK = ("transformer",)


def ours(evidence: Evidence) -> pd.DataFrame:
    """Shares of the token's identity, then what each replacement of the values costs."""
    text = evidence.on("text")
    shares = [profile(text, "token_identity_share", site=s).assign(site=s) for s in ("own_v", "q", "k")]
    costs = [
        profile(text, "value_ablation", site="own_v", variant=how).assign(site="own_v", replacement=how)
        for how in ("token_mean", "mean", "zero")
    ]
    return pd.concat([*shares, *costs], ignore_index=True)


def main() -> None:
    """Identity shares and replaced values of the text models."""
    answer("deep_values", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
