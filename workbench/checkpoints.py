"""Checkpoint directory <-> model: Hugging Face Llama's files and tensor names, read strictly.

A step is `config.json` (the Llama config plus the key `workbench`) and `model.safetensors`. The same reader opens our
runs, the directories of the ResFormer authors' code and plain Llama directories. Tensors that Llama lacks keep the
names of the code that introduced them (`dwa.alphas.<block>.weight`).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.config import ModelConfig
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, UnknownName, WorkbenchError, suggest
from workbench.files import digest, replacing, write_json
from workbench.formats import huggingface
from workbench.formats.huggingface import CONFIG, WEIGHTS
from workbench.formats.state import EMBEDDINGS, State
from workbench.formats.vocabulary import export_tokenizer
from workbench.models import ARCHITECTURES, Transformer, architecture, compose

HEAD = "lm_head.weight"
MOST = 2**40  # of anything in a config

_NAMES = {  # ours -> Llama's
    "embed.weight": "model.embed_tokens.weight",
    "ln_final.weight": "model.norm.weight",
    "unembed.weight": "lm_head.weight",
    "attn": "self_attn",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
}
_KEYS = {  # ours -> Llama's
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_key_value_heads": "num_key_value_heads",
    "d_mlp": "intermediate_size",
    "d_vocab": "vocab_size",
    "n_ctx": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "init_std": "initializer_range",
}


def llama_name(name: str) -> str:
    """Our parameter name in Llama's words; the shortcuts' own tensors are called alike."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(.+)", name):
        return f"model.layers.{match[1]}.{_NAMES.get(match[2], match[2])}.{match[3]}"
    return _NAMES.get(name, name)


# ---- writing ---------------------------------------------------------------------------------------------------------


