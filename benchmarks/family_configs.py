"""Small configurations of every causal language model of transformers, and modules of them on random weights."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError

MOST_PARAMETERS = 40_000_000  # a family that stays larger could not be shrunk
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 64, 4, 128, 24
SIZES: dict[str, Any] = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS
)
SIZES |= dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "model_dim"), WIDTH
)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), HEADS)
SIZES |= dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num"), 2)
SIZES |= dict.fromkeys(
    ("head_dim", "attention_head_dim", "v_head_dim", "kv_channels", "global_head_dim"), WIDTH // HEADS
)
SIZES |= dict.fromkeys(
    ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_hidden_size"), 2 * WIDTH
)
SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128)
SIZES |= dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim", "intermediate_size_mlp"), 32
)
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
SIZES |= dict.fromkeys(("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "num_experts_per_token"), 2)
SIZES |= dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "index_head_dim"), 16)
SIZES |= dict.fromkeys(("mamba_d_state", "state_size", "mamba_d_head", "ssm_state_size", "mamba_head_dim"), 16)
SIZES |= {
    "vocab_size": VOCABULARY, "qk_rope_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_n_groups": 1, "n_groups": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "laurel_rank": 8, "index_n_heads": 2,
    "index_topk": 64, "lru_width": WIDTH, "mamba_expand": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_kv_shared_layers": 1, "use_cache": False, "is_decoder": True, "rotary_dim": 8, "attn_layer_indices": [1, 3],
    "mamba_chunk_size": 8, "chunk_size": 8, "mamba_d_ssm": 128, "num_heads": 8, "image_size": 28,
    "encoder_layers": 1, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH, "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
"""Settings of configurations by name, small."""
RARE = set(SIZES) - {"num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "pad_token_id"}
BY_FAMILY: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}, "attn_config.rope_theta": 1e4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {"shared_experts_intermediate_size": 32}, "dots3_note_text": {"shared_experts_intermediate_size": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 1},
    "mllama": {"cross_attention_layers": []},
    "musicgen": {"num_codebooks": 1}, "musicgen_melody": {"num_codebooks": 1},
    "plbart": {"encoder_attention_heads": HEADS}, "whisper": {"encoder_attention_heads": HEADS, "max_target_positions": 128},
    "qwen4_exp": {"hc_lowrank": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                  "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_shape": [4, 6], "axial_pos_embds_dim": [16, 48], "attn_layers": ["local"] * 4, "feed_forward_size": 128,
                 "attention_head_size": 16, "local_attn_chunk_length": LENGTH},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS, "layer_types": ["mamba", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3],
               "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "adapter_rank": 8, "kv_channels": 16, "num_query_groups": 4},
}  # fmt: skip
"""What a family needs beside; a name with a dot is set on a part of the configuration afterwards."""
BY_FAMILY["qwen4_exp_text"] = BY_FAMILY["qwen4_exp"]


class TooSlow(Exception):
    """A family ran past its limit."""


def families() -> list[str]:
    """Every model type with a causal language model."""
    return sorted(_classes())


def _classes() -> Mapping[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _model_class(family: str) -> Any:
    import transformers

    name = _classes()[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def _defaults(family: str) -> Iterator[Any]:
    """Configurations of a family as they come: the whole one's part for text, and the one that its class names."""
    from transformers import CONFIG_MAPPING

    with contextlib.suppress(Exception):
        default = CONFIG_MAPPING[family]()
        yield default.get_text_config(decoder=True) if hasattr(default, "get_text_config") else default
    with contextlib.suppress(Exception):
        yield _model_class(family).config_class()


def _small(default: Any, left: tuple[str, ...], more: Mapping[str, Any]) -> Any:
    """A configuration of the same class with the sizes that it names made small, its parts' too."""
    values = default.to_dict() | {name: getattr(default, name) for name in default.attribute_map}
    named = {name: value for name, value in SIZES.items() if name in values}
    if values.get("num_key_value_heads", 0) == values.get("num_attention_heads", 0):
        named.pop("num_key_value_heads", None)  # as many as there are heads
        named |= {"num_key_value_heads": HEADS} if "num_key_value_heads" in values else {}
    named = {name: value for name, value in named.items() if name not in left}
    for name, part in vars(default).items():
        if hasattr(part, "to_dict") and name not in more:
            named[name] = _small(part, left, {}).to_dict()
    config = type(default)(**named | {name: value for name, value in more.items() if "." not in name})
    for name, value in more.items():
        part, _, setting = name.rpartition(".")
        if part:
            setattr(getattr(config, part), setting, value)
    return config


def small_configs(family: str) -> Iterator[Any]:
    """A family's configuration with its sizes made small, then with some of them left as they are."""
    for default in _defaults(family):
        named = set(SIZES) & set(default.to_dict())
        for left in (
            (),
            ("head_dim",),
            ("qk_rope_head_dim", "head_dim"),
            ("num_key_value_heads",),
            ("num_kv_shared_layers",),
            tuple(RARE & named),
        ):
            with contextlib.suppress(Exception):  # whatever a combination of sizes raises, the next is tried
                yield _small(default, left, BY_FAMILY.get(family, {}))


def runnable(family: str, ids: Tensor) -> tuple[Any, nn.Module]:
    """The first of a family's small configurations that is built and runs, and its module with eager attention."""
    reason: Exception | None = None
    for config in small_configs(family):
        try:
            module = built(family, config, "eager")
            module(ids)
            return config, module
        except TooSlow:
            raise
        except Exception as error:
            reason = reason or error
    raise reason or WorkbenchError("no configuration can be made small")


def built(family: str, config: Any, implementation: str) -> nn.Module:
    """The module on random weights, large enough for attention to be far from uniform."""
    from transformers import AutoModelForCausalLM

    def make() -> nn.Module:
        given = copy.deepcopy(config)
        if isinstance(given, _model_class(family).config_class):
            return _model_class(family)._from_config(given, attn_implementation=implementation)
        return AutoModelForCausalLM.from_config(given, attn_implementation=implementation)

    with torch.device("meta"):
        size = sum(p.numel() for p in make().parameters())
    if size > MOST_PARAMETERS:
        raise WorkbenchError(f"{size:,} parameters: its sizes have other names")
    torch.manual_seed(0)
    module = make().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "sink" in name:
                p.copy_(torch.randn(p.shape, generator=generator))
            elif ATTENTION.search(name) and p.ndim == 2:
                p.mul_(4)
    return module
