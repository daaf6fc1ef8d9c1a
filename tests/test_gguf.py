"""GGUF files, written by llama.cpp's own writer: logits of the model they were made from, and refusals with the cure."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import workbench
from workbench.errors import BadCheckpoint
from workbench.runs.checkpoint_import import import_run

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim > 1 else 1)
    return model


def write(path, model, *, architecture="llama", quantised=None, without=""):
    """Write a Llama as llama.cpp's converter does: rows of queries and keys for rotation of neighbouring columns."""
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_vocab_size(c.vocab_size)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy().astype(np.float32)
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            halves = data.reshape(heads, 2, -1, data.shape[1])
            data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if quantised is not None and "ffn" in name and data.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(data, quantised), raw_dtype=quantised)
        elif not without or without not in name:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("default")  # transformers' and NumPy's own
@pytest.mark.filterwarnings("error::workbench.errors.ArchitectureAssumed")
@pytest.mark.parametrize("quantised", [None, "Q8_0", "Q4_0"])
def test_logits_equal_those_of_the_dequantised_weights(tmp_path, llama, quantised):
    kind = quantised and getattr(gguf.GGMLQuantizationType, quantised)
    write(tmp_path / "tiny.gguf", llama, quantised=kind)
    reference = copy.deepcopy(llama)
    if kind is not None:
        for name, parameter in reference.named_parameters():
            if "mlp" in name:
                weights = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
                parameter.data = torch.from_numpy(weights)
    model = workbench.load(tmp_path / "tiny.gguf")
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=1e-5, rtol=0)
    assert model.source["format"] == "GGUF"
    assert model.foreign is None
    assert model.tokenizer is None
    run = import_run(tmp_path / "tiny.gguf", tmp_path / "runs", name="mine")
    assert torch.equal(run.load()(IDS), model(IDS))


@pytest.mark.filterwarnings("default")
def test_what_transformers_cannot_read_is_refused_with_a_command(tmp_path, llama):
    write(tmp_path / "other.gguf", llama, architecture="mpt")
    with pytest.raises(BadCheckpoint, match=r"cannot read \(.*mpt.*llama-quantize"):
        workbench.load(tmp_path / "other.gguf")
    write(tmp_path / "lost.gguf", llama, without="blk.1.attn_q")
    with pytest.raises(BadCheckpoint, match=r"without model.layers.1.self_attn.q_proj.weight"):
        workbench.load(tmp_path / "lost.gguf")
    whole = (tmp_path / "lost.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadCheckpoint, match="GGUF file") as refusal:
        workbench.load(tmp_path / "cut.gguf")
    assert "\n" not in str(refusal.value)
