"""Experiments on whole models: run them differently, or read what a forward or backward pass alone does not show.

`replaced(model, tokens, layers, how, means)` is the context manager behind `value_ablation`. Importing this package
registers every experiment in `INTERVENTIONS`.
"""

from workbench.interventions import ablation, gradients, lens, retention, similarity, values
from workbench.interventions.base import INTERVENTIONS, Intervention, intervention
from workbench.interventions.values import TokenMeans, replaced, token_means, value_ablation

__all__ = [
    "INTERVENTIONS",
    "Intervention",
    "TokenMeans",
    "ablation",
    "gradients",
    "intervention",
    "lens",
    "replaced",
    "retention",
    "similarity",
    "token_means",
    "value_ablation",
    "values",
]
