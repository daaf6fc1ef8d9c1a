"""Each architecture equals its equations, written a second time in `equations.py`, in values and gradients."""

from __future__ import annotations

import math

import equations
import pytest
import torch
from inputs import SMALL, WIDE, tokens

from workbench.models import ARCHITECTURES, build
from workbench.models.architectures.resformer_learnable import PlusResFormer
from workbench.models.registry import architecture, options_of

DEEP = {"n_layers": 8}

CASES = [
    ("transformer", {}, {}),
    ("resformer", {}, {}),
    ("resformer", {"lambda_v1": 2, "lambda_own": 0.7}, {}),
    ("resformer", {"lambda_v1": -0.3, "layers": [1, 3]}, {}),
    ("resformer", {"source_layer": 1, "lambda_own": 0.9}, {}),
    ("resformer", {"source_layer": 2, "layers": [3], "lambda_v1": 1.5}, {}),
    ("resformer", {"detach_source": True}, {}),
    ("resformer_constant", {}, {}),
    ("resformer_constant", {"lambda_own": 0.25}, {}),
    ("resformer_sparse", {}, {}),
    ("resformer_sparse", {}, DEEP),
    ("resformer_sparse", {"layers": [1], "lambda_own": 0.5}, {}),
    ("resformer_learnable", {}, {}),
    ("resformer_learnable", {"lambda_v1": 1.5, "lambda_own": -0.2}, {}),
    ("resformer_learnable_plus", {}, {}),
    ("resformer_learnable_plus", {"plus_logit_init": "ramp:0.4", "plus_scale_init": 2.5, "lambda_own": 0.8}, {}),
    ("resformer_learnable_plus", {"plus_logit_init": "randn:0.5"}, {}),
    ("resformer_dense", {}, {}),
    ("resformer_dense", {"lambda_source": 0.3, "lambda_own": 0.6, "dense_source": "mixed"}, {}),
    ("svformer", {}, {}),
    ("svformer", {"anchors": [0, 2]}, {}),
    ("svformer", {"anchors": [0, 1, 3]}, {}),
    ("svformer", {"refresh_every": 3}, {"n_layers": 5}),
    ("neutreno", {}, {}),
    ("neutreno", {"neutreno_lambda": 0.9}, {}),
    *(("denseformer", {"dilation": d, "period": p}, {}) for d, p in ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2))),
    ("denseformer", {"dilation": 4, "period": 5}, DEEP),
    ("attention_residuals", {}, {}),
    ("attention_residuals", {"depth_heads": 4}, {}),
    ("attention_residuals", {"depth_blocks": 3, "depth_heads": 2}, {}),
    ("attention_residuals", {"depth_blocks": 1}, {}),
    ("attention_residuals", {"depth_form": "delta"}, {}),
    ("hyper_connections", {}, {}),
    ("hyper_connections", {"dynamic": False, "streams": 3}, {}),
    ("mhc", {}, {"n_layers": 2}),
    ("mhc", {"mixing": "permutations", "streams": 3}, {"n_layers": 2}),
    ("mhc+svformer+post_norm", {"streams": 2}, {"n_layers": 2}),
    ("gqa", {}, {}),
    ("gqa", {"query_group": 4}, {}),
    ("mqa", {}, {}),
    ("cla", {}, {}),
    ("cla", {"group": 3}, {}),
    ("cla", {"group": 3}, {"n_layers": 5}),
    ("cla", {"group": "all"}, {}),
    ("cla", {"share": "v", "group": 4}, {"n_layers": 6}),
    ("share_q", {}, {}),
    ("share_q", {"group": "all"}, {}),
    ("share_k", {}, {}),
    ("share_k", {"group": 3}, {}),
    ("share_v", {}, {}),
    ("share_v", {"group": "all"}, {}),
    ("cross_layer", {}, {}),
    ("cross_layer", {"source": "first"}, {}),
    ("cross_layer", {"source": 1}, {}),
    ("cross_layer", {"source": "all"}, {}),
    ("cross_layer_all", {}, {"n_layers": 3}),
    ("same_key", {}, {}),
    ("same_key", {"source": "previous", "same_key_weight": 0.4}, {}),
    ("same_key", {"source": 1, "same_key_weight": 3}, {}),
    ("same_key", {"source": "first"}, {}),
    ("identity_map", {}, {}),
    ("identity_map", {"identity_source": "previous", "identity_scale": 0.6}, {}),
    ("identity_map", {"identity_source": "first", "identity_scale": -0.5}, {}),
    ("identity_map", {"identity_source": 2}, {}),
    ("residual_q", {}, {}),
    ("residual_q", {"lambda_q1": 0.3, "lambda_q_own": 0.8}, {}),
    ("residual_k", {}, {}),
    ("residual_k", {"lambda_k1": 0.3, "lambda_k_own": 0.8}, {}),
    *(
        ("residual_attention", {"attn_mix": mix, "lambda_a1": a, "lambda_a_own": b}, {})
        for mix in ("prob", "logit")
        for a, b in ((0.5, 0.5), (0.3, 0.9))
    ),
    ("residual_hidden", {}, {}),
    ("residual_hidden", {"lambda_h1": 0.3, "lambda_h_own": 0.7}, {}),
    ("value_embedding", {}, {}),
    ("value_embedding", {}, {"n_layers": 7}),
    ("value_embedding", {"value_tables": 1, "lambda_table": 0.2, "lambda_own": 0.9}, {}),
    ("bank_of_values", {}, {}),
    ("bank_of_values", {}, {"n_layers": 7}),
    ("bank_of_values", {"bank_layers": [0, 2]}, {}),
    ("sandwich_norm", {}, {}),
    ("sandwich_norm", {"norms": "pre"}, {}),
    ("post_norm", {}, {}),
    ("dyt", {}, {}),
    ("sandwich_norm+attention_residuals", {}, {}),
    ("post_norm+resformer+gated_attention", {}, {}),
    ("post_norm+share_q", {}, {}),
    ("post_norm+residual_k+denseformer", {}, {}),
    ("dyt+svformer+gated_attention", {}, {}),
    ("gated_attention", {}, {}),
    ("exclusive_attention", {}, {}),
    ("exclusive_attention", {"gated": True}, {}),
    *(("cut_skip", {"cut": cut}, {}) for cut in ("attn", "mlp", "both")),
    ("held_start", {}, {}),
    ("held_start+resformer", {"start_norm": 1.5}, {}),
    ("held_start", {"others_norm": 0.5}, {"n_key_value_heads": 2}),
    ("held_start", {"start_norm": "free", "others_norm": 2.0}, {}),
    # combinations
    ("resformer+neutreno", {}, {}),
    ("resformer+neutreno", {"neutreno_lambda": 0.7, "source_layer": 1}, {}),
    ("resformer+denseformer", {"lambda_v1": 0.2}, {}),
    ("resformer_learnable+denseformer", {"dilation": 2}, {}),
    ("svformer+gqa", {}, {}),
    ("svformer+gqa", {"query_group": 2, "anchors": [0, 2]}, {}),
    ("svformer+mqa", {}, {}),
    ("svformer+cla", {}, {}),
    ("svformer+cla", {"group": 3, "refresh_every": 2}, {"n_layers": 5}),
    ("svformer+denseformer", {"dilation": 2}, {}),
    ("svformer+neutreno", {"anchors": [0, 2]}, {}),
    ("svformer+residual_k", {}, {}),
    ("svformer+cross_layer", {}, {}),
    ("svformer+attention_residuals", {"depth_blocks": 2}, {}),
    ("neutreno+attention_residuals", {}, {}),
    ("resformer+gqa", {"lambda_v1": 1.2}, {}),
    ("resformer_dense+mqa", {}, {}),
    ("resformer+cla", {"lambda_v1": 2, "lambda_own": 0.4}, {}),
    ("resformer+cla", {"group": 3}, {"n_layers": 7}),
    ("resformer+share_k", {}, {}),
    ("resformer+residual_k", {"lambda_own": 1.5}, {}),
    ("resformer+residual_q+residual_k", {}, {}),
    ("resformer+cut_skip", {"source_layer": 1}, {}),
    ("resformer+cross_layer", {"source": "first"}, {}),
    ("resformer+identity_map", {}, {}),
    ("resformer+residual_attention", {"attn_mix": "logit"}, {}),
    ("resformer+bank_of_values", {"bank_layers": [2]}, {}),
    ("resformer_sparse+bank_of_values", {"bank_layers": [0]}, {}),
    ("resformer", {"layers": "last_third"}, {"n_layers": 6}),
    ("svformer", {"shared_layers": "last_third"}, {"n_layers": 6}),
    ("svformer", {"shared_layers": [2]}, {}),
    ("bank_of_values", {"bank_gain": False}, {}),
    ("bank_of_values", {"bank": "first", "bank_layers": [1, 3]}, {}),
    ("gated_value_embedding", {}, {}),
    ("gated_value_embedding", {"gate_scale": 0.7, "gate_channels": 5, "table_layers": "last_third"}, {"n_layers": 3}),
    *(("satformer", {"gate_form": gate}, {}) for gate in equations.GATES if gate != "relu"),
    ("satformer", {}, {}),
    ("satformer", {"layers": [2]}, {}),
    ("skip_v1", {}, {}),
    ("skip_v1", {"skip_heads": 1}, {}),
    ("value_scale", {}, {}),
    ("value_scale", {"scale_start": 30}, {}),
    ("value_gate", {}, {}),
    ("value_gate", {"gate_from": "input"}, {}),
    ("value_gate_query", {}, {}),
    ("value_gate_query", {"gate_from": "input"}, {}),
    ("sink_logit", {}, {}),
    ("sink_logit", {"logit": "zero"}, {}),
    ("sink_logit+resformer+exclusive_attention", {}, {}),
    ("satformer+value_scale+value_gate+held_start", {"start_norm": 0.5}, {}),
    ("value_gate_query+exclusive_attention+gated_attention+svformer", {}, {}),
    ("resformer+value_scale", {"layers": [1, 3]}, {}),
    ("value_gate+gqa", {}, {}),
    ("skip_v1+value_gate_query+sink_logit", {}, {}),
    ("skip_v1+neutreno", {}, {}),
    ("skip_v1+mqa", {}, {}),
    ("satformer+bank_of_values", {"bank_layers": [0], "bank_gain": False}, {}),
    ("gated_attention+resformer", {}, {}),
    ("gated_attention+exclusive_attention+gqa", {}, {}),
    ("exclusive_attention+svformer", {}, {}),
    ("neutreno+exclusive_attention", {"gated": True}, {}),
    ("gated_attention+neutreno", {}, {}),
    ("neutreno+gated_attention+identity_map", {}, {}),
    ("neutreno+cla", {}, {}),
    ("neutreno+gqa", {}, {}),
    ("neutreno+value_embedding", {}, {}),
    ("identity_map+cla", {}, {}),
    ("identity_map+svformer", {"anchors": [0, 2]}, {}),
    ("identity_map+value_embedding", {}, {}),
    ("denseformer+cross_layer", {}, {}),
    ("denseformer+cross_layer_all+gqa", {"period": 2}, {}),
    ("denseformer+resformer+neutreno", {}, {}),  # the published pair's 0.2, in any order
    ("same_key+cla", {}, {}),
    ("cross_layer+cla", {}, {}),
    ("cross_layer+value_embedding", {}, {}),
    ("residual_attention+share_q", {}, {}),
    ("residual_attention+residual_k+gqa", {}, {}),
    ("residual_hidden+cut_skip+value_embedding", {}, {}),
]
WRITTEN = list(filter(equations.written, ARCHITECTURES))
GROUPED = ("gqa", "mqa")


