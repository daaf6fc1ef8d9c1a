"""What do gates, scaled values and norms change of sinks and of what comes with them?

Claims: a value gate removes the stream's outliers (arXiv 2510.09017); sinks gather gradients and massive states answer them, so
that scaled values keep the sink and lower both (arXiv 2603.17771); norms after the sublayers take the spikes and leave the sinks
(arXiv 2603.05498); heads that may not write their own token's value lower the loss, the more the longer the text (arXiv 2603.09078).
Refuted where the measured number moves the other way. Gated: vanilla must have sinks in most of five seeds.
"""

from .common import Script
from .tables import profiles

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("gates",),
    table=profiles(
        ("gradient_sink", {"variant": None}, {}),
        ("massive_activations", {"site": "stream", "variant": None}, {"site": "stream"}),
    ),
    quick=("transformer", "value_gate", "value_scale", "post_norm"),
)

if __name__ == "__main__":
    SCRIPT.main()
