"""Checkpoint directory <-> model: Hugging Face Llama's files and tensor names, read strictly.

A step is `config.json` (the Llama config plus the key `workbench`) and `model.safetensors`. The same reader opens our
runs, the directories of the ResFormer authors' code and plain Llama directories. Tensors that Llama lacks keep the
names of the code that introduced them (`dwa.alphas.<block>.weight`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.config import ModelConfig
from workbench.errors import ArchitectureAssumed, BadCheckpoint, WorkbenchError, suggest
from workbench.files import digest, read_json, replacing, write_json
from workbench.models import ARCHITECTURES, Transformer, architecture, compose

CONFIG, WEIGHTS = "config.json", "model.safetensors"

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
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "workbench": {"architecture": model.architecture, "options": model.options},
    }


def save(model: Transformer, folder: str | Path, **provenance: Any) -> Path:
    """Write a step directory; weights first, so a directory with `config.json` is whole. Returns the folder."""
    folder = Path(folder)
    tensors = {llama_name(n): p.detach().to("cpu").contiguous() for n, p in model.named_parameters()}
    with replacing(folder / WEIGHTS) as part:
        write_tensors(tensors, part, {"format": "pt"})
    config = llama_config(model)
    config["workbench"] |= provenance
    write_json(folder / CONFIG, config)
    return folder


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """safetensors with a full disk reported as the `OSError` it is."""
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


# ---- reading ---------------------------------------------------------------------------------------------------------


class Tensors:
    """The tensors of a checkpoint directory, single or sharded, opened lazily."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        index = folder / f"{WEIGHTS}.index.json"
        names = [WEIGHTS]
        if index.exists():
            found = read_json(index).get("weight_map")
            if not isinstance(found, dict):
                raise BadCheckpoint(f"{index} has no weight_map")
            names = sorted({str(name) for name in found.values()})
            if bad := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
                raise BadCheckpoint(f"{index} points outside its folder or at no safetensors file: {bad[0]!r}")
        for name in names:
            with self._open(folder / name) as file:
                for key in file.keys():  # noqa: SIM118 - safetensors handles are not iterable
                    if key in self.files:
                        raise BadCheckpoint(f"{folder / name} and {self.files[key].name} both hold {key}")
                    if not key.endswith("rotary_emb.inv_freq"):  # a constant that older libraries wrote down
                        self.files[key], self.shapes[key] = folder / name, file.get_slice(key).get_shape()

    @staticmethod
    def _open(path: Path) -> Any:
        if not path.exists():
            raise BadCheckpoint(f"{path} is missing")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path} is damaged or no safetensors file: {error}") from error

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), a file at a time."""
        for path in sorted(set(self.files.values())):
            with self._open(path) as file:
                for key in (k for k, home in self.files.items() if home == path):
                    tensor = file.get_tensor(key)
                    if not tensor.is_floating_point():
                        raise BadCheckpoint(f"{path}: {key} is {tensor.dtype}; quantised weights are not read")
                    yield key, tensor


def model_config(values: Mapping[str, Any], where: Path) -> ModelConfig:
    """Our config from a Llama config, in older and newer spellings; what the decoder lacks is refused by name."""
    if "workbench" not in values and values.get("model_type") != "llama":
        raise BadCheckpoint(f"{where}: model_type {values.get('model_type')!r}; only llama and our own are read")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise BadCheckpoint(f"{where}: rotary scaling {rope} is not supported, only the plain rotation")
    for key, plain in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}.items():
        if values.get(key, plain) != plain:
            raise BadCheckpoint(f"{where}: {key}={values[key]!r} is not supported, only {plain!r}")
    found = {ours: values[theirs] for ours, theirs in _KEYS.items() if values.get(theirs) is not None}
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    try:
        config = ModelConfig.of(found)
    except WorkbenchError as error:
        raise BadCheckpoint(f"{where}: {error}") from error
    if values.get("head_dim") not in (None, config.d_head):
        raise BadCheckpoint(f"{where}: head_dim={values['head_dim']}, only hidden_size / heads = {config.d_head}")
    return config


def fits(
    name: str, config: ModelConfig, shapes: Mapping[str, list[int]], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Options under which an architecture has just these tensors, None where it never has."""
    chosen = _settle(name, config, shapes, options)
    try:
        with torch.device("meta"):
            expected = compose(name, config, **chosen)
    except WorkbenchError:
        return None
    wanted = {llama_name(n): list(p.shape) for n, p in expected.named_parameters()}
    return chosen if wanted == dict(shapes) else None