def test_each_written_architecture_and_option_is_compared():
    """Options that only set where training starts, or how it decays, show in no formula."""
    silent = {"decay_lambda", "decay_alpha"}
    for name in WRITTEN:
        alone = [options for case, options, _ in CASES if case == name]
        assert {} in alone or name in ("denseformer", "residual_attention", "cut_skip", "resformer+denseformer"), name
    tried = {}
    for name, options, _ in CASES:
        for shortcut in architecture(name).shortcuts:
            tried.setdefault(shortcut, set()).update(options)
    for shortcut in {s for name in WRITTEN for s in ARCHITECTURES[name].shortcuts}:
        assert options_of(shortcut).keys() - silent <= tried[shortcut], shortcut


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("architecture", "options", "config"), CASES)
def test_equals_the_published_equations_in_values_and_gradients(awake, architecture, options, config, kv_heads):
    grouped = {"n_key_value_heads": kv_heads}
    if set(architecture.split("+")) & set(GROUPED):
        grouped, kv_heads = {}, 4  # query_group says how many key-value heads there are
    model = awake(architecture, dtype=WIDE, config={"n_layers": 4, **config, **grouped}, **options)
    ids, weights = tokens(model, 9), dict(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(2, 9, model.config.d_vocab, generator=generator, dtype=WIDE)
    logits = model(ids)
    true = equations.logits(architecture, weights, model.config.replace(n_key_value_heads=kv_heads), ids, options)
    assert logits.dtype == WIDE
    assert (logits - true).abs().max() < 1e-11 * max(1, true.abs().max())
    gradients = [torch.autograd.grad((x * out).sum(), list(weights.values())) for x in (logits, true)]
    for name, ours, naive in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(ours, naive, atol=1e-10 * max(1.0, naive.abs().max().item()), rtol=0, msg=name)


def test_a_detached_source_learns_nothing_from_later_layers(tiny):
    for detach in (True, False):
        model = tiny("resformer", detach_source=detach)
        with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: z.detach())]):
            model(tokens(model, 8), return_type="loss").backward()
        grad = model.blocks[0].attn.v_proj.weight.grad
        assert (grad is None or not grad.any()) == detach


