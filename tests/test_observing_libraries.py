"""Wrapped, compiled and Hugging Face modules are observed as they are; long sequences need no square array."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import LargestTensor
from observed import LAMBDAS, pattern_of, see
from strangers import GPT, LAYERS, VOCABULARY, Averaged, D, flash, large
from torch import nn
from torch.overrides import TorchFunctionMode

import workbench
from workbench.errors import WorkbenchError


def test_data_parallel_and_compiled_modules_are_taken_apart(ids, tmp_path):
    plain = large(GPT(LAMBDAS))(ids)[0].detach()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(large(GPT(LAMBDAS)))
        observed = see(parallel, ids)
        assert torch.equal(observed.run_with_cache(ids)[0], plain)
        assert observed.architecture == "resformer"
        assert "DistributedDataParallel" in repr(observed)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("how", ["whole", "in place"])
@torch.no_grad()
def test_compiled_modules_are_heard_and_it_is_said(how, ids):
    module = large(GPT(LAMBDAS))
    plain = module(ids)[0].detach()
    if how == "whole":
        module = torch.compile(module, backend="eager")
    elif how == "in place":
        module.compile(backend="eager")
    else:
        for i, block in enumerate(module.transformer["h"]):
            module.transformer["h"][i] = torch.compile(block, backend="eager")
    module(ids)
    observed = see(module, ids)
    assert torch.equal(observed.run_with_cache(ids)[0], plain)
    assert torch.equal(observed(ids), plain)
    assert observed.architecture == "resformer"
    assert "torch.compile" in repr(observed)


def test_torchscript_is_refused(ids):
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        traced = torch.jit.trace(large(Averaged()), ids, check_trace=False)
    with pytest.raises(WorkbenchError, match="TorchScript"):
        see(traced, ids)


def hugging_face(kind, implementation):
    import transformers

    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": implementation}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=D, n_layer=LAYERS, n_head=4, n_positions=96, **sizes)
        return large(transformers.GPT2LMHeadModel(config))
    config = transformers.LlamaConfig(
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    return large(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize(("kind", "implementation"), [("llama", "sdpa"), ("gpt2", "eager")])
@torch.no_grad()
def test_hugging_face_models_need_no_adapter(kind, implementation, ids):
    module = hugging_face(kind, implementation)
    plain = module(ids).logits
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids)
    assert torch.equal(plain, logits)
    assert torch.equal(plain, observed(ids))
    assert (observed.config.n_layers, observed.config.n_key_value_heads) == (3, 2 if kind == "llama" else 4)
    wanted = (
        "hook_embed",
        "unembed.hook_in",
        "blocks.1.attn.hook_q",
        "blocks.1.attn.own.hook_v",
        "blocks.1.hook_mlp_out",
    )
    assert set(wanted) <= set(cache.keys())
    for i in range(LAYERS):
        _, pattern = pattern_of(cache, i)
        v = cache[f"blocks.{i}.attn.hook_v"].double()
        z = torch.einsum("bhij,bjhd->bihd", pattern, v.repeat_interleave(4 // v.shape[2], dim=2))
        torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_z"].double(), z, atol=2e-6, rtol=1e-5)
    if kind == "llama":
        layer = module.model.layers[1].self_attn
        own = layer.v_proj(module.model.layers[1].input_layernorm(cache["blocks.1.hook_resid_pre"]))
        assert torch.equal(cache["blocks.1.attn.hook_v"].flatten(2), own)
        hidden = module(ids, output_hidden_states=True).hidden_states
        assert torch.equal(cache["blocks.1.hook_resid_post"], hidden[2])
    frame = workbench.measure(observed, ["importance_entropy", "value_norm", "loss"], ids)
    assert set(frame["metric"]) == {"importance_entropy", "value_norm", "loss"}


@torch.no_grad()
def test_functions_of_the_attention_interface_are_heard(ids):
    from transformers import AttentionInterface

    def mine(module, query, key, value, attention_mask, scaling=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        out = flash(query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("strangers_kernel", mine)
    try:
        module = hugging_face("llama", "strangers_kernel")
        observed = see(module, ids)
        logits, cache = observed.run_with_cache(ids)
        assert torch.equal(logits, module(ids).logits)
        usual = see(hugging_face("llama", "sdpa"), ids).run_with_cache(ids)[1]
        for name in ("hook_v", "hook_rot_k", "hook_z", "hook_row_entropy", "hook_pattern"):
            torch.testing.assert_close(
                cache[f"blocks.1.attn.{name}"], usual[f"blocks.1.attn.{name}"], atol=1e-5, rtol=1e-5
            )
        with observed.hooks([("blocks.1.attn.hook_v", lambda x, hook: x * 0)]):
            assert not torch.equal(observed(ids), logits)
        assert AttentionInterface()["strangers_kernel"] is mine
    finally:
        del AttentionInterface._global_mapping["strangers_kernel"]


@pytest.mark.slow
@torch.no_grad()
def test_long_sequences_need_no_square_array(ids):
    observed = see(hugging_face("llama", "sdpa"), ids)
    T = 1536
    long = torch.randint(VOCABULARY, (1, T), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        frame = workbench.measure(observed, ["importance_entropy", "row_entropy", "sink_mass", "value_norm"], long)
    assert largest.numel < T * T / 2
    assert frame["T"].eq(T).all()


class Seen(TorchFunctionMode):
    """Whatever a caller's own mode sees must go on."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_mode_of_the_caller_goes_on(ids):
    module = large(GPT())
    observed = see(module, ids)
    with Seen() as mine:
        logits, _ = observed.run_with_cache(ids)
    assert mine.calls > 10
    assert torch.equal(logits, module(ids)[0])
