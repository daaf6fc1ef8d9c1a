"""Modules of other libraries, observed, for checkpoints that our decoder does not compute; code beside weights never runs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from workbench.checkpoints.checkpoint_facts import Device, Dtype, State
from workbench.checkpoints.format import formats
from workbench.checkpoints.hub import offline
from workbench.checkpoints.paths import CONFIG
from workbench.checkpoints.rotary_settings import check_rotary
from workbench.checkpoints.weight_checks import prefix_advice, refuse_immense
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead, warn_caller
from workbench.observing.observation import observe
from workbench.observing.observed_model import Observed

EXAMPLE = 32  # random tokens on which another library's module is observed first


def observed(state: State, reason: NotCovered, device: Device = None, dtype: Dtype = None) -> Observed:
    """Return the module of a checkpoint, observed, with the facts of its files."""
    module = module_of(state, reason, dtype).to(device or "cpu")
    config = module.config.get_text_config()  # of a model of several parts, as Gemma 3 with its vision tower
    longest = int(getattr(config, "max_position_embeddings", EXAMPLE) or EXAMPLE)
    longest = longest if longest > 0 else EXAMPLE  # XLNet's is -1: any number
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, min(EXAMPLE, longest)), generator=generator)
    ids = ids.to(device or "cpu")
    try:
        with torch.no_grad():
            module(ids)
    except Exception as error:  # settings that do not fit each other, as rotary ones that rotate a part of a head
        raise BadCheckpoint(f"{state.info.path}: transformers cannot run it: {_first_line(error)}") from error
    model = observe(module, ids, quiet=True)
    model.source |= state.info.provenance
    return model


def module_of(state: State, reason: NotCovered, dtype: Dtype = None) -> Any:
    """Return the module of a checkpoint, in evaluation mode; raises `reason`, and what would work, if no library computes it."""
    form = formats().get(state.info.format)
    module = form.module(state, dtype) if form and form.module else None
    if module is None and state.info.path.is_dir() and state.info.config and "workbench" not in state.info.config:
        module = from_transformers(state, reason, dtype)
    if module is None:
        raise type(reason)(
            f"{reason}. Fill the module they were trained in, module.load_state_dict(workbench.read_state(path)[0]), and open "
            "it with workbench.observe(module, ids), or make a run of it: workbench import --builder my_model:build"
        ) from reason
    warn_caller(f"{reason}. Opened as transformers' {type(module).__name__} and observed.", ObservedInstead)
    return module


def from_transformers(state: State, reason: NotCovered, dtype: Dtype) -> Any:
    """Return the causal model of transformers in a directory; raises `BadCheckpoint` that begins with `reason`."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    folder = state.info.base or state.info.path
    if "auto_map" in (state.info.config or {}) and (state.info.config or {}).get("model_type") not in CONFIG_MAPPING:
        raise BadCheckpoint(f"{reason}. {folder}/config.json asks for code of its own (auto_map), which is never run")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever another library makes of a damaged file
        raise BadCheckpoint(f"{reason}; transformers cannot read it either: {_first_line(error)}") from error
    check_rotary(config, folder / CONFIG)
    if config._attn_implementation not in (None, "eager", "sdpa"):  # a name of the Hub would be fetched and run
        config._attn_implementation = None
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > len(state.tensors):
        raise BadCheckpoint(f"{reason}; it says {layers} layers, but there are only {len(state.tensors)} tensors")
    state.check()
    for name, stored in state.tensors.items():
        stored.check(name)
    try:
        with quiet():
            kind: Any
            options: dict[str, Any] = {"config": config, "output_loading_info": True, "dtype": dtype or torch.float32}
            if state.info.stripped or state.info.base is not None:  # the tensors have other names than in the file
                kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                module, report = kind.from_pretrained(
                    None, state_dict=dict(state.read(options["dtype"], None)), **options
                )
            else:
                options |= {"local_files_only": True, "trust_remote_code": False}
                kind = AutoModelForCausalLM
                module, report = kind.from_pretrained(state.info.path, **options)
    except Exception as error:
        raise BadCheckpoint(f"{reason}; transformers cannot open it either: {_first_line(error)}") from error
    kinds = ("missing", "unexpected", "mismatched")
    lost = {kind: sorted(map(str, names)) for kind in kinds if (names := report.get(f"{kind}_keys"))}
    if names_of := "; ".join(f"{kind} {', '.join(names[:5])}" for kind, names in lost.items()):
        advice = prefix_advice(state.tensors, lost.get("missing", ()))
        raise BadCheckpoint(f"{reason}. It does not hold a {type(module).__name__} either: {advice or names_of}")
    refuse_immense(module.named_parameters(), folder)
    return module.eval()


@contextlib.contextmanager
def quiet() -> Any:
    """Suppress requests to the Hub, and transformers' progress bar and reports."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with offline():
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
