"""Construction of our decoder from its design: built without memory, compared with the checkpoint, then filled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from workbench.checkpoints.llama_names import llama_name
from workbench.checkpoints.state import Device, Dtype, State, misfits, prefix_advice, refuse_immense
from workbench.config import ModelConfig
from workbench.errors import BadCheckpoint
from workbench.models import Transformer, compose

MAX_SETTING = 2**40  # of anything in a config


def build_on_meta(name: str, config: ModelConfig, options: Mapping[str, Any]) -> Transformer:
    """Return a model on the meta device; raises `BadCheckpoint` for sizes beyond all memory."""
    what = f"no {name} can be built with {config}"
    if (largest := max(v for v in dataclasses.astuple(config) if isinstance(v, int))) > MAX_SETTING:
        raise BadCheckpoint(f"{what}: {largest} is beyond all sizes")
    try:
        with torch.device("meta"):
            return compose(name, config, **options)
    except (RuntimeError, OverflowError) as error:  # shapes beyond what can be counted
        raise BadCheckpoint(f"{what}: {next(iter(str(error).splitlines()), '')}") from error


def shapes_of(model: Transformer) -> dict[str, list[int]]:
    """Return the shapes of the tensors by name in a file."""
    return {llama_name(name): list(parameter.shape) for name, parameter in model.named_parameters()}


def fill(model: Transformer, state: State, device: Device = None, dtype: Dtype = None) -> Transformer:
    """Load a state's tensors into a model, as float32 or `dtype`; shared tensors stay shared.

    Names, shapes and checksums are compared first. Raises `BadCheckpoint` with the nearest tensor names.
    """
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
