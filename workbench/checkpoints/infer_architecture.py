"""Architecture, options and sizes of a checkpoint, from its settings and the shapes of its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoints.checkpoint_facts import State
from workbench.checkpoints.format import formats
from workbench.checkpoints.paths import CONFIG
from workbench.checkpoints.rotary_settings import plain_theta
from workbench.checkpoints.tensor_and_setting_names import EMBEDDINGS, HEAD, SETTINGS, SPELLINGS, llama_name
from workbench.checkpoints.weight_checks import prefix_advice
from workbench.config import ModelConfig
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, WorkbenchError, refuse_unknown, warn_caller
from workbench.models import ARCHITECTURES, Transformer, architecture, compose

Shapes = Mapping[str, list[int]]
MAX_SETTING = 2**40  # of anything in a config
COVERED = ("llama", "mistral")  # model types whose configurations can be those of our decoder
RMS_NORM_EPS = 1e-6  # in transformers, of a Llama or Mistral whose configuration lacks it
PLAIN: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
OTHERS = (
    "qk_norm",
    "use_qk_norm",
    "logit_softcap",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "rope_interleaved",
)
"""Settings of scripts that change the computation and leave no tensor."""
LLAMAS = (["LlamaForCausalLM"], ["MistralForCausalLM"])


@dataclass(frozen=True)
class Given:
    """The caller's settings, which override settings of the files."""

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.architecture or self.config or self.options)


@dataclass(frozen=True)
class Design:
    """A model of our decoder, and the state with its weights by Llama's names."""

    architecture: str
    options: Mapping[str, Any]
    config: ModelConfig
    state: State
    assumed: bool  # whether neither the files nor the caller named the architecture
    seed: int | None
    step: int | None


def infer(state: State, given: Given) -> Design:
    """Return the design of a state.

    A config that transformers wrote for its Llama or Mistral names the Transformer; published code of value residuals writes the same
    `architectures`, but no `transformers_version`. If nothing names the architecture, the first one that fits the tensors is assumed,
    with an `ArchitectureAssumed` warning. Raises `BadCheckpoint` for contradictory files and `NotCovered` for models that our decoder
    does not compute.
    """
    form, theirs_of = formats().get(state.info.format), dict[str, str]()
    for theirs in (name for name in state.tensors if not (form and name in form.constants)):
        ours = llama_name(form.our_name(theirs) if form else theirs)
        if ours in theirs_of:
            both = f"{theirs_of[ours]} and {theirs}"
            raise BadCheckpoint(f"{state.info.path} holds {ours} twice: as {both}; save one of them")
        theirs_of[ours] = theirs
    info, values = state.info, state.info.config or {}
    tensors = {ours: state.tensors[theirs] for ours, theirs in theirs_of.items()}
    if values.get("tie_word_embeddings") and EMBEDDINGS in tensors:
        tensors.setdefault(HEAD, tensors[EMBEDDINGS])
    state = dataclasses.replace(state, tensors=tensors)
    config = config_of(state, given.config)
    if config.n_layers > max(len(state.tensors), 256):  # before so many are built
        raise BadCheckpoint(f"{info.path}: n_layers={config.n_layers}, but there are only {len(state.tensors)} tensors")
    for ours, stored in tensors.items() if form and form.rotates_neighbours else ():
        heads = {"q_proj": config.n_heads, "k_proj": config.n_key_value_heads}.get(ours.split(".")[-2])
        if heads and len(stored.shape) == 2 and stored.shape[0] == heads * config.d_head:  # others are refused later
            tensors[ours] = stored.half_rotated(heads)
    own = values.get("workbench") or {}
    try:
        if own:
            known, options = architecture(own["architecture"]).options, own.get("options", {})
            for key in options:
                refuse_unknown(f"option of {own['architecture']}", key, known)
            _ = options | {}
    except (KeyError, TypeError, AttributeError, WorkbenchError) as error:
        raise BadCheckpoint(
            f"{info.path / CONFIG} does not name its architecture well, workbench={own!r}: {error}"
        ) from error
    name, options = given.architecture, given.options
    if own and name in (None, own["architecture"]):
        name, options = own["architecture"], {**own.get("options", {}), **options}
    shapes = state.shapes
    plain = values.get("architectures") in LLAMAS and "transformers_version" in values and not options
    if name is None and plain and shapes == shapes_of(build_on_meta("transformer", config, {})):
        name = "transformer"
    assumed = name is None
    if name is None:
        name, options = _assume(info.path, config, shapes, options)
    else:
        options = _complete(name, config, shapes, options)
    return Design(name, options, config, state, assumed, own.get("seed"), own.get("step", info.step))


def model_config(values: Mapping[str, Any], where: Path, given: Mapping[str, Any]) -> ModelConfig:
    """Return our config of a Llama config, in older and newer spellings; raises `NotCovered` for what the decoder lacks."""
    if "workbench" not in values and values.get("model_type") not in COVERED:
        raise NotCovered(f"{where}: model_type {values.get('model_type')!r}; only llama and our own are read")
    _refuse_others(values, where)
    settings: dict[str, Any] = {} if "workbench" in values else {"rms_norm_eps": RMS_NORM_EPS}
    settings |= {ours: values[theirs] for ours, theirs in SETTINGS.items() if values.get(theirs) is not None}
    if (theta := plain_theta(values, where)) is not None:
        settings["rope_theta"] = theta
    config = _config(settings | dict(given), where)
    if values.get("head_dim") not in (None, config.d_head):
        raise NotCovered(f"{where}: head_dim={values['head_dim']}, only hidden_size / heads = {config.d_head}")
    _refuse_window(values.get("sliding_window", 4096) if values.get("model_type") == "mistral" else None, config, where)
    return config


