"""GGUF files (llama.cpp) through transformers' own loader, which dequantises them to float32; needs the extra `gguf`.

The tensors have the names of the Hugging Face model. A model that our decoder does not compute is transformers' module, observed.
Source: transformers, modeling_gguf_pytorch_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoints.checkpoint_facts import Dtype
from workbench.checkpoints.file_signatures import first_bytes
from workbench.checkpoints.format import Format
from workbench.checkpoints.paths import GGUF
from workbench.checkpoints.stored_tensors import Stored
from workbench.checkpoints.transformers_modules import quiet
from workbench.data.tokenizer import as_tokenizer
from workbench.errors import BadCheckpoint

CONVERT = "`llama-quantize --allow-requantize {path} OUT.gguf F16` of llama.cpp converts quantised tensors"


def dequantised(path: Path) -> tuple[dict[str, Stored], Mapping[str, Any]] | None:
    """Return the tensors, by transformers' names, and the settings of a GGUF file; None for other files.

    Raises `BadCheckpoint` without the gguf package, and for a file that transformers cannot dequantise.
    """
    if first_bytes(path)[:4] != b"GGUF":
        return None
    module = open_module(path, torch.float32)
    tensors = {name: Stored(path, t.dtype, tuple(t.shape), held=t.detach()) for name, t in module.state_dict().items()}
    return tensors, module.config.to_dict() | {"architectures": [type(module).__name__]}


def open_module(path: Path, dtype: Dtype) -> Any:
    """Return transformers' module of a GGUF file, in evaluation mode; raises as `dequantised`."""
    if find_spec("gguf") is None:
        raise BadCheckpoint(f"{path} is {GGUF}")
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    options = {"gguf_file": path.name, "dtype": dtype or torch.float32, "local_files_only": True}
    try:
        with quiet():
            module, report = loader.from_pretrained(path.parent, output_loading_info=True, **options)
    except Exception as error:  # of another library, on a damaged or an unknown file
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        raise BadCheckpoint(
            f"{path} is a GGUF file that transformers cannot read ({type(error).__name__}: {reason}). {CONVERT.format(path=path)}; for an "
            "unsupported architecture or a damaged file, open the model it was converted from"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise BadCheckpoint(
            f"{path} is a GGUF file without {', '.join(missing[:5])} of {type(module).__name__}; open the model it was converted from"
        )
    return module.eval()


def tokenizer_inside(path: Path, d_vocab: int) -> Any:
    """Return the tokenizer in a GGUF file, None without one; raises `BadCheckpoint` if transformers cannot convert it."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    if "tokenizer.ggml.tokens" not in GGUFReader(path).fields:
        return None
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # as above
        raise BadCheckpoint(
            f"{path}: transformers cannot convert its tokenizer ({type(error).__name__}: {error}); open the model it was converted from"
        ) from error
    return as_tokenizer(tokenizer, d_vocab)


FORMAT = Format(
    name="GGUF", read=dequantised, tokenizer=tokenizer_inside,
    module=lambda state, dtype: open_module(state.info.path, dtype),
)  # fmt: skip
