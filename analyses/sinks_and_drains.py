"""Do sinks, drained values and hidden peaks vanish together, and does a start token decide it?

Claims: in value-residual models the first token's attention, its value's drain and its state's peak all move toward 1 (Zhou et
al. 2024); with a trained start token the sinks may stay at no cost (a hypothesis of this project). Refuted where the three
dissociate, or start token and architecture do not interact.

The three are measured apart, because changed norms can remove peaks and leave sinks. Gated: the vanilla model must have a head
that gives the first token more than 30 % of its attention in most of five seeds; single seeds mislead here.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("sinks_drains_and_peaks_vanish_together", "start_token_decides_the_sinks")
QUICK = ("transformer", "resformer", "svformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Strongest head's sink mass, drain of own and of effective values, peak: each layer, trained and at random init."""
    mass = profile(evidence, "sink_mass", by=("layer", "head"))
    strongest = mass.loc[mass.groupby(["model", "when", "layer"])["mean"].idxmax()].drop(columns="head")
    drains = [profile(evidence, "value_drain", site=site).assign(site=site) for site in ("own_v", "v")]
    return pd.concat([strongest, *drains, profile(evidence, "hidden_peak", site="stream")], ignore_index=True)


def main() -> None:
    """Sinks, drains and peaks."""
    answer("sinks_and_drains", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
