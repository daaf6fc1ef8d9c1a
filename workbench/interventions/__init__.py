"""Experiments on whole models: modified runs, and measures that one forward or backward pass does not give.

`edited(model, "sink:layer=3,head=1")` is the context manager for edits of a forward pass, `replaced(model, tokens, layers,
how, means)` the one behind `value_ablation`. Importing this package registers every experiment in `INTERVENTIONS`.
"""

from workbench.interventions import (
    ablation,
    first_token,
    gradients,
    logit_lens,
    mixing,
    similarity,
    throughput,
    token_ranks,
)
from workbench.interventions.ablation import TokenMeans, replaced, token_means, value_ablation
from workbench.interventions.edits.base import Edit
from workbench.interventions.edits.kinds import as_edits, coefficients, edited
from workbench.interventions.registered_experiments import INTERVENTIONS, Intervention, intervention

__all__ = [
    "INTERVENTIONS", "Edit", "Intervention", "TokenMeans", "ablation", "as_edits", "coefficients", "edited",
    "first_token", "gradients", "intervention", "logit_lens", "mixing", "replaced", "similarity", "throughput",
    "token_means", "token_ranks", "value_ablation",
]  # fmt: skip
