"""Are values richer, and do own values of deep layers become a correction?

Claims (Zhou et al. 2024 and 2025): value spectra show richer representations; with the first layer's values supplied, own
values of deep layers act as a correction. Refuted where the difference is in the scale alone, or where nothing differs from
the vanilla model's trend.

Spectra are normalised by their trace: the published ones are not, and so contain the scale of the values.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("depth",),
    table=profiles(
        *(
            ("effective_rank", {"site": site, "variant": variant}, {"site": site, "form": variant or "rank"})
            for site in ("v", "own_v")
            for variant in (None, "trace", "top_share")
        )
    ),
    quick=("transformer", "resformer"),
)

if __name__ == "__main__":
    SCRIPT.main()
