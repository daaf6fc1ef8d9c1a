"""Names of tensors and settings in Hugging Face's Llama, which our steps and most checkpoints use."""

from __future__ import annotations

import re

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TENSORS = {  # ours -> Llama's
    "embed.weight": EMBEDDINGS, "ln_final.weight": "model.norm.weight", "unembed.weight": HEAD,
    "attn": "self_attn", "ln1": "input_layernorm", "ln2": "post_attention_layernorm",
}  # fmt: skip
SETTINGS = {  # ours -> Llama's
    "n_layers": "num_hidden_layers", "d_model": "hidden_size", "n_heads": "num_attention_heads",
    "n_key_value_heads": "num_key_value_heads", "d_mlp": "intermediate_size", "d_vocab": "vocab_size",
    "n_ctx": "max_position_embeddings", "rms_norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "init_std": "initializer_range",
}  # fmt: skip
SPELLINGS = {  # names of the same settings in training scripts
    "n_layers": ("n_layer", "num_layers"), "d_model": ("n_embd", "dim"), "n_heads": ("n_head",),
    "n_key_value_heads": ("n_kv_head", "n_kv_heads"), "rms_norm_eps": ("norm_eps",), "rope_theta": ("rope_base",),
    "n_ctx": ("block_size", "sequence_length", "sequence_len", "max_seq_len"),
}  # fmt: skip


def llama_name(name: str) -> str:
    """Return Llama's name of one of our parameters, or the name itself if it is another tensor's."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(.+)", name):
        return f"model.layers.{match[1]}.{_TENSORS.get(match[2], match[2])}.{match[3]}"
    return _TENSORS.get(name, name)
