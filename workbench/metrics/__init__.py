"""All metrics; importing this package registers them in `METRICS`."""

from workbench.metrics import (
    attention_patterns,
    experts,
    found_sinks,
    residual,
    spectrum,
    token_probes,
    values,
    weights,
)
from workbench.metrics.base import METRICS, Metric, metric
from workbench.places import load_plugins

__all__ = [
    "METRICS", "Metric", "attention_patterns", "experts", "found_sinks", "metric", "residual", "spectrum", "token_probes", "values",
    "weights",
]  # fmt: skip

load_plugins("metrics")