def load_directory(
    folder: Path,
    *,
    architecture_name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Transformer:
    """A model from one checkpoint directory.

    A directory that does not say its architecture loads as `transformer` (or as the one its tensors demand) with an
    `ArchitectureAssumed` warning naming what else the tensors allow. Weights are float32 whatever the files hold, or
    `dtype`. Raises `BadCheckpoint` for missing, damaged or contradictory files, naming the nearest tensors.
    """
    values = read_json(folder / CONFIG)
    config, tensors = model_config(values, folder / CONFIG), Tensors(folder)
    shapes = dict(tensors.shapes)
    if values.get("tie_word_embeddings") and "lm_head.weight" not in shapes:
        shapes["lm_head.weight"] = shapes.get("model.embed_tokens.weight", [])
    own = _own(values, folder / CONFIG)
    if own and architecture_name in (None, own["architecture"]):
        architecture_name, options = own["architecture"], own.get("options", {}) | options
    assumed = architecture_name is None
    if architecture_name is None:
        architecture_name, options = _assume(folder, config, shapes, options)
    model = compose(architecture_name, config, **_settle(architecture_name, config, shapes, options))
    model.to(device=device, dtype=dtype)
    _fill(model, folder, tensors, shapes)
    model.assumed = assumed
    model.source = {"path": str(folder), "seed": own.get("seed"), "step": own.get("step")}
    return model


def _own(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    own = values.get("workbench") or {}
    try:
        if own:
            architecture(own["architecture"])
    except (KeyError, TypeError, WorkbenchError) as error:
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
    folder: Path, config: ModelConfig, shapes: Mapping[str, list[int]], options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    candidates = {name: found for name in ARCHITECTURES if (found := fits(name, config, shapes, options)) is not None}
    if not candidates:
        return "transformer", options  # refused by the tensors
    chosen, *others = candidates
    warnings.warn(
        f"{folder} does not say its architecture; {chosen!r} is assumed. Its tensors also fit: "
        f"{', '.join(others) or 'nothing else'}. Name it with architecture=...",
        ArchitectureAssumed,
        stacklevel=4,
    )
    return chosen, candidates[chosen]


def _fill(model: Transformer, folder: Path, tensors: Tensors, shapes: Mapping[str, list[int]]) -> None:
    wanted = {llama_name(name): parameter for name, parameter in model.named_parameters()}
    missing, unexpected = sorted(wanted.keys() - shapes), sorted(shapes.keys() - wanted)
    misshapen = [n for n in wanted.keys() & shapes.keys() if list(wanted[n].shape) != list(shapes[n])]
    if missing or unexpected or misshapen:
        lines = [f"{folder} does not hold a {model.architecture} with options {model.options}"]
        lines += [f"missing {n}; {suggest(n, unexpected)}" for n in missing[:5]]
        lines += [f"unexpected {n} {shapes[n]}" for n in unexpected[:5]]
        lines += [f"{n} is {shapes[n]}, wanted {list(wanted[n].shape)}" for n in misshapen[:5]]
        more = len(missing) + len(unexpected) + len(misshapen) - len(lines) + 1
        raise BadCheckpoint("\n  ".join(lines + ([f"and {more} more"] if more > 0 else [])))
    with torch.no_grad():
        for name, tensor in tensors.read():
            wanted[name].copy_(tensor)
        if "lm_head.weight" not in tensors.shapes:
            wanted["lm_head.weight"].copy_(wanted["model.embed_tokens.weight"])


def weights_hash(model: Transformer) -> str:
    """Content address of a model: architecture, options, config and every tensor's bytes."""
    parts: list[object] = [model.architecture, model.options, repr(model.config), str(model.embed.weight.dtype)]
    for name, tensor in sorted(model.named_parameters()):
        parts += [name, tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()]
    return digest(*parts)
