"""Models written to disk: a step directory (a Llama directory with the key `workbench`), or a plain Llama directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.checkpoints.paths import CONFIG, WEIGHTS
from workbench.checkpoints.tensor_and_setting_names import HEAD, SETTINGS, llama_name
from workbench.checkpoints.tokenizer_files import export_tokenizer
from workbench.errors import WorkbenchError
from workbench.file_io import digest_of, replacing, write_json
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.observing.interception.sharded_weights import samples


def llama_config(model: Transformer) -> dict[str, Any]:
    """Return the contents of `config.json`; only a vanilla model has the model type `llama`, so that others cannot open as one."""
    vanilla = not model.shortcuts
    return {
        "architectures": ["LlamaForCausalLM"] if vanilla else ["WorkbenchForCausalLM"],
        "model_type": "llama" if vanilla else "workbench",
        **{theirs: getattr(model.config, ours) for ours, theirs in SETTINGS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": model.config.rope_theta},
        "head_dim": model.config.d_head, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": tied(model), "bos_token_id": None, "eos_token_id": 0,
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "workbench": {"architecture": model.architecture, "options": model.options},
    }  # fmt: skip


def tied(model: Transformer) -> bool:
    """Return whether the output matrix and the embeddings share their memory."""
    return model.unembed.weight.data_ptr() == model.embed.weight.data_ptr()


def save(model: Transformer, folder: str | Path, **provenance: Any) -> Path:
    """Write a step directory and return it; weights come first, so that a directory with `config.json` is complete."""
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


def export(model: HookedModel, folder: str | Path) -> Path:
    """Write a vanilla model as a plain Hugging Face Llama directory, tokenizer included, and return the folder."""
    if not isinstance(model, Transformer):
        raise WorkbenchError(
            f"{model.source['path']} is observed, not one of our models: its checkpoint is that of its own code already"
        )
    if model.shortcuts:
        raise WorkbenchError(
            f"{model.architecture} is no Llama, and transformers has nothing that computes it: only a transformer is exported. "
            "Its own directory opens with workbench.load; workbench.models.lm_eval.for_lm_eval(model) evaluates it as it is"
        )
    folder = save(model, _new_folder(folder))
    config = {key: value for key, value in llama_config(model).items() if key != "workbench"}
    config |= {"bos_token_id": None, "eos_token_id": None, "transformers_version": version("transformers")}
    if model.tokenizer is not None:
        config |= export_tokenizer(model.tokenizer, folder, model.config.n_ctx)
    write_json(folder / CONFIG, config)
    return folder


def save_pretrained(model: Transformer, folder: str | Path) -> Path:
    """Write a folder that `load` opens again, with the tokenizer: a vanilla model as `export`, others with their architecture.

    Raises `WorkbenchError` for a folder that is not empty.
    """
    if not model.shortcuts:
        return export(model, folder)
    folder = save(model, _new_folder(folder))
    if model.tokenizer is not None:
        export_tokenizer(model.tokenizer, folder, model.config.n_ctx)
    return folder


def _new_folder(folder: str | Path) -> Path:
    """Return a folder that is empty or absent; raise `WorkbenchError` for another."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkbenchError(f"{folder} is not empty; name a new folder")
    return folder


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file; a full disk raises `OSError`."""
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def weights_hash(model: Transformer) -> str:
    """Return a hash of a model's architecture, options, config and weights. For an observed module, samples of its tensors are hashed."""

    def parts() -> Iterator[object]:
        yield from (model.architecture, model.options, repr(model.config), str(model.embed.weight.dtype))
        for name, tensor in sorted(model.named_parameters()) if model.foreign is None else samples(model.foreign):
            yield name
            yield memoryview(tensor.detach().to("cpu").flatten().contiguous().view(torch.uint8).numpy())

    return digest_of(parts())
