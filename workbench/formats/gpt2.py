"""nanoGPT's decoder as transformers' `GPT2LMHeadModel`, number by number.

Both compute GPT-2 with LayerNorm, learned positions and a head tied to the embeddings. nanoGPT's projections are linear
layers, stored transposed to GPT-2's; without `bias` its missing biases are zeros here; its GELU is the exact one.
Source: karpathy/nanoGPT, model.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from workbench.errors import BadCheckpoint, NotCovered, suggest
from workbench.formats.state import State

KNOWN = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")  # a buffer of versions without fused attention
EMBEDDINGS, HEAD = "transformer.wte.weight", "lm_head.weight"


def is_gpt2(state: State) -> bool:
    """Whether the tensors are named like GPT-2's and the settings are nanoGPT's, all of them known."""
    return state.info.format == "nanoGPT" and {EMBEDDINGS, "transformer.wpe.weight"} <= state.tensors.keys()


def module_of(state: State, dtype: torch.dtype | None = None) -> Any:
    """The `GPT2LMHeadModel` of a nanoGPT state, in evaluation mode.

    Raises `NotCovered` for settings of forks, `BadCheckpoint` for tensors that do not fit the settings.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    settings, where = dict(state.info.config or {}), state.info.path
    if strange := [key for key in settings if key not in KNOWN]:
        raise NotCovered(
            f"{where}: model_args has {strange[0]!r}, which nanoGPT does not; {suggest(strange[0], list(KNOWN))}"
        )
    sizes: dict[str, Any] = {key: settings.get(key) for key in KNOWN if key not in ("bias", "dropout")}
    if bad := [key for key, n in sizes.items() if not isinstance(n, int) or isinstance(n, bool) or n < 1]:
        raise BadCheckpoint(f"{where}: model_args says {bad[0]}={sizes[bad[0]]!r}; it must be a positive whole number")
    if sizes["n_embd"] % sizes["n_head"]:
        raise BadCheckpoint(f"{where}: n_head={sizes['n_head']} does not divide n_embd={sizes['n_embd']}")
    _refuse_unfit(state, sizes, bool(settings.get("bias", True)))
    state.check()
    config = GPT2Config(
        vocab_size=sizes["vocab_size"], n_positions=sizes["block_size"], n_embd=sizes["n_embd"], n_layer=sizes["n_layer"],
        n_head=sizes["n_head"], activation_function="gelu", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        module = GPT2LMHeadModel(config)
    found = {name: t for name, t in state.read(dtype or torch.float32) if not MASK.fullmatch(name)}
    if HEAD in found and not torch.equal(found[HEAD], found[EMBEDDINGS]):
        raise NotCovered(f"{where}: {HEAD} and {EMBEDDINGS} differ; nanoGPT ties them")
    found[HEAD] = found[EMBEDDINGS]
    filled = {name: _as_stored(name, found.get(name), like) for name, like in module.state_dict().items()}
    module.load_state_dict(filled, assign=True)
    module.tie_weights()
    return module.eval()


def _as_stored(name: str, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:  # a bias that nanoGPT left out
        return torch.zeros(like.shape, dtype=torch.float32)
    return tensor.t() if name.endswith(TRANSPOSED) else tensor


def _refuse_unfit(state: State, sizes: dict[str, Any], bias: bool) -> None:
    d, wanted = sizes["n_embd"], {EMBEDDINGS: [sizes["vocab_size"], sizes["n_embd"]]}
    wanted |= {"transformer.wpe.weight": [sizes["block_size"], d], "transformer.ln_f.weight": [d]}
    parts = {"ln_1": [d], "attn.c_attn": [3 * d, d], "attn.c_proj": [d, d], "ln_2": [d], "mlp.c_fc": [4 * d, d]}
    parts["mlp.c_proj"] = [d, 4 * d]
    if sizes["n_layer"] > len(state.tensors):
        raise BadCheckpoint(
            f"{state.info.path}: n_layer={sizes['n_layer']}, but there are {len(state.tensors)} tensors"
        )
    for i in range(sizes["n_layer"]):
        wanted |= {f"transformer.h.{i}.{part}.weight": shape for part, shape in parts.items()}
    if bias:
        wanted |= {
            name.removesuffix("weight") + "bias": s[:1]
            for name, s in wanted.items()
            if ".h." in name or ".ln_f" in name
        }
    found = {name: shape for name, shape in state.shapes.items() if name != HEAD and not MASK.fullmatch(name)}
    for name in [n for n in wanted if n not in found][:1]:
        raise BadCheckpoint(f"{state.info.path}: missing {name}; {suggest(name, sorted(found.keys() - wanted.keys()))}")
    for name in [n for n in found if n not in wanted][:1]:
        raise BadCheckpoint(f"{state.info.path}: unexpected {name} {found[name]} for {dict(state.info.config or {})}")
    for name in [n for n in wanted if list(found[n]) != wanted[n]][:1]:
        raise BadCheckpoint(f"{state.info.path}: {name} is {found[name]}, wanted {wanted[name]}")
