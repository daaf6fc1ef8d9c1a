"""Do value paths speed up induction?

Claim (ours, exploratory): on random tokens repeated once, models whose later layers read the first layer's values learn to
copy earlier than the vanilla Transformer, and a residual on the keys does not help. Refuted where the order of formation
steps (Olsson et al. 2022: first step with the copy loss below half of its start) is lost at any rate. Published: none known.
"""

import pandas as pd

from analyses.common import answer
from workbench.claims import Evidence
from workbench.claims.base import Undecided
from workbench.findings import formation_steps

CLAIMS = ("value_paths_speed_up_induction",)
QUICK = ("svformer", "resformer", "transformer", "residual_k")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Formation step of every run."""
    told = evidence.on("repeated").telemetry
    if told.empty:
        raise Undecided("not_checkable", "no run was trained on repeated tokens; make some with `workbench demo`")
    return formation_steps(told)


def main() -> None:
    """Formation steps of the race."""
    answer("race_to_induction", __doc__ or "", CLAIMS, ours, quick=QUICK, task="repeated")


if __name__ == "__main__":
    main()
