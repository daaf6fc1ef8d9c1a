"""Which tensor, source, layers and weight does the residual need?

Claims (Zhou et al. 2024 and 2025): the value path is the place (the same shortcut on queries, keys, attention or the hidden
state does not help), the first layer the source, late layers profit most, and every weight from 0.2 to 5 helps. Refuted where
a control ends as low, a later source helps as much, or trained coefficients do not grow with depth.

The controls are architectures of their own: residual_q, residual_k, residual_attention, residual_hidden. Other sources,
layers and weights are options of resformer and resformer_constant.
"""

from .common import Script
from .tables import mean_losses

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("place",),
    table=mean_losses,
    quick=(
        "transformer", "resformer", "residual_q", "residual_k", "residual_attention", "residual_hidden", "resformer_sparse",
        "resformer_learnable", "resformer_constant", ("resformer", {"source_layer": 1}), ("resformer_sparse", {"layers": [1]}),
        ("resformer_constant", {"lambda_v1": 0.2}), ("resformer_constant", {"lambda_v1": 0.5}), ("resformer_constant", {"lambda_v1": 5.0}),
    ),
)  # fmt: skip

if __name__ == "__main__":
    SCRIPT.main()
