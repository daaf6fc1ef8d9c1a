"""Identities between architectures: one is another one's special case, or the same function in other parameters."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import WIDE, tokens


def test_svformer_is_resformer_1_0(tiny):
    resformer, svformer = tiny("resformer", dtype=WIDE, lambda_v1=1, lambda_own=0), tiny("svformer", dtype=WIDE)
    ids = tokens(svformer, 8)
    torch.testing.assert_close(resformer(ids), svformer(ids), atol=0, rtol=0)


@pytest.mark.fast(5)
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


def equal_with(tiny, one, other, change=lambda model: None):
    """Assert that two models of one seed, (name, options) each, have the same logits once the first is changed."""
    first, second = (
        tiny(name, dtype=WIDE, config={"n_key_value_heads": 2}, **options) for name, options in (one, other)
    )
    with torch.no_grad():
        change(first)
    ids = tokens(second, 9)
    torch.testing.assert_close(first(ids), second(ids), atol=1e-12, rtol=0)


def zeroed(prefix, value=0.0):
    """Fill what a shortcut has learned with one number."""
    return lambda model: [p.fill_(value) for name, p in model.named_parameters() if name.startswith(prefix)]


@pytest.mark.parametrize(
    ("gate", "alpha"), [("softmax", 1), ("sigmoid", 0.5), ("softmax_sigmoid", 0.5), ("relu", 0), ("tanh", 0)]
)
def test_a_satformer_whose_gates_read_nothing_is_a_resformer(tiny, gate, alpha):
    resformer = ("resformer", {"lambda_v1": alpha, "lambda_own": 1})
    equal_with(tiny, ("satformer", {"gate_form": gate}), resformer, zeroed("satformer."))


def test_shared_heads_gates_and_banks_meet_their_neighbours(tiny):
    equal_with(tiny, ("skip_v1", {"skip_heads": 2}), ("svformer", {}))
    bank = {"bank": "first", "bank_layers": [1, 2]}
    equal_with(tiny, ("bank_of_values", bank | {"bank_gain": False}), ("svformer", {}))
    equal_with(tiny, ("bank_of_values", bank), ("svformer", {}))
    equal_with(tiny, ("sink_logit", {}), ("transformer", {}), zeroed("sink_logit.", -1e4))
    equal_with(tiny, ("sink_logit", {}), ("sink_logit", {"logit": "zero"}), zeroed("sink_logit."))
    equal_with(tiny, ("value_scale", {}), ("transformer", {}), zeroed("value_scale.", -1e3))


@pytest.mark.parametrize("gate_from", ["value", "input"])
@pytest.mark.parametrize("name", ["value_gate", "value_gate_query"])
def test_value_gates_that_read_nothing_halve_the_output(tiny, name, gate_from):
    def change(model):
        zeroed(f"{name}.")(model)
        for block in model.blocks:
            block.attn.o_proj.weight.mul_(2)

    equal_with(tiny, (name, {"gate_from": gate_from}), ("transformer", {}), change)


def test_slopes_of_scaled_and_gated_values_are_the_published_ones(awake):
    """r / (r + C) across the value and (r^2 + 3 C r) / (r + C)^2 along it; g I + g (1 - g) v w^T."""
    model = awake("value_scale", dtype=WIDE, scale_start=40.0, config={"n_heads": 1})
    scale, v = model.shortcuts[0], torch.linspace(-1, 2, 32, dtype=WIDE)
    r, C = v.square().sum(), scale.start * scale.thetas[1].exp()
    slope = torch.func.jacrev(lambda v: scale.own_value(1, v.view(1, 1, 1, -1), v, 0).flatten())(v)
    values = torch.linalg.eigvalsh((slope + slope.T) / 2)
    torch.testing.assert_close(values[:-1], (r / (r + C)).expand(31))
    torch.testing.assert_close(values[-1:], (r**2 + 3 * C * r) / (r + C) ** 2)
    gate = awake("value_gate", dtype=WIDE, config={"n_heads": 1}).shortcuts[0]
    w, g = gate.gates[1][0], torch.sigmoid(gate.gates[1][0] @ v)
    slope = torch.func.jacrev(lambda v: gate.own_value(1, v.view(1, 1, 1, -1), v, 0).flatten())(v)
    torch.testing.assert_close(slope, g * torch.eye(32, dtype=WIDE) + g * (1 - g) * torch.outer(v, w))


def test_tables_and_gates_of_nanochat_start_as_published(tiny):
    model = tiny("gated_value_embedding", std=0.02, config={"d_vocab": 4096, "n_heads": 32, "d_model": 64})
    table, gate = (getattr(model.gated_value_embedding, name)["2"].detach() for name in ("tables", "gates"))
    assert table.std().item() == pytest.approx(64**-0.5, rel=0.01)
    assert gate.shape == (32, 12)
    assert 0 < gate.min() < 0.001 < 0.019 < gate.max() < 0.02
    assert gate.mean().item() == pytest.approx(0.01, rel=0.1)
