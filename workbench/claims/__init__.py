"""Claims about value residuals: conditions of support and refutation, and the function that judges each from measured runs.

Importing this package registers every claim in `CLAIMS`. A module is a question, a decorated function in it is a claim. Claims are pure
functions of tables: they read no files and run no models.
"""

from workbench.claims import (
    averages,
    concentration,
    cross_layer,
    depth,
    downstream,
    gates,
    induction,
    loss,
    optimisation,
    place,
    sharing,
    sinks,
    smoothing,
    tokens,
)
from workbench.claims.evidence import RUN_COLUMNS, Evidence
from workbench.claims.registry import CLAIMS, Claim, claim
from workbench.claims.verdict import DECIDED, STATUSES, Verdict

QUESTIONS = {
    module.__name__.rpartition(".")[-1]: (module.__doc__ or "").strip()
    for module in (
        loss, place, optimisation, concentration, sinks, gates, smoothing, tokens, depth, cross_layer, sharing, averages,
        induction, downstream,
    )
}  # fmt: skip
"""Each group of claims, and the question it answers."""

__all__ = ["CLAIMS", "DECIDED", "QUESTIONS", "RUN_COLUMNS", "STATUSES", "Claim", "Evidence", "Verdict", "claim"]
