"""Any other PyTorch or safetensors file of weights: a bare state dict, or one under `model`, `state_dict` and the like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.formats.state import Info, State, number, state_of, step_in_name, weights_in
from workbench.formats.stored import safetensors_table

STEPS = ("step", "global_step", "iteration", "iter", "iter_num", "itr", "steps")
CONFIGS = ("config", "model_config", "model_args", "hyper_parameters", "args")


def read(container: Any, path: Path) -> State:
    """The state of a container; raises `BadCheckpoint` where it holds none."""
    found, beside = weights_in(container, path)
    told = container if found is not container and isinstance(container, dict) else {}
    steps = (number(told.get(key)) for key in STEPS)
    configs = (told[key] for key in CONFIGS if isinstance(told.get(key), dict))
    return state_of(
        found,
        Info(
            format="state dict" if found is container else "PyTorch container", path=path,
            step=next((s for s in steps if s is not None), step_in_name(path)), config=next(configs, None), beside=beside,
        ),
    )  # fmt: skip


def read_safetensors(path: Path) -> State:
    """The state of one safetensors file."""
    table, _ = safetensors_table(path)
    return state_of(table, Info(format="safetensors", path=path, step=step_in_name(path)))
