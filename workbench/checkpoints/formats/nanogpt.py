"""nanoGPT's `ckpt.pt`: {model, optimizer, model_args, iter_num, ...}; `model_args` are the model's settings.

A Llama's tensors open in our decoder. nanoGPT's own decoder becomes transformers' `GPT2LMHeadModel`. Its projections are stored transposed
to GPT-2's, missing biases become zeros, and its GELU is the exact one.
Source: karpathy/nanoGPT, train.py and model.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from workbench.checkpoints.checkpoint_facts import Dtype, State
from workbench.checkpoints.format import Format
from workbench.checkpoints.weight_checks import misfits
from workbench.errors import BadCheckpoint, NotCovered, suggest

KNOWN = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")  # a buffer of versions without fused attention
EMBEDDINGS, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def gpt2(state: State, dtype: Dtype = None) -> Any:
    """Return the `GPT2LMHeadModel` of a nanoGPT state, in evaluation mode; None for other tensor names."""
    if not {EMBEDDINGS, POSITIONS} <= state.tensors.keys():
        return None
    from transformers import GPT2Config, GPT2LMHeadModel

    where, sizes = state.info.path, _sizes(state)
    bias = bool((state.info.config or {}).get("bias", True))
    d = sizes["n_embd"]
    ends = {EMBEDDINGS: [sizes["vocab_size"], d], POSITIONS: [sizes["block_size"], d]}
    wanted = ends | {"transformer.ln_f.weight": [d]}
    parts = {
        "ln_1": [d], "attn.c_attn": [3 * d, d], "attn.c_proj": [d, d], "ln_2": [d], "mlp.c_fc": [4 * d, d], "mlp.c_proj": [d, 4 * d],
    }  # fmt: skip
    if (layers := sizes["n_layer"]) > len(state.tensors):
        raise BadCheckpoint(f"{state.info.path}: n_layer={layers}, but there are {len(state.tensors)} tensors")
    for i in range(layers):
        wanted |= {f"transformer.h.{i}.{part}.weight": shape for part, shape in parts.items()}
    if bias:
        wanted |= {n.removesuffix("weight") + "bias": shape[:1] for n, shape in wanted.items() if n not in ends}
    shapes = {name: shape for name, shape in state.shapes.items() if name != HEAD and not MASK.fullmatch(name)}
    if faults := misfits(shapes, wanted):
        raise BadCheckpoint(f"{state.info.path} does not fit its settings {dict(state.info.config or {})}: {faults}")
    state.check()
    config = GPT2Config(
        vocab_size=sizes["vocab_size"], n_positions=sizes["block_size"], n_embd=sizes["n_embd"], n_layer=sizes["n_layer"],
        n_head=sizes["n_head"], activation_function="gelu", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        module = GPT2LMHeadModel(config)
    tensors = {name: t for name, t in state.read(dtype or torch.float32) if not MASK.fullmatch(name)}
    if HEAD in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDINGS]):
        raise NotCovered(f"{where}: {HEAD} and {EMBEDDINGS} differ; nanoGPT ties them")
    tensors[HEAD] = tensors[EMBEDDINGS]
    for name, like in module.state_dict().items():
        tensor = tensors.get(name, torch.zeros(like.shape, dtype=torch.float32))  # a bias that nanoGPT left out
        tensors[name] = tensor.t() if name.endswith(TRANSPOSED) else tensor
    module.load_state_dict(tensors, assign=True)
    module.tie_weights()
    return module.eval()


def _sizes(state: State) -> dict[str, Any]:
    settings, where = dict(state.info.config or {}), state.info.path
    if strange := next((key for key in settings if key not in KNOWN), None):
        near = suggest(strange, list(KNOWN))
        raise NotCovered(f"{where}: model_args has {strange!r}, which nanoGPT does not; {near}")
    sizes: dict[str, Any] = {key: settings.get(key) for key in KNOWN if key not in ("bias", "dropout")}
    if bad := [key for key, n in sizes.items() if not isinstance(n, int) or isinstance(n, bool) or n < 1]:
        raise BadCheckpoint(f"{where}: model_args says {bad[0]}={sizes[bad[0]]!r}; it must be a positive whole number")
    if sizes["n_embd"] % sizes["n_head"]:
        raise BadCheckpoint(f"{where}: n_head={sizes['n_head']} does not divide n_embd={sizes['n_embd']}")
    return sizes


FORMAT = Format(name="nanoGPT", keys=("model", "model_args"), step="iter_num", config="model_args", module=gpt2)
