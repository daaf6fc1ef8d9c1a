"""Are values richer, and do own values of deep layers become a correction?

Claims (Zhou et al. 2024 and 2025): value spectra show richer representations; with the first layer's values supplied, own
values of deep layers act as a correction. Refuted where the difference is in the scale alone, or where nothing differs from
the vanilla model's trend.

Spectra are normalised by their trace: the published ones are not, and so contain the scale of the values.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("richer_values", "deep_layers_learn_a_correction")
QUICK = ("transformer", "resformer")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Effective rank and scale of effective and own values, by layer."""
    text = evidence.on("text")
    frames = [
        profile(text, "effective_rank", site=site, variant=variant).assign(site=site, form=variant or "rank")
        for site in ("v", "own_v")
        for variant in (None, "trace", "top_share")
    ]
    return pd.concat(frames, ignore_index=True)


def main() -> None:
    """Spectra, scale, and what deep layers add."""
    answer("richer_values", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
