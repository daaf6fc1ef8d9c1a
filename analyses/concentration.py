"""Does attention concentrate less in value-residual models, and is that the shortcut's doing or the loss's?

Claims (Zhou et al. 2024): concentration is learned, not there at random init; ResFormer and SVFormer concentrate less in deep
layers, NeuTRENO keeps its sinks. Refuted where the init is concentrated, or nothing is left once losses are matched.

Entropy is read against uniform causal attention of the same length (the deficit), at random init and trained, at equal step
and at equal loss, and split into first position, profile and content, since the deficit mixes the three and they can cancel.
Tested only where the vanilla model has sinks in five seeds.
"""

import pandas as pd

from analyses.common import answer, profile
from workbench.claims import Evidence

CLAIMS = ("concentration_is_learned", "less_concentration_in_deep_layers")
QUICK = ("transformer", "resformer", "svformer", "neutreno")
PARTS = ("first_position", "profile", "content")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Deficit of each layer, and the three parts of its concentration, in nats."""
    text = evidence.on("text")
    deficit = profile(text, "importance_entropy", variant="deficit").assign(part="entropy deficit")
    parts = [profile(text, "concentration_parts", variant=part).assign(part=part) for part in PARTS]
    return pd.concat([deficit, *parts], ignore_index=True)


def main() -> None:
    """Deficits, their parts, and both at equal loss."""
    answer("concentration", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
