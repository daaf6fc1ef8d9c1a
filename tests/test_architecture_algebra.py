"""Identities between architectures: one is another one's special case, or the same function in other parameters."""

from __future__ import annotations

import math

import equations
import pytest
import torch
from inputs import WIDE, tokens


def test_svformer_is_resformer_1_0(tiny):
    resformer, svformer = tiny("resformer", dtype=WIDE, lambda_v1=1, lambda_own=0), tiny("svformer", dtype=WIDE)
    ids = tokens(svformer, 8)
    torch.testing.assert_close(resformer(ids), svformer(ids), atol=0, rtol=0)


def test_resformer_halves_are_ones_with_half_the_output_projection(tiny):
    """(c l1, c l2, W_O / c) is the same function."""
    half, ones = tiny("resformer", dtype=WIDE), tiny("resformer", dtype=WIDE, lambda_v1=1, lambda_own=1)
    with torch.no_grad():
        for block in ones.blocks[1:]:
            block.attn.o_proj.weight.mul_(0.5)
    ids = tokens(half, 8)
    torch.testing.assert_close(half(ids), ones(ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("source", "weight"), [("previous", 1), ("first", 0.3), ("all", 1), ("all", 2.5), (1, 4)])
def test_cross_layer_attention_with_its_own_keys_is_the_same_key_mean(tiny, source, weight, kv_heads):
    """softmax(Q [K_n; K_n]) [V_n; V_m] = A_n (V_n + w V_m) / (1 + w), ln w added to the copy's scores."""
    config = {"n_layers": 4, "n_key_value_heads": kv_heads}
    exact = tiny("cross_layer", dtype=WIDE, config=config, source=source)
    averaged = tiny("same_key", dtype=WIDE, config=config, source=source, same_key_weight=weight)
    ids, seen = tokens(exact, 9), {}

    def keep(k, hook):
        seen["k"] = k

    same_keys = [
        (lambda n: n.endswith("attn.hook_rot_k"), keep),
        (lambda n: ".cross." in n and n.endswith("hook_rot_k"), lambda k, hook: seen["k"]),
        (lambda n: ".cross." in n and n.endswith("hook_attn_scores"), lambda s, hook: s + math.log(weight)),
    ]
    logits = exact.run_with_hooks(ids, fwd_hooks=same_keys)
    torch.testing.assert_close(logits, averaged(ids), atol=1e-12, rtol=0)


def test_learned_forms_start_as_fixed_ones(tiny):
    ids = torch.arange(9)[None]
    for learned, fixed in (
        (tiny("resformer_learnable", dtype=WIDE), tiny("resformer", dtype=WIDE)),
        (tiny("resformer_learnable_plus", dtype=WIDE), tiny("resformer", dtype=WIDE, lambda_v1=3 / 2)),  # L / (L - 1)
    ):
        torch.testing.assert_close(learned(ids), fixed(ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_shares_of_plus_sum_to_its_scale(awake, layers):
    model = awake("resformer_learnable_plus", dtype=WIDE, config={"n_layers": layers})
    shares = model.shortcuts[0].coefficients()["lambda_v1"][1:]
    scale = model.get_parameter("resformer_learnable_plus.scale").item()
    assert len(shares) == layers - 1
    assert sum(shares) == pytest.approx(scale, abs=1e-12)
    assert scale != layers


@pytest.mark.parametrize("dense_source", ["raw", "mixed"])
def test_dense_with_the_first_source_alone_is_learnable(awake, dense_source):
    learnable = awake("resformer_learnable", dtype=WIDE, config={"n_layers": 4})
    dense = awake("resformer_dense", dtype=WIDE, config={"n_layers": 4}, dense_source=dense_source)
    with torch.no_grad():
        for name, p in learnable.named_parameters():
            if not name.startswith("resformer"):
                dense.get_parameter(name).copy_(p)
        for n in range(1, 4):
            row = dense.get_parameter(f"resformer_dense.rows.{n}").zero_()
            row[0] = learnable.get_parameter("resformer_learnable.first")[n - 1]
            row[n] = learnable.get_parameter("resformer_learnable.own")[n - 1]
    ids = tokens(dense, 9)
    torch.testing.assert_close(dense(ids), learnable(ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_forms_of_neutreno_agree(tiny, kv_heads):
    """A V + l (V_1 - V) = (A - l I) V + l V_1; over values mixed half and half 0.2 (V_1 - V') = 0.1 (V_1 - V_own)."""
    config = {"n_key_value_heads": kv_heads}
    for name, pull in (("neutreno", 0.4), ("resformer+neutreno", 0.2)):
        model = tiny(name, dtype=WIDE, config=config)
        _, cache = model.run_with_cache(tokens(model, 7))
        for n in (1, 2):
            v, first = (cache["v", layer].repeat_interleave(4 // kv_heads, dim=2) for layer in (n, 0))
            less = cache["pattern", n] - pull * torch.eye(7, dtype=WIDE)
            z = torch.einsum("bhqk,bkhd->bqhd", less, v) + pull * first
            torch.testing.assert_close(cache["z", n], z, atol=1e-12, rtol=0)
            if name != "neutreno":
                own = cache[f"blocks.{n}.attn.own.hook_v"].repeat_interleave(4 // kv_heads, dim=2)
                z = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", n], v) + 0.1 * (first - own)
                torch.testing.assert_close(cache["z", n], z, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tensor", ["q", "k"])
def test_a_residual_before_the_rotation_is_one_after_it(tiny, tensor):
    model = tiny(f"residual_{tensor}", dtype=WIDE, **{f"lambda_{tensor}1": 0.3, f"lambda_{tensor}_own": 0.8})
    _, cache = model.run_with_cache(tokens(model, 9))
    for n in (1, 2):
        own = cache[f"blocks.{n}.attn.own.hook_{tensor}"].transpose(1, 2)
        turned = equations.rope(own, model.config.rope_theta).transpose(1, 2)
        mixed = 0.3 * cache[f"rot_{tensor}", 0] + 0.8 * turned
        torch.testing.assert_close(cache[f"rot_{tensor}", n], mixed, atol=1e-12, rtol=0)
        assert cache[f"blocks.{n}.attn.hook_{tensor}_mix"].tolist() == pytest.approx([0.3, 0.8])


def test_values_of_svformer_are_of_one_length_in_all_layers(tiny):
    model = tiny("svformer", dtype=WIDE)
    _, cache = model.run_with_cache(tokens(model, 9))
    norms = [cache["v", n].flatten(2).norm(dim=-1) for n in range(3)]
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


def test_one_key_value_head_for_all_is_multi_query_attention(tiny):
    ids = torch.arange(9)[None]
    a, b, c = (
        tiny("mqa", dtype=WIDE),
        tiny("gqa", dtype=WIDE, query_group=4),
        tiny(dtype=WIDE, config={"n_key_value_heads": 1}),
    )
    assert torch.equal(a(ids), b(ids))
    assert torch.equal(a(ids), c(ids))
