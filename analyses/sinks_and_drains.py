"""Do sinks, drained values and hidden peaks vanish together, and does a start token decide it?

Claims: in value-residual models the first token's attention, its value's drain and its state's peak all move toward 1 (Zhou et
al. 2024); with a trained start token the sinks may stay at no cost (a hypothesis of this project). Refuted where the three
dissociate, or start token and architecture do not interact.

The three are measured apart, because changed norms can remove peaks and leave sinks; sinks are counted by what they write, nothing
(no-op) or one vector to every position (broadcast). Gated: the vanilla model must have a head
that gives the first token more than 30 % of its attention in most of five seeds; single seeds mislead here.
"""

from .common import Script
from .tables import sinks_and_drains

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("sinks",),
    table=sinks_and_drains,
    quick=("transformer", "resformer", "svformer"),
)

if __name__ == "__main__":
    SCRIPT.main()
