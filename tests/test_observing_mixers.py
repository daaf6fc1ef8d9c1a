"""Blocks whose mixer is no attention: everything of the stream works on them, nothing of attention is claimed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from observed import see
from strangers import GPT, D, FusedAttention, large
from torch import nn

import workbench
from workbench.errors import NotMeasured, UnknownName, WorkbenchError


class Scan(nn.Module):
    """A running sum with decay, in place of attention."""

    def __init__(self, layer):
        super().__init__()
        self.into, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, memory):
        state, states = 0, []
        for step in self.into(x).unbind(1):
            state = 0.8 * state + step
            states.append(state)
        return self.out(torch.stack(states, 1))


def hybrid(layer):
    return FusedAttention(layer) if layer == 1 else Scan(layer)


@torch.no_grad()
def test_a_decoder_without_attention_shows_its_stream_and_what_is_added_to_it(ids):
    module = large(GPT(attention=Scan))
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids)
    assert torch.equal(logits, module(ids)[0])
    x = module.transformer.wte(ids) + module.transformer.wpe(torch.arange(ids.shape[1]))
    for i, block in enumerate(module.transformer.h):
        mixed = block.attn(block.ln_1(x), {})
        read = {"hook_resid_pre": x, "hook_attn_out": mixed, "hook_mlp_out": block.mlp(block.ln_2(x + mixed))}
        for name, true in read.items():
            assert torch.equal(cache[f"blocks.{i}.{name}"], true), (i, name)
        x = block(x, {})
    assert (observed.config.n_heads, observed.architecture, len(observed.value_paths())) == (0, "unknown", 0)
    with pytest.raises(UnknownName):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_values")
    with pytest.raises(WorkbenchError, match="no attention that can be read"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_v")


def test_measures_of_the_stream_work_on_mixers_and_the_xray_says_what_is_missing(ids):
    observed, ids = see(large(GPT(attention=Scan)), ids), ids.view(4, 20)
    with pytest.warns(NotMeasured, match=r"importance_entropy has no numbers: .*no attention that can be read"):
        frame = workbench.measure(observed, ["loss", "hidden_peak", "sublayer_removal", "importance_entropy"], ids)
    with pytest.raises(WorkbenchError, match=r"row_entropy has no numbers: .*no attention that can be read"):
        workbench.measure(observed, "row_entropy", ids)
    assert set(frame["metric"]) == {"loss", "hidden_peak", "sublayer_removal"}
    assert set(frame[frame.metric == "sublayer_removal"]["layer"]) == {0, 1, 2}
    answers = workbench.xray(observed, ids).answers
    assert all("no attention" in answer.sentence for answer in answers[:3])


@torch.no_grad()
def test_a_mixer_among_attentions_adds_to_the_stream_under_the_same_name(ids):
    module = large(GPT(attention=hybrid))
    observed = see(module, ids)
    _, cache = observed.run_with_cache(ids)
    block = module.transformer.h[2]
    true = block.attn(block.ln_1(cache["blocks.2.hook_resid_pre"]), {})
    assert torch.equal(cache["blocks.2.hook_attn_out"], true)
    assert "blocks.2.attn.hook_v" not in observed.hook_dict
    with observed.hooks([("blocks.0.hook_attn_out", lambda out, hook: torch.zeros_like(out))]):
        changed = observed(ids)
    with torch.no_grad():
        module.transformer.h[0].attn.out.weight.zero_()
        module.transformer.h[0].attn.out.bias.zero_()
    torch.testing.assert_close(changed, F.linear(*_end(module, ids)), atol=1e-5, rtol=1e-5)


def _end(module, ids):
    x = module.transformer.wte(ids) + module.transformer.wpe(torch.arange(ids.shape[1]))
    for block in module.transformer.h:
        x = block(x, {})
    return module.transformer.ln_f(x), module.lm_head.weight
