"""Does a value residual lower the loss, and what does that save or cost?

Claims (Zhou et al. 2024 and 2025): at equal size and data ResFormer ends 0.027 to 0.032 nats below the Transformer, reaches
its loss with fewer parameters and fewer tokens, at the same memory and compute, ahead of NeuTRENO and DenseFormer, and gains
downstream. Refuted where the difference is 0 or above over seeds, or turns once the baseline has its own best learning rate.

Absolute losses come before differences; a difference inside its interval over seeds is unresolved. Savings are read off
several forms of the curve side by side, since the forms differ by points of per cent on the same numbers.
"""

from .common import Script
from .tables import losses_and_sizes

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("loss", "downstream"),
    table=losses_and_sizes,
    quick=("transformer", "resformer", "neutreno", "denseformer"),
)

if __name__ == "__main__":
    SCRIPT.main()