def test_the_first_coefficients_are_those_asked_for():
    def start(name, **options):
        return {k: v[1:] for k, v in build(name, SMALL, **options).shortcuts[0].coefficients().items()}

    assert start("resformer_learnable") == {"lambda_v1": [0.5] * 3, "lambda_own": [0.5] * 3}
    plus = start("resformer_learnable_plus")
    assert plus["lambda_own"] == [0.5] * 3
    assert plus["lambda_v1"] == pytest.approx([4 / 3] * 3)
    ramp = start("resformer_learnable_plus", plus_logit_init="ramp:1", plus_scale_init=2)["lambda_v1"]
    assert ramp == pytest.approx([2 * math.exp(n) / (1 + math.e + math.e**2) for n in range(3)])
    wide = SMALL.replace(n_layers=2001, init_std=0.05)
    drawn = PlusResFormer(wide, plus_logit_init="randn:0.1")
    with torch.no_grad():
        drawn.initialise(lambda name, x: x.normal_(0, 0.05, generator=torch.Generator().manual_seed(0)))
    assert drawn.logits.std().item() == pytest.approx(0.1, rel=0.1)
    logits = [build("resformer_learnable_plus", SMALL, seed=s, plus_logit_init="randn:0.1") for s in (0, 0, 1)]
    zero, again, one = (model.get_parameter("resformer_learnable_plus.logits") for model in logits)
    assert torch.equal(zero, again)
    assert not torch.equal(zero, one)
    dense = build("resformer_dense", SMALL, lambda_source=0.2)
    assert dense.get_parameter("resformer_dense.rows.2").tolist() == pytest.approx([0.2, 0.2, 1.0])
