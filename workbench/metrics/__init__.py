"""All measures; importing this package registers them in `METRICS`."""

from workbench.metrics import attention, residual, retention, spectrum, values, weights
from workbench.metrics.base import METRICS, Metric, metric
from workbench.places import load_plugins

__all__ = ["METRICS", "Metric", "attention", "metric", "residual", "retention", "spectrum", "values", "weights"]

load_plugins("metrics")
