"""Do deep layers of value-residual models know more of the input token?

Claim (Zhou et al. 2025): initial token information is preserved. Refuted where a linear probe reads no more bits of the token
off deep hidden states and attention outputs, beyond random init and beyond what the lower loss alone implies.

Values are left out of the verdict: the first layer's are a lookup of the token, every SVFormer value is, and ResFormer's
effective values contain them, so a probe must succeed there by construction.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    claims=("token_information_is_preserved",),
    table=profiles(*(("token_probe", {"site": site}, {"site": site}) for site in ("stream", "z", "own_v"))),
    quick=("transformer", "resformer"),
)

if __name__ == "__main__":
    SCRIPT.main()
