"""Any checkpoint as a model: identify -> read -> infer -> build -> fill, each a function with one result.

    load("runs/text-resformer-s0", step="first")
    load("ckpt.pt", architecture="resformer", config={"n_heads": 8})

What our decoder does not compute is opened in the library or by the builder that does, and observed from outside.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.checkpoints import builders, transformers_modules
from workbench.checkpoints.adapters import read
from workbench.checkpoints.fill import build, fill
from workbench.checkpoints.identify import BUILDERS, RUN_FILE, Checkpoint, identify
from workbench.checkpoints.infer import Given, infer
from workbench.checkpoints.state import Device, Dtype, Info, State
from workbench.checkpoints.vocabulary import tokenizer_beside
from workbench.config import ModelConfig
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead
from workbench.models import Transformer
from workbench.observing import Observed

if TYPE_CHECKING:
    from workbench.models.hooked import HookedModel

def load(
    path: str | Path, *, architecture: str | None = None, step: str | int = "last",
    config: Mapping[str, Any] | ModelConfig | None = None, device: Device = None, dtype: Dtype = None, **options: Any,
) -> HookedModel:  # fmt: skip
    """A model from a run, a step, or any checkpoint: Hugging Face directories, `.pt`, `.ckpt`, `.bin`, `.safetensors`.

    `step`: `last`, `first` or a number, of a run or a series (see `workbench.series`). `architecture`, `config` and
    `options` complete and override what the files say; where neither says an architecture, a `transformer` is assumed
    with an `ArchitectureAssumed` warning. What our decoder does not compute is opened in transformers and observed, with
    an `ObservedInstead` warning. `model.source` says where the weights come from: path, format, step, stripped prefixes, SHA-256.
    Weights are float32 whatever the files hold, or `dtype`. Raises `BadCheckpoint` for missing, damaged, contradictory or
    unsafe files, `NotCovered` for a model that nothing here computes.
    """
    settings = dataclasses.asdict(config) if isinstance(config, ModelConfig) else dict(config or {})
    checkpoint, given = identify(path, step), Given(architecture, settings, options)
    if "observed" in checkpoint.description:
        model: Transformer | Observed = _observed_step(checkpoint, given, device, dtype)
    else:
        model = opened(read(checkpoint), given, device, dtype)
    return _with_its_run(model, checkpoint)


def opened(state: State, given: Given, device: Device = None, dtype: Dtype = None) -> Transformer | Observed:
    """The model of a state: ours where our decoder computes it, else another library's, observed; see `load`."""
    try:
        design = infer(state, given)
    except NotCovered as reason:
        if given:
            raise NotCovered(f"{reason}. Without settings of our decoder another library may open it") from reason
        return transformers_modules.observed(state, reason, device, dtype)
    model = fill(build(design.architecture, design.config, design.options), design.state, device, dtype)
    model.assumed = design.assumed
    model.source = state.info.provenance | {"seed": design.seed, "step": design.step}
    return model


def read_state(path: str | Path) -> tuple[dict[str, torch.Tensor], Info]:
    """The tensors of any checkpoint, prefixes stripped, and the facts beside them (`Info`).

    For `module.load_state_dict(tensors)` of the module they were trained in. Raises `BadCheckpoint` for missing, damaged
    or unsafe files and for NaN or Inf.
    """
    state = read(identify(path))
    state.check()
    return dict(state.read()), state.info


def _observed_step(checkpoint: Checkpoint, given: Given, device: Device, dtype: Dtype) -> Observed:
    """A step whose model is another library's or of the owner's code; refuses settings of our decoder."""
    name = checkpoint.run.name if checkpoint.run else ""
    if given:
        settings = [key for key in ("architecture", "config") if getattr(given, key)] + list(given.options)
        raise NotCovered(f"{name} is observed, not one of our models: {', '.join(settings)} would be settings of ours")
    builder = checkpoint.description["observed"].get("builder")
    if builder is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ObservedInstead)  # the import warned
            reason = NotCovered(f"{checkpoint.path} holds another library's model")
            return transformers_modules.observed(read(checkpoint), reason, device, dtype)
    if builder not in [allowed.strip() for allowed in os.environ.get(BUILDERS, "").split(",")]:
        raise NotCovered(
            f"{name} is opened by {builder}, which is code of its owner and runs only where the environment names it: "
            f"{BUILDERS}={builder}"
        )
    return builders.load(str(builder), read(checkpoint), device, dtype)


def _with_its_run(model: Any, checkpoint: Checkpoint) -> Any:
    """The model with its tokenizer and, for a step of a run, the run's name and seed."""
    if (run := checkpoint.run) is not None:
        try:
            model.source |= {"run": run.name, "step": checkpoint.step, "seed": int(checkpoint.description["seed"])}
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{run / RUN_FILE} is no run description: {error}") from error
    folder = run or checkpoint.path
    if folder.is_dir():
        model.tokenizer = tokenizer_beside(folder, model.config.d_vocab)
    return model
