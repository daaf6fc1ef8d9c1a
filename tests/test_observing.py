"""Observing foreign decoders: not a bit of their output changes, and what is shown is what they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from observed import LAMBDAS, STRANGERS, logits_of, pattern_of, see, stranger
from strangers import GPT, LAYERS, SharedValues, eagerly, large

import workbench
from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of


@pytest.mark.fast(12)
@pytest.mark.parametrize("name", STRANGERS)
@torch.no_grad()
def test_no_bit_of_the_output_changes_and_what_is_shown_is_what_the_module_computes(name, ids):
    module, plain, state, observed = stranger(name)
    cached, cache = observed.run_with_cache(ids)
    assert torch.equal(plain, observed(ids))
    assert torch.equal(plain, cached)
    assert torch.equal(plain, logits_of(module(ids)))
    assert len(cache) > 30
    if name.startswith(("repeated", "grouped")):  # by hand, by the call, or by an einsum: the same two heads
        assert (observed.config.n_heads, observed.config.n_key_value_heads, observed.config.d_head) == (4, 2, 8)
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    names = [n for n in observed.hook_dict if not n.endswith(("attn_scores", "hook_pattern"))]
    _, cache = observed.run_with_cache(ids, names_filter=names)
    for i in range(LAYERS):
        scores, pattern = pattern_of(cache, i)
        torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_pattern"].double(), pattern, atol=1e-6, rtol=1e-5)
        for statistic in STATISTICS:
            found = cache[f"blocks.{i}.attn.hook_{statistic}"].double()
            wanted = getattr(statistics_of(scores, pattern), statistic)
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5, msg=f"{statistic} of layer {i}")
        if name != "pulled":
            v = (
                cache[f"blocks.{i}.attn.hook_v"]
                .double()
                .repeat_interleave(pattern.shape[1] // cache[f"blocks.{i}.attn.hook_v"].shape[2], dim=2)
            )
            z = torch.einsum("bhij,bjhd->bihd", pattern, v)
            torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_z"].double(), z, atol=2e-6, rtol=1e-5)
        if name != "averaged" and i:
            assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], cache[f"blocks.{i - 1}.hook_resid_post"])
        if name == "averaged" and i == LAYERS - 1:
            continue  # what leaves the last block for the final norm is an average too
        added = cache[f"blocks.{i}.hook_attn_out"] + cache[f"blocks.{i}.hook_mlp_out"]
        stream = cache[f"blocks.{i}.hook_resid_post"] - cache[f"blocks.{i}.hook_resid_pre"]
        torch.testing.assert_close(added, stream, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_what_a_hook_computes_itself_is_no_call_of_the_module(ids):
    """Products and softmaxes inside a caller's hooks must not be taken for the module's attention."""
    observed = see(large(GPT(LAMBDAS, eagerly("torch"))), ids)
    _, clean = observed.run_with_cache(ids)
    kept = {}

    def busy(tensor, hook):
        x = torch.einsum("btd,bsd->bts", tensor, tensor).softmax(-1) @ tensor
        kept[hook.name] = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])

    def keep(tensor, hook):
        kept["v"] = tensor

    with observed.hooks(
        [("blocks.1.hook_resid_pre", busy), ("blocks.1.attn.hook_v", keep), ("blocks.1.hook_attn_out", busy)]
    ):
        observed(ids)
    assert torch.equal(kept["v"], clean["blocks.1.attn.hook_v"])


def test_an_idle_run_is_the_module_and_nothing_else(ids, monkeypatch):
    observed = stranger("fused")[-1]

    def never(*args, **kwargs):
        raise AssertionError("a run is hooked")

    monkeypatch.setattr("workbench.observing.observed_model.HookedRun", never)
    observed(ids)
    with pytest.raises(AssertionError, match="a run is hooked"):
        observed.run_with_cache(ids)


# ---- words ----------------------------------------------------------------------------------------------------------


def test_what_was_found_is_printed_and_what_not(ids, capsys):
    workbench.observe(large(GPT(attention=SharedValues)), ids)
    printed = capsys.readouterr().out
    assert "svformer" in printed
    assert "not found: first_v (layers 0), own_v (layers 1, 2)" in printed
    assert "layer 2 value = 1 first" in printed


def test_sites_say_where_everything_stands(ids):
    sites = stranger("hidden lambdas")[-1].sites.set_index(["site", "layer"])
    assert list(sites.columns) == ["found", "where", "note"]
    assert sites.loc[("own_v", 1), "where"] == "transformer.h.1.attn.c_attn[64:96]"
    assert sites.loc[("z", 2), "where"] == "transformer.h.2.attn.c_proj"
    assert sites.loc[("mlp_out", 0), "where"] == "transformer.h.0.mlp"
    assert sites["found"].sum() == len(sites) - 1  # the first layer mixes nothing
