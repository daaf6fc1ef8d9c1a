"""Experiments on whole models: modified runs, and measures that one forward or backward pass does not give.

`edited(model, "sink:layer=3,head=1")` is the context manager for edits of a forward pass, `replaced(model, tokens, layers,
how, means)` the one behind `value_ablation`. Importing this package registers every experiment in `INTERVENTIONS`.
"""

from workbench.interventions import (
    ablation,
    depth_routing,
    first_token,
    gradients,
    lens,
    mixing,
    readers,
    retention,
    similarity,
    throughput,
    values,
)
from workbench.interventions.base import INTERVENTIONS, Intervention, intervention
from workbench.interventions.edits.base import Edit
from workbench.interventions.edits.coefficient import coefficients
from workbench.interventions.edits.context import edited
from workbench.interventions.edits.kinds import as_edits
from workbench.interventions.values import TokenMeans, replaced, token_means, value_ablation

__all__ = [
    "INTERVENTIONS",
    "Edit",
    "Intervention",
    "TokenMeans",
    "ablation",
    "as_edits",
    "coefficients",
    "depth_routing",
    "edited",
    "first_token",
    "gradients",
    "intervention",
    "lens",
    "mixing",
    "readers",
    "replaced",
    "retention",
    "similarity",
    "throughput",
    "token_means",
    "value_ablation",
    "values",
]  # fmt: skip
