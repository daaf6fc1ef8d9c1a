"""Weights that stay where they are: in memory or on disk under accelerate, in shards of several processes."""

from __future__ import annotations

import multiprocessing

import accelerate
import pytest
import torch
import transformers
from observed import LAMBDAS, see
from sharded import observe_spread
from strangers import GPT, large
from torch import nn
from transformers.pytorch_utils import Conv1D

import workbench
from workbench.models.decomposition import decompose
from workbench.observing.interception.sharded_weights import matrix_and_bias
from workbench.prompts import logit_attribution, score_attribution


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk"])
@torch.no_grad()
def test_offloaded_weights_give_the_same_bits_and_stay_where_they_are(where, ids, tmp_path):
    plain, module = see(large(GPT(LAMBDAS)), ids), large(GPT(LAMBDAS))
    if where == "memory":
        accelerate.cpu_offload(module, execution_device="cpu")
    else:
        accelerate.disk_offload(module, tmp_path, execution_device="cpu")
    observed = see(module, ids)
    assert (observed.architecture, observed.notes) == (plain.architecture, plain.notes)
    (logits, cache), (true, expected) = (m.run_with_cache(ids) for m in (observed, plain))
    assert torch.equal(logits, true)
    assert all(torch.equal(cache[name], tensor) for name, tensor in expected.items())
    assert observed.value_paths().equals(plain.value_paths())
    one, other = (decompose(m, ids, "logits", "value_path", tokens=5).parts for m in (observed, plain))
    assert torch.equal(one, other)
    frames = [workbench.measure(m, ["row_entropy", "token_identity_share", "loss"], ids) for m in (observed, plain)]
    assert frames[0]["value"].equals(frames[1]["value"])
    one, other = (logit_attribution(m, ids[:1], -1, 5).frame for m in (observed, plain))
    assert one.equals(other)
    one, other = (score_attribution(m, ids[:1], 1, 1, -1, 5, by="head").matrix for m in (observed, plain))
    assert one.equals(other)
    assert all(p.is_meta for p in module.parameters()), "loaded for each run and let go"


@pytest.mark.slow
def test_two_processes_observe_what_is_spread_over_them(tmp_path, forkserver):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, use_cache=False, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    context = multiprocessing.get_context()
    started = [context.Process(target=observe_spread, args=(tmp_path, rank, 2)) for rank in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0]


def test_the_matrix_of_a_module_is_its_weight_or_its_outputs_on_unit_rows():
    rows = torch.randn(5, 3)
    hooked, replaced = nn.Linear(3, 4), nn.Linear(3, 4)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    replaced.forward = lambda x: 3 * x + 1  # as accelerate replaces it
    adapted = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    for module in (nn.Linear(3, 4), nn.Linear(3, 4, bias=False), Conv1D(4, 3), hooked, replaced, adapted):
        matrix, bias = matrix_and_bias(module, rows)
        assert torch.allclose(rows @ matrix + bias, module(rows), atol=1e-6)
