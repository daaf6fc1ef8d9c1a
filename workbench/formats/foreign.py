"""Checkpoints our decoder does not compute, as modules of the library that does.

Hugging Face directories become `transformers` models (never with code from the directory), nanoGPT's files the same
library's GPT-2. Both are observed from outside (`workbench.observe`).
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch

from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead
from workbench.formats import gpt2
from workbench.formats.state import State


def module_of(state: State, reason: NotCovered, dtype: torch.dtype | None = None) -> Any:
    """The module a checkpoint belongs to, in evaluation mode, with an `ObservedInstead` warning that says why.

    Raises `reason`, and what would work, where no library here computes the model.
    """
    if gpt2.is_gpt2(state):
        module = gpt2.module_of(state, dtype)
    elif state.info.path.is_dir() and state.info.config and "workbench" not in state.info.config:
        module = _from_transformers(state, reason, dtype)
    else:
        raise type(reason)(
            f"{reason}. Fill the module they were trained in, module.load_state_dict(workbench.read_state(path)[0]), and open "
            "it with workbench.observe(module, ids), or make a run of it: workbench import --builder my_model:build"
        ) from reason
    warnings.warn(
        f"{reason}. Opened as transformers' {type(module).__name__} and observed.", ObservedInstead, stacklevel=3
    )
    return module


def _from_transformers(state: State, reason: NotCovered, dtype: torch.dtype | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: Path = state.info.path
    if "auto_map" in (state.info.config or {}):
        raise BadCheckpoint(f"{reason}. {folder}/config.json asks for code of its own (auto_map), which is never run")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # another library's opinion of somebody's file
        raise BadCheckpoint(f"{reason}; transformers cannot read it either: {_first_line(error)}") from error
    layers = getattr(config, "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > len(state.tensors):
        raise BadCheckpoint(f"{reason}; it says {layers} layers, but there are only {len(state.tensors)} tensors")
    state.check()
    for name, stored in state.tensors.items():
        stored.check(name)
    try:
        with quiet():
            opened: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False, output_loading_info=True,
                dtype=dtype or torch.float32,
            )  # fmt: skip
    except Exception as error:
        raise BadCheckpoint(f"{reason}; transformers cannot open it either: {_first_line(error)}") from error
    module, found = opened
    lost = {kind: sorted(map(str, found.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")}
    if any(lost.values()):
        told = "; ".join(f"{kind} {', '.join(names[:5])}" for kind, names in lost.items() if names)
        raise BadCheckpoint(f"{reason}. It does not hold a {type(module).__name__} either: {told}")
    return module.eval()


@contextlib.contextmanager
def quiet() -> Any:
    """Without the progress bar and the report that transformers prints; what is wrong is an error here."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
