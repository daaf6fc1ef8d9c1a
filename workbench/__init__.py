"""An interpretability workbench for value-residual transformers.

    import workbench

    model = workbench.load("runs/text-resformer-s0")
    logits, cache = model.run_with_cache("def main():")
    frame = workbench.measure("runs/text-resformer-s0", ["importance_entropy", "token_identity_share"])
    workbench.plot(frame).show()

Libraries such as torch are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.places import refuse_a_namesake

if TYPE_CHECKING:
    from workbench import metrics, plots, prompts, sklearn
    from workbench.checkpoints.loading import load, read_state
    from workbench.checkpoints.paths import series
    from workbench.config import PRESETS, ModelConfig, TrainConfig
    from workbench.errors import ArchitectureAssumed, WorkbenchError
    from workbench.interventions import INTERVENTIONS
    from workbench.interventions.edits.kinds import edited
    from workbench.measurement.measuring import measure
    from workbench.metrics import METRICS
    from workbench.models.architecture_names_and_colours import ARCHITECTURES
    from workbench.models.building import build
    from workbench.models.decomposition import decompose
    from workbench.observing.equality import equal
    from workbench.observing.observation import observe
    from workbench.plots import plot
    from workbench.reports.diff_of_checkpoints import diff
    from workbench.reports.xray import xray
    from workbench.runs.run import Run
    from workbench.training.loop import train
    from workbench.training.recorder import Recorder
    from workbench.training.recorder.trainer_callback import RecorderCallback

__version__ = "0.2.0"
refuse_a_namesake()

_HOMES = {
    "load": "workbench.checkpoints.loading",
    "build": "workbench.models.building",
    "series": "workbench.checkpoints.paths",
    "read_state": "workbench.checkpoints.loading",
    "measure": "workbench.measurement.measuring",
    "observe": "workbench.observing.observation",
    "equal": "workbench.observing.equality",
    "plot": "workbench.plots",
    "decompose": "workbench.models.decomposition",
    "edited": "workbench.interventions.edits.kinds",
    "diff": "workbench.reports.diff_of_checkpoints",
    "xray": "workbench.reports.xray",
    "ARCHITECTURES": "workbench.models.architecture_names_and_colours",
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
__all__ = [
    "ARCHITECTURES", "INTERVENTIONS", "METRICS", "PRESETS", "ArchitectureAssumed", "ModelConfig", "Recorder", "RecorderCallback",
    "Run", "TrainConfig", "WorkbenchError", "build", "decompose", "diff", "edited", "equal", "load", "measure", "metrics", "observe",
    "plot", "plots", "prompts", "read_state", "series", "sklearn", "train", "xray",
]  # fmt: skip


def _load(name: str) -> Any:
    if name in ("metrics", "plots", "prompts", "sklearn"):  # packages
        return importlib.import_module(f"workbench.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker sees the imports above and rejects every other name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
