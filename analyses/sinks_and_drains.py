"""Do sinks, drained values and hidden peaks vanish together, and does a start token decide it?

Claims: in value-residual models the first token's attention, its value's drain and its state's peak all move toward 1 (Zhou et
al. 2024); with a trained start token the sinks may stay at no cost (a hypothesis of this project). Refuted where the three
dissociate, or start token and architecture do not interact.

The three are measured apart, because changed norms can remove peaks and leave sinks; sinks are counted by what they write, nothing
(no-op) or one vector to every position (broadcast). Gated: the vanilla model must have a head
that gives the first token more than 30 % of its attention in most of five seeds; single seeds mislead here.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence
from workbench.claims.base import Undecided
from workbench.claims.sinks import head_kinds
from workbench.statistics import seed_band

CLAIMS = ("sinks_drains_and_peaks_vanish_together", "start_token_decides_the_sinks")
QUICK = ("transformer", "resformer", "svformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Strongest head's sink mass, drain of own and of effective values, peak: each layer, trained and at random init; heads by kind."""
    mass = profile(evidence, "sink_mass", by=("layer", "head"))
    strongest = mass.loc[mass.groupby(["model", "when", "layer"])["mean"].idxmax()].drop(columns="head")
    drains = [profile(evidence, "value_drain", site=site).assign(site=site) for site in ("own_v", "v")]
    parts = [strongest, *drains, profile(evidence, "hidden_peak", site="stream"), *kinds(evidence)]
    return pd.concat(parts, ignore_index=True)


def kinds(evidence: Evidence) -> list[pd.DataFrame]:
    """How many heads of each layer are no sink, a no-op, a broadcast or a mixed one: mean over seeds with its range."""
    frames = []
    for model in evidence.models:
        for step, when in (("first", "random init"), ("last", "trained")):
            try:
                found = head_kinds(evidence, model, step)
            except Undecided:  # not measured there
                continue
            table = pd.crosstab([found["seed"], found["layer"]], found["kind"])
            counts = table.melt(ignore_index=False, var_name="kind").reset_index()
            band = seed_band(counts.assign(model=model), ["model", "layer", "kind"])
            frames.append(band.assign(when=when, metric="sink_kind", unit="heads"))
    return frames


def main() -> None:
    """Sinks, drains and peaks."""
    answer("sinks_and_drains", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
