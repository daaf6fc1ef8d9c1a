"""A model of ours on disk: a step directory, or a plain Llama's for other libraries.

A step is `config.json` (the Llama config plus the key `workbench`) and `model.safetensors` with Llama's tensor names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.checkpoints.identify import CONFIG, WEIGHTS
from workbench.checkpoints.llama_names import HEAD, SETTINGS, llama_name
from workbench.checkpoints.vocabulary import export_tokenizer
from workbench.errors import WorkbenchError
from workbench.files import digest_of, replacing, write_json
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.observing.interception.weights import samples


def llama_config(model: Transformer) -> dict[str, Any]:
    """The contents of `config.json`: only a vanilla model calls itself a Llama, so no other opens as one by mistake."""
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


def export(model: HookedModel, folder: str | Path) -> Path:
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
            "Its own directory opens with workbench.load; workbench.models.lm_eval.for_lm_eval(model) evaluates it as it is"
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


def weights_hash(model: Transformer) -> str:
    """Content address of a model: architecture, options, config and every tensor's bytes, none of them copied on a CPU.

    Of an observed module, whose numbers are not kept by it, a sample of each tensor's.
    """
    return digest_of(_parts(model))


def _parts(model: Transformer) -> Iterator[object]:
    yield from (model.architecture, model.options, repr(model.config), str(model.embed.weight.dtype))
    tensors = sorted(model.named_parameters()) if model.foreign is None else samples(model.foreign)
    for name, tensor in tensors:
        yield name
        yield memoryview(tensor.detach().to("cpu").flatten().contiguous().view(torch.uint8).numpy())