def llama_config(model: Transformer) -> dict[str, Any]:
    """The contents of `config.json`: only a vanilla model calls itself a Llama, so no other opens as one by mistake."""
    vanilla = not model.shortcuts
    return {
        "architectures": ["LlamaForCausalLM"] if vanilla else ["WorkbenchForCausalLM"],
        "model_type": "llama" if vanilla else "workbench",
        **{theirs: getattr(model.config, ours) for ours, theirs in _KEYS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": model.config.rope_theta},
        "head_dim": model.config.d_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied(model),
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "workbench": {"architecture": model.architecture, "options": model.options},
    }


def tied(model: Transformer) -> bool:
    """Whether the head is the embeddings, the same numbers in the same place."""
    return model.unembed.weight.data_ptr() == model.embed.weight.data_ptr()


def save(model: Transformer, folder: str | Path, **provenance: Any) -> Path:
    """Write a step directory; weights first, so a directory with `config.json` is whole. Returns the folder."""
    folder = Path(folder)
    tensors = {llama_name(n): p.detach().to("cpu").contiguous() for n, p in model.named_parameters()}
    if tied(model):
        del tensors[HEAD]
    with replacing(folder / WEIGHTS) as part:
        write_tensors(tensors, part, {"format": "pt"})
    config = llama_config(model)
    config["workbench"] |= provenance
    write_json(folder / CONFIG, config)
    return folder


def export(model: Transformer, folder: str | Path) -> Path:
    """Write a vanilla model as a plain Hugging Face Llama directory, tokenizer included; returns the folder.

    transformers then computes the same logits. Raises `WorkbenchError` for any other architecture, which transformers
    would open as a Llama that it is not, and for a folder that is not empty.
    """
    folder = Path(folder)
    if not isinstance(model, Transformer):
        raise WorkbenchError(
            f"{model.source['path']} is observed, not one of our models: its checkpoint is that of its own code already"
        )
    if model.shortcuts:
        raise WorkbenchError(
            f"{model.architecture} is no Llama, and transformers has nothing that computes it: only a transformer is exported. "
            "Its own directory opens with workbench.load; workbench.formats.harness.for_lm_eval(model) evaluates it as it is"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkbenchError(f"{folder} is not empty; name a new folder")
    save(model, folder)
    config = {key: value for key, value in llama_config(model).items() if key != "workbench"}
    config |= {"bos_token_id": None, "eos_token_id": None}
    if model.tokenizer is not None:
        config |= export_tokenizer(model.tokenizer, folder, model.config.n_ctx)
    write_json(folder / CONFIG, config)
    return folder


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """safetensors with a full disk reported as the `OSError` it is."""
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


# ---- reading ---------------------------------------------------------------------------------------------------------

COVERED = ("llama", "mistral")  # model types whose configurations can be those of our decoder
_SPELLINGS = {  # how training scripts call what a Llama config calls otherwise
    "n_layers": ("n_layer", "num_layers"),
    "d_model": ("n_embd", "dim"),
    "n_heads": ("n_head",),
    "n_key_value_heads": ("n_kv_head", "n_kv_heads"),
    "n_ctx": ("block_size", "sequence_length", "sequence_len", "max_seq_len"),
    "rms_norm_eps": ("norm_eps",),
    "rope_theta": ("rope_base",),
}


def model_config(values: Mapping[str, Any], where: Path) -> ModelConfig:
    """Our config from a Llama config, in older and newer spellings.

    Raises `NotCovered` for what the decoder lacks, by name, and `BadCheckpoint` for what contradicts itself.
    """
    if "workbench" not in values and values.get("model_type") not in COVERED:
        raise NotCovered(f"{where}: model_type {values.get('model_type')!r}; only llama and our own are read")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise NotCovered(f"{where}: rotary scaling {rope} is not supported, only the plain rotation")
    plain = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    for key, only in plain.items():
        if (found := rope.get(key, values.get(key, only))) != only:
            raise NotCovered(f"{where}: {key}={found!r} is not supported, only {only!r}")
    thetas = [found for found in (values.get("rope_theta"), rope.get("rope_theta")) if found is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise BadCheckpoint(f"{where} contradicts itself: rope_theta is {thetas[0]} and, in {rope}, another")
    settings = {ours: values[theirs] for ours, theirs in _KEYS.items() if values.get(theirs) is not None}
    if "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    config = _config(settings, where)
    if values.get("head_dim") not in (None, config.d_head):
        raise NotCovered(f"{where}: head_dim={values['head_dim']}, only hidden_size / heads = {config.d_head}")
    window = values.get("sliding_window", 4096) if values.get("model_type") == "mistral" else None
    if window is not None and not (isinstance(window, int) and window >= config.n_ctx):
        raise NotCovered(f"{where}: sliding_window={window} is not supported, only attention to all earlier positions")
    return config


def _config(settings: Mapping[str, Any], where: Path) -> ModelConfig:
    try:
        return ModelConfig.of(settings)
    except WorkbenchError as error:
        raise BadCheckpoint(f"{where}: {error}") from error


def config_of(state: State, given: Mapping[str, Any]) -> ModelConfig:
    """The config of a state: its Llama config, or what its script wrote down and its tensors' shapes tell.

    `given` completes and overrides. Raises `NotCovered` where the tensors are not a Llama's, `BadCheckpoint` naming the
    settings that neither files nor tensors tell. What every Llama has in common is assumed with a warning.
    """
    values, where = state.info.config or {}, state.info.path
    if "workbench" in values or "model_type" in values or (where / CONFIG).exists():
        config = model_config(values, where / CONFIG)
        return _config(dataclasses.asdict(config) | dict(given), where) if given else config
    shapes = state.shapes
    if not {EMBEDDINGS, "model.layers.0.self_attn.q_proj.weight"} <= shapes.keys():
        raise NotCovered(
            f"{state.info.told()}. Its tensors ({', '.join(list(shapes)[:4])}, ...) are not those of a Llama-like decoder"
        )
    settings = _from_shapes(shapes) | _told(values) | dict(given)
    if missing := [key for key in ("n_heads", "n_ctx") if key not in settings]:
        raise BadCheckpoint(
            f"{state.info.told()}, but nothing says {' and '.join(missing)}; give config={{...}} with them"
        )
    if "n_key_value_heads" not in settings and "k" in settings:
        settings["n_key_value_heads"] = settings["k"] * settings["n_heads"] // settings["d_model"]
    settings.pop("k", None)
    if assumed := [key for key in ("rms_norm_eps", "rope_theta") if key not in settings]:
        defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
        told = ", ".join(f"{key}={defaults[key]}" for key in assumed)
        _warn(f"{where} does not say {' and '.join(assumed)}; {told} is assumed. Say it with config={{...}} (--config)")
    return _config(settings, where)


def _from_shapes(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    first = {n.removeprefix("model.layers.0."): s for n, s in shapes.items() if n.startswith("model.layers.0.")}
    layers = {int(m[1]) for n in shapes if (m := re.match(r"model\.layers\.(\d+)\.", n))}
    found: dict[str, Any] = {"n_layers": max(layers) + 1}
    if len(shapes[EMBEDDINGS]) == 2:
        found |= dict(zip(("d_vocab", "d_model"), shapes[EMBEDDINGS], strict=True))
    for name, key in (("mlp.gate_proj.weight", "d_mlp"), ("self_attn.k_proj.weight", "k")):
        if len(first.get(name, ())) == 2:
            found[key] = first[name][0]
    return found


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings a script wrote down, by our names; of two spellings the first that is there."""
    found: dict[str, Any] = {}
    for ours, theirs in _KEYS.items():
        for key in (ours, theirs, *_SPELLINGS.get(ours, ())):
            if values.get(key) is not None:
                found.setdefault(ours, values[key])
    return found


def fits(
    name: str, config: ModelConfig, shapes: Mapping[str, list[int]], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Options under which an architecture has just these tensors, None where it never has."""
    chosen = _settle(name, config, shapes, options)
    try:
        expected = _without_memory(name, config, chosen)
    except WorkbenchError:
        return None
    wanted = {llama_name(n): list(p.shape) for n, p in expected.named_parameters()}
    return chosen if wanted == dict(shapes) else None


def load_directory(folder: Path, **settings: Any) -> Transformer:
    """A model from one checkpoint directory; see `load_state`."""
    return load_state(huggingface.read(folder), **settings)


def load_state(
    state: State,
    *,
    architecture_name: str | None = None,
    config: Mapping[str, Any] | ModelConfig | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Transformer:
    """A model from the tensors and facts of one checkpoint.

    A checkpoint that does not say its architecture loads as `transformer` (or as the one its tensors demand) with an
    `ArchitectureAssumed` warning naming what else the tensors allow. Weights are float32 whatever the files hold, or
    `dtype`. Names and shapes are compared before a weight is read. Raises `BadCheckpoint` for missing, damaged or
    contradictory files, naming the nearest tensors, and `NotCovered` for models our decoder does not compute.
    """
    given = dataclasses.asdict(config) if isinstance(config, ModelConfig) else dict(config or {})
    info = state.info
    if "unembed.weight" in state.tensors:  # a state dict of our own model
        state = State({llama_name(name): t for name, t in state.tensors.items()}, info)
    shape, shapes, values = config_of(state, given), state.shapes, info.config or {}
    if shape.n_layers > max(len(shapes), 256):  # before so many are built
        raise BadCheckpoint(f"{info.path}: n_layers={shape.n_layers}, but there are only {len(shapes)} tensors")
    if values.get("tie_word_embeddings") and HEAD not in shapes:
        shapes[HEAD] = shapes.get(EMBEDDINGS, [])
    own = _own(values, info.path / CONFIG)
    if own and architecture_name in (None, own["architecture"]):
        architecture_name, options = own["architecture"], own.get("options", {}) | options
    assumed = architecture_name is None
    if architecture_name is None:
        architecture_name, options = _assume(info.path, shape, shapes, options)
    options = _settle(architecture_name, shape, shapes, options)
    model = _without_memory(architecture_name, shape, options)
    _refuse_unfit(model, info.path, shapes)
    for name, stored in state.tensors.items():
        if not stored.dtype.is_floating_point:
            raise BadCheckpoint(f"{stored.path}: {name} is {stored.dtype}; quantised weights are not read")
    state.check()
    _fill(model, state, device, dtype or torch.float32)
    model.assumed = assumed
    model.source = info.provenance | {"seed": own.get("seed"), "step": own.get("step", info.step)}
    return model


def _without_memory(name: str, config: ModelConfig, options: Mapping[str, Any]) -> Transformer:
    """An architecture whose tensors have names and shapes only; none is made before the checkpoint's are known to fit."""
    if (largest := max(v for v in dataclasses.astuple(config) if isinstance(v, int))) > MOST:
        raise BadCheckpoint(f"no {name} can be built with {config}: {largest} is beyond all sizes")
    try:
        with torch.device("meta"):
            return compose(name, config, **options)
    except (RuntimeError, OverflowError) as error:  # shapes beyond what can be counted
        raise BadCheckpoint(
            f"no {name} can be built with {config}: {next(iter(str(error).splitlines()), '')}"
        ) from error


def _own(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    own = values.get("workbench") or {}
    try:
        if own:
            known, options = architecture(own["architecture"]).options, own.get("options", {})
            if strange := [key for key in options if key not in known]:
                raise UnknownName(f"option of {own['architecture']}", strange[0], known)
            _ = options | {}
    except (KeyError, TypeError, AttributeError, WorkbenchError) as error:
        raise BadCheckpoint(f"{where} does not name its architecture well, workbench={own!r}: {error}") from error
    return own


def _settle(
    name: str, config: ModelConfig, shapes: Mapping[str, list[int]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Options completed from the tensors' shapes (DenseFormer's dilation and period can mostly be read off)."""
    chosen = dict(options)
    for shortcut in architecture(name).shortcuts:
        prefix = f"{shortcut.prefix}."
        own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        fits = [fit for fit in shortcut.options_for(own, config) if fit | chosen == chosen | fit]
        if len(fits) > 1:
            raise BadCheckpoint(f"the tensors of {name} fit several settings, name one of {fits}")
        chosen = (fits[0] if fits else {}) | chosen
    return chosen


def _assume(
    path: Path, config: ModelConfig, shapes: Mapping[str, list[int]], options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    candidates = {name: found for name in ARCHITECTURES if (found := fits(name, config, shapes, options)) is not None}
    if not candidates:
        return "transformer", options  # refused by the tensors
    chosen, *others = candidates
    _warn(
        f"{path} does not say its architecture; {chosen!r} is assumed. Its tensors also fit: "
        f"{', '.join(others) or 'nothing else'}. Name it with architecture=... (--architecture)"
    )
    return chosen, candidates[chosen]


def _warn(text: str) -> None:
    """An `ArchitectureAssumed` warning that points at the caller's line, however deep in the library it arose."""
    depth, frame = 1, sys._getframe()
    home = str(Path(__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(home):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, ArchitectureAssumed, stacklevel=depth)


def _refuse_unfit(model: Transformer, path: Path, shapes: Mapping[str, list[int]]) -> None:
    wanted = {llama_name(name): list(parameter.shape) for name, parameter in model.named_parameters()}
    missing, unexpected = sorted(wanted.keys() - shapes), sorted(shapes.keys() - wanted)
    misshapen = [n for n in wanted.keys() & shapes.keys() if wanted[n] != list(shapes[n])]
    if missing or unexpected or misshapen:
        lines = [f"{path} does not hold a {model.architecture} with options {model.options}"]
        lines += [f"missing {n}; {suggest(n, unexpected)}" for n in missing[:5]]
        lines += [f"unexpected {n} {shapes[n]}" for n in unexpected[:5]]
        lines += [f"{n} is {shapes[n]}, wanted {wanted[n]}" for n in misshapen[:5]]
        more = len(missing) + len(unexpected) + len(misshapen) - len(lines) + 1
        raise BadCheckpoint("\n  ".join(lines + ([f"and {more} more"] if more > 0 else [])))


def _fill(model: Transformer, state: State, device: str | torch.device | None, dtype: torch.dtype) -> None:
    """Give a model without memory its tensors; a tied head is the embeddings themselves."""
    found = {name: tensor.to(device) if device else tensor for name, tensor in state.read(dtype)}
    found.setdefault(HEAD, found[EMBEDDINGS])
    model.load_state_dict({n: found[llama_name(n)] for n, _ in model.named_parameters()}, assign=True)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers())), "a tensor that no checkpoint holds"


def weights_hash(model: Transformer) -> str:
    """Content address of a model: architecture, options, config and every tensor's bytes."""
    parts: list[object] = [model.architecture, model.options, repr(model.config), str(model.embed.weight.dtype)]
    for name, tensor in sorted(model.named_parameters()):
        parts += [name, tensor.detach().to("cpu").flatten().contiguous().view(torch.uint8).numpy().tobytes()]
    return digest(*parts)
