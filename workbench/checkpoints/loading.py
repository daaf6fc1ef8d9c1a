"""Opening of checkpoints as models: identify -> read -> infer -> build -> fill."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.checkpoints import transformers_modules, user_built_modules
from workbench.checkpoints.checkpoint_facts import Device, Dtype, Info, State
from workbench.checkpoints.format import formats
from workbench.checkpoints.infer_architecture import Given, build_on_meta, infer, shapes_of
from workbench.checkpoints.lora_adapters import read_merged
from workbench.checkpoints.paths import RUN_FILE, Checkpoint, identify
from workbench.checkpoints.tensor_and_setting_names import llama_name
from workbench.checkpoints.tokenizer_files import start_token_of, tokenizer_beside
from workbench.checkpoints.weight_checks import misfits, prefix_advice, refuse_immense
from workbench.config import ModelConfig
from workbench.environment import BUILDERS, variable
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead
from workbench.models import Transformer
from workbench.models.options import dtype_option
from workbench.observing.observed_model import Observed
from workbench.storage.path_or_url import Location

if TYPE_CHECKING:
    from workbench.models.hooked import HookedModel


def load(
    path: str | Path | Location, *, architecture: str | None = None, step: str | int = "last",
    config: Mapping[str, Any] | ModelConfig | None = None, device: Device = None, dtype: Dtype | str = None, key: str = "",
    strip_prefix: str = "", **options: Any,
) -> HookedModel:  # fmt: skip
    """Load a model from a run or a checkpoint.

    Reads runs, single steps, Hugging Face directories, Meta's Llama folders and `.pt`, `.pth`, `.ckpt`, `.bin`, `.safetensors`
    files. Files are never unpickled.

    Args:
        path: Run folder, step folder, checkpoint file or folder, shipped model name, or cached Hub name.
        step: Checkpoint to load from a run or a series (see `workbench.series`): "last", "first" or a step number.
        architecture: Overrides the architecture stored in the checkpoint. Without either, a "transformer" is assumed and
            `ArchitectureAssumed` is issued.
        config: Settings of the model that complete and override the settings in the files.
        device: Device of the weights; the CPU by default.
        dtype: Type of the weights, or its name; float32 by default, also if the files hold another type.
        key: Path of the weights in a PyTorch file, as `ema` or `nets.student`; the usual keys are tried unless given.
        strip_prefix: Prefix of the tensors to load, as `net.`, which is taken off; other tensors are left out.
        options: Options of the architecture.

    Returns:
        A model in evaluation mode: ours, or an `Observed` one of transformers (with an `ObservedInstead` warning) where our
        decoder does not compute it. `model.source` holds path, format, step, stripped prefixes and SHA-256 of the files.

    Raises:
        BadCheckpoint: The file is missing, damaged, contradictory or unsafe.
        NotCovered: No implementation computes this model.
        UnknownName: No floating-point type of torch has the name `dtype`.
    """
    weights = dtype_option(dtype)
    settings = dataclasses.asdict(config) if isinstance(config, ModelConfig) else dict(config or {})
    checkpoint = identify(path, step, key=key, strip_prefix=strip_prefix)
    given = Given(architecture, settings, options)
    if "observed" in checkpoint.description:
        model: Any = _observed_step(checkpoint, given, device, weights)
    else:
        model = open_state(read_merged(checkpoint), given, device, weights)
    if (run := checkpoint.run) is not None:
        try:
            model.source |= {"run": run.name, "step": checkpoint.step, "seed": int(checkpoint.description["seed"])}
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{run / RUN_FILE} is no run description: {error}") from error
    folder, form = run or checkpoint.path, formats().get(model.source.get("format", ""))
    if folder.is_dir():
        model.tokenizer = tokenizer_beside(folder, model.config.d_vocab)
    elif form and form.tokenizer:
        model.tokenizer = form.tokenizer(folder, model.config.d_vocab)
    model.start_token = start_token_of({} if run is None else checkpoint.description, model.tokenizer)
    return model


def open_state(state: State, given: Given, device: Device = None, dtype: Dtype = None) -> Transformer | Observed:
    """Return the model of a state: ours, or another library's, observed, if our decoder does not compute it."""
    try:
        design = infer(state, given)
    except NotCovered as reason:
        if given:
            raise NotCovered(f"{reason}. Without settings of our decoder another library may open it") from reason
        return transformers_modules.observed(state, reason, device, dtype)
    model = fill(build_on_meta(design.architecture, design.config, design.options), design.state, device, dtype)
    model.assumed = design.assumed
    model.source = state.info.provenance | {"seed": design.seed, "step": design.step}
    return model


def read_state(path: str | Path, *, key: str = "", strip_prefix: str = "") -> tuple[dict[str, torch.Tensor], Info]:
    """Read the tensors of any checkpoint, prefixes stripped, and the facts beside them (`Info`).

    For `module.load_state_dict(tensors)` of the module they were trained in; `key` and `strip_prefix` as in `load`. Raises
    `BadCheckpoint` for missing, damaged or unsafe files and for NaN or Inf.
    """
    state = read_merged(identify(path, key=key, strip_prefix=strip_prefix))
    state.check()
    return dict(state.read()), state.info


def _observed_step(checkpoint: Checkpoint, given: Given, device: Device, dtype: Dtype) -> Observed:
    """Return the model of a step that another library or a builder computes; refuses settings of our decoder."""
    name = checkpoint.run.name if checkpoint.run else ""
    if given:
        settings = [key for key in ("architecture", "config") if getattr(given, key)] + list(given.options)
        raise NotCovered(f"{name} is observed, not one of our models: {', '.join(settings)} would be settings of ours")
    builder = checkpoint.description["observed"].get("builder")
    if builder is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ObservedInstead)  # the import warned
            reason = NotCovered(f"{checkpoint.path} holds another library's model")
            return transformers_modules.observed(read_merged(checkpoint), reason, device, dtype)
    if builder not in [allowed.strip() for allowed in variable(BUILDERS).split(",")]:
        raise NotCovered(
            f"{name} is opened by {builder}, which is code of its owner and runs only where the environment names it: "
            f"{BUILDERS}={builder}"
        )
    return user_built_modules.load_observed(str(builder), read_merged(checkpoint), device, dtype)


def fill(model: Transformer, state: State, device: Device = None, dtype: Dtype = None) -> Transformer:
    """Load a state's tensors into a model, as float32 or `dtype`; raises `BadCheckpoint` with the nearest tensor names."""
    if faults := misfits(state.shapes, shapes_of(model)):
        what = f"a {model.architecture} with options {model.options}"
        advice = prefix_advice(state.tensors, shapes_of(model))
        raise BadCheckpoint(f"{state.info.path} does not hold {what}\n  {advice or faults}")
    for name, stored in state.tensors.items():
        if not stored.dtype.is_floating_point:
            raise BadCheckpoint(f"{stored.path}: {name} is {stored.dtype}; quantised weights are not read")
    state.check()
    tensors = dict(state.read(dtype or torch.float32, device))
    refuse_immense(tensors.items(), state.info.path)
    model.load_state_dict({n: tensors[llama_name(n)] for n, _ in model.named_parameters()}, assign=True)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers())), "a tensor that no checkpoint holds"
    return model
