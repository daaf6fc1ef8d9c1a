"""Do value paths speed up induction?

Claim (ours, exploratory): on random tokens repeated once, models whose later layers read the first layer's values learn to
copy earlier than the vanilla Transformer, and a residual on the keys does not help. Refuted where the order of formation
steps (Olsson et al. 2022: first step with the copy loss below half of its start) is lost at any rate. Published: none known.
"""

from .common import Script
from .tables import formation

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("induction",),
    table=formation,
    quick=("svformer", "resformer", "transformer", "residual_k"),
    task="repeated",
)

if __name__ == "__main__":
    SCRIPT.main()
