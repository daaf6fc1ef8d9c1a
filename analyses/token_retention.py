"""Do deep layers of value-residual models know more of the input token?

Claim (Zhou et al. 2025): initial token information is preserved. Refuted where a linear probe reads no more bits of the token
off deep hidden states and attention outputs, beyond random init and beyond what the lower loss alone implies.

Values are left out of the verdict: the first layer's are a lookup of the token, every SVFormer value is, and ResFormer's
effective values contain them, so a probe must succeed there by construction.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("token_information_is_preserved",)
QUICK = ("transformer", "resformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Bits of the token's identity by site and layer, at random init and trained."""
    sites = ("stream", "z", "own_v")
    return pd.concat(
        [profile(evidence.on("text"), "token_probe", site=s).assign(site=s) for s in sites], ignore_index=True
    )


def main() -> None:
    """Bits of the token in deep layers."""
    answer("token_retention", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