def _refuse_others(values: Mapping[str, Any], where: Path) -> None:
    """Raise `NotCovered` for settings of another computation."""
    for key, only in (PLAIN | dict.fromkeys(OTHERS)).items():
        if (value := values.get(key, only)) != only and (only or value):
            raise NotCovered(f"{where}: {key}={value!r} is not supported, only {only!r}")


def _refuse_window(window: Any, config: ModelConfig, where: Path) -> None:
    """Raise `NotCovered` for a window that is shorter than the context."""
    if window is not None and not (isinstance(window, int) and window >= config.n_ctx):
        raise NotCovered(f"{where}: sliding_window={window} is not supported, only attention to all earlier positions")


def _config(settings: Mapping[str, Any], where: Path) -> ModelConfig:
    try:
        return ModelConfig.of(settings)
    except WorkbenchError as error:
        raise BadCheckpoint(f"{where}: {error}") from error


def config_of(state: State, given: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a state: its Llama config, or the settings of a script and of the tensors' shapes.

    `given` completes and overrides. Defaults of Llama are assumed with a warning.
    """
    values, where = state.info.config or {}, state.info.path
    if "workbench" in values or "model_type" in values or (where / CONFIG).exists():
        return model_config(values, where / CONFIG, given)
    shapes = state.shapes
    if not {EMBEDDINGS, "model.layers.0.self_attn.q_proj.weight"} <= shapes.keys():
        few = ", ".join(list(shapes)[:4])
        if advice := prefix_advice(shapes, (EMBEDDINGS, "model.layers.0.self_attn.q_proj.weight")):
            raise BadCheckpoint(
                f"{state.info.sentence()}. Its tensors ({few}, ...) are a Llama's under a prefix: {advice}"
            )
        raise NotCovered(f"{state.info.sentence()}. Its tensors ({few}, ...) are not those of a Llama-like decoder")
    first = {n.removeprefix("model.layers.0."): s for n, s in shapes.items() if n.startswith("model.layers.0.")}
    layers = {int(m[1]) for n in shapes if (m := re.match(r"model\.layers\.(\d+)\.", n))}
    settings: dict[str, Any] = {"n_layers": max(layers) + 1}
    if len(shapes[EMBEDDINGS]) == 2:
        settings |= dict(zip(("d_vocab", "d_model"), shapes[EMBEDDINGS], strict=True))
    for name, key in (("mlp.gate_proj.weight", "d_mlp"), ("self_attn.k_proj.weight", "k")):
        if len(first.get(name, ())) == 2:
            settings[key] = first[name][0]
    script, form = dict(values), formats().get(state.info.format)
    if form:
        script |= {ours: values[theirs] for theirs, ours in form.settings.items() if theirs in values}
    for ours, llamas in SETTINGS.items():  # the first spelling counts
        spelled = (script[key] for key in (ours, llamas, *SPELLINGS.get(ours, ())) if script.get(key) is not None)
        if (value := next(spelled, None)) is not None:
            settings[ours] = value
    if (theta := plain_theta(script, where)) is not None:
        settings.setdefault("rope_theta", theta)
    _refuse_others(script, where)
    settings |= given
    if missing := [key for key in ("n_heads", "n_ctx") if key not in settings]:
        what = f"nothing says {' and '.join(missing)}"
        raise BadCheckpoint(f"{state.info.sentence()}, but {what}; give config={{...}} with them")
    if "n_key_value_heads" not in settings and "k" in settings:
        settings["n_key_value_heads"] = settings["k"] * settings["n_heads"] // settings["d_model"]
    settings.pop("k", None)
    if assumed := [key for key in ("rms_norm_eps", "rope_theta") if key not in settings]:
        defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
        what = f"{' and '.join(assumed)}; {', '.join(f'{key}={defaults[key]}' for key in assumed)} is assumed"
        warn_caller(f"{where} does not say {what}. Say it with config={{...}} (--config)", ArchitectureAssumed)
    config = _config(settings, where)
    _refuse_window(script.get("sliding_window"), config, where)
    return config


def _assume(path: Path, config: ModelConfig, shapes: Shapes, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the first architecture with exactly these tensors and its options, or `transformer`."""
    candidates: dict[str, dict[str, Any]] = {}
    for name in ARCHITECTURES:
        completed = _complete(name, config, shapes, options)
        with contextlib.suppress(WorkbenchError):
            if shapes_of(build_on_meta(name, config, completed)) == shapes:
                candidates[name] = completed
    if not candidates:
        return "transformer", dict(options)  # refused by the tensors
    first, *others = candidates
    warn_caller(
        f"{path} does not say its architecture; {first!r} is assumed. Its tensors also fit: "
        f"{', '.join(others) or 'nothing else'}. Name it with architecture=... (--architecture)",
        ArchitectureAssumed,
    )
    return first, candidates[first]


def _complete(name: str, config: ModelConfig, shapes: Shapes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options completed from the tensors' shapes, such as DenseFormer's dilation and period."""
    completed = dict(options)
    for shortcut in architecture(name).shortcuts:
        prefix = f"{shortcut.prefix}."
        own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        fits = [fit for fit in shortcut.options_for(own, config) if fit | completed == completed | fit]
        if len(fits) > 1:
            raise BadCheckpoint(f"the tensors of {name} fit several settings, name one of {fits}")
        completed = (fits[0] if fits else {}) | completed
    return completed


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
