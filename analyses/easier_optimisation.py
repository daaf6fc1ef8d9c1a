"""Is the gain better information flow, or only easier optimisation?

Claim (Zhou et al. 2024): ResFormer wins at every tuned learning rate, and a vanilla model whose first layer (or first W_V)
learns faster does not reproduce the gain. Refuted where such a control, or the tuned baseline, closes the gap.

The control is a vanilla run with lr_factors, as --recipe 'lr_factors={"blocks.0.*": 5}'. Gradient norms are shown because the
papers do; a larger gradient of the first W_V is close to a tautology, since the shortcut adds terms to it.
"""

from .common import Script
from .tables import losses_by_rate

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("optimisation",),
    table=losses_by_rate,
    quick=(
        "transformer", "resformer", ("transformer", {"lr": 1e-3}), ("resformer", {"lr": 1e-3}), ("transformer", {"lr": 2e-3}),
        ("resformer", {"lr": 2e-3}), ("transformer", {"lr_factors": {"blocks.0.*": 5.0}}),
    ),
)  # fmt: skip

if __name__ == "__main__":
    SCRIPT.main()
