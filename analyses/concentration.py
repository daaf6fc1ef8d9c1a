"""Does attention concentrate less in value-residual models, and is that the shortcut's doing or the loss's?

Claims (Zhou et al. 2024): concentration is learned, not there at random init; ResFormer and SVFormer concentrate less in deep
layers, NeuTRENO keeps its sinks. Refuted where the init is concentrated, or nothing is left once losses are matched.

Entropy is read against uniform causal attention of the same length (the deficit), at random init and trained, at equal step
and at equal loss, and split into first position, profile and content, since the deficit mixes the three and they can cancel.
Tested only where the vanilla model has sinks in five seeds.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("concentration",),
    table=profiles(
        ("importance_entropy", {"variant": "deficit"}, {"part": "entropy deficit"}),
        *(
            ("concentration_parts", {"variant": part}, {"part": part})
            for part in ("first_position", "profile", "content")
        ),
    ),
    quick=("transformer", "resformer", "svformer", "neutreno"),
)

if __name__ == "__main__":
    SCRIPT.main()
