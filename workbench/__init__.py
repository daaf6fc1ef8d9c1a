"""An interpretability workbench for value-residual transformers.

    import workbench

    model = workbench.load("runs/text-resformer-s0")
    logits, cache = model.run_with_cache("def main():")
    frame = workbench.measure("runs/text-resformer-s0", ["importance_entropy", "token_identity_share"])
    workbench.plot(frame).show()

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from workbench.places import refuse_a_namesake

__version__ = "0.2.0"
refuse_a_namesake()

_HOMES = {
    "load": "workbench.checkpoints.opening",
    "build": "workbench.models.composition",
    "series": "workbench.checkpoints.identify",
    "read_state": "workbench.checkpoints.opening",
    "measure": "workbench.measurement.measuring",
    "observe": "workbench.observing",
    "equal": "workbench.observing",
    "plot": "workbench.plots",
    "decompose": "workbench.models.decomposition",
    "edited": "workbench.interventions.edits.context",
    "xray": "workbench.reports.xray",
    "ARCHITECTURES": "workbench.models.registry",
    "METRICS": "workbench.metrics",
    "INTERVENTIONS": "workbench.interventions",
    "PRESETS": "workbench.config",
    "ModelConfig": "workbench.config",
    "TrainConfig": "workbench.config",
    "Run": "workbench.runs.run",
    "train": "workbench.training.loop",
    "Recorder": "workbench.training.recorder",
    "RecorderCallback": "workbench.training.recorder.trainer_callback",
    "WorkbenchError": "workbench.errors",
    "ArchitectureAssumed": "workbench.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
