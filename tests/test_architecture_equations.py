"""Each architecture equals its equations, written a second time in `equations.py`, in values and gradients."""

from __future__ import annotations

import math

import equations
import pytest
import torch
from inputs import SMALL, WIDE, tokens

from workbench.models import ARCHITECTURES, build
from workbench.models.architecture_names_and_colours import architecture, options_of
from workbench.models.architectures.resformer_learnable import PlusResFormer

VARIANTS: dict[str, list] = {  # options of each, beside them the shape where it matters
    "transformer": [{}],
    "resformer": [{}, {"lambda_v1": 2, "lambda_own": 0.7}, {"lambda_v1": -0.3, "layers": [1, 3]},
        {"source_layer": 1, "lambda_own": 0.9}, {"source_layer": 2, "layers": [3], "lambda_v1": 1.5}, {"detach_source": True},
        ({"layers": "last_third"}, {"n_layers": 6})],
    "resformer_constant": [{}, {"lambda_own": 0.25}],
    "resformer_sparse": [{}, ({}, {"n_layers": 8}), {"layers": [1], "lambda_own": 0.5}],
    "resformer_learnable": [{}, {"lambda_v1": 1.5, "lambda_own": -0.2}],
    "resformer_learnable_plus": [{}, {"plus_logit_init": "ramp:0.4", "plus_scale_init": 2.5, "lambda_own": 0.8},
        {"plus_logit_init": "randn:0.5"}],
    "resformer_dense": [{}, {"lambda_source": 0.3, "lambda_own": 0.6, "dense_source": "mixed"}],
    "svformer": [{}, {"anchors": [0, 2]}, {"anchors": [0, 1, 3]}, ({"refresh_every": 3}, {"n_layers": 5}),
        ({"shared_layers": "last_third"}, {"n_layers": 6}), {"shared_layers": [2]}],
    "neutreno": [{}, {"neutreno_lambda": 0.9}],
    "denseformer": [{"dilation": 1, "period": 2},
        {"dilation": 3, "period": 2}],
    "attention_residuals": [{}, {"depth_heads": 4}, {"depth_blocks": 3, "depth_heads": 2}, {"depth_blocks": 1},
        {"depth_form": "delta"}],
    "hyper_connections": [{}, {"dynamic": False, "streams": 3}],
    "mhc": [({}, {"n_layers": 2}), ({"mixing": "permutations", "streams": 3}, {"n_layers": 2})],
    "mhc+svformer+post_norm": [({"streams": 2}, {"n_layers": 2})],
    "gqa": [{}, {"query_group": 4}],
    "mqa": [{}],
    "cla": [{}, {"group": 3}, ({"group": 3}, {"n_layers": 5}), {"group": "all"}, ({"share": "v", "group": 4}, {"n_layers": 6})],
    "share_q": [{}, {"group": "all"}],
    "share_k": [{}, {"group": 3}],
    "share_v": [{}, {"group": "all"}],
    "cross_layer": [{}, {"source": "first"}, {"source": 1}, {"source": "all"}],
    "cross_layer_all": [({}, {"n_layers": 3})],
    "same_key": [{}, {"source": "previous", "same_key_weight": 0.4}, {"source": 1, "same_key_weight": 3}, {"source": "first"}],
    "identity_map": [{}, {"identity_source": "previous", "identity_scale": 0.6},
        {"identity_source": "first", "identity_scale": -0.5}, {"identity_source": 2}],
    "residual_q": [{}, {"lambda_q1": 0.3, "lambda_q_own": 0.8}],
    "residual_k": [{}, {"lambda_k1": 0.3, "lambda_k_own": 0.8}],
    "residual_attention": [{"attn_mix": "prob", "lambda_a1": 0.5, "lambda_a_own": 0.5},
        {"attn_mix": "prob", "lambda_a1": 0.3, "lambda_a_own": 0.9},
        {"attn_mix": "logit", "lambda_a1": 0.5, "lambda_a_own": 0.5},
        {"attn_mix": "logit", "lambda_a1": 0.3, "lambda_a_own": 0.9}],
    "residual_hidden": [{}, {"lambda_h1": 0.3, "lambda_h_own": 0.7}, {"lambda_h1": 3.0, "once": True}],
    "value_embedding": [{}, ({}, {"n_layers": 7}), {"value_tables": 1, "lambda_table": 0.2, "lambda_own": 0.9}],
    "bank_of_values": [{}, ({}, {"n_layers": 7}), {"bank_layers": [0, 2]}, {"bank_gain": False},
        {"bank": "first", "bank_layers": [1, 3]}],
    "sandwich_norm": [{}, {"norms": "pre"}],
    "post_norm": [{}],
    "dyt": [{}],
    "gated_attention": [{}],
    "exclusive_attention": [{}, {"gated": True}],
    "cut_skip": [{"cut": "attn"}, {"cut": "mlp"}, {"cut": "both"}],
    "held_start": [{}, ({"others_norm": 0.5}, {"n_key_value_heads": 2}), {"start_norm": "free", "others_norm": 2.0}],
    "held_start+resformer": [{"start_norm": 1.5}],
    "first_layer_shuffled": [{}, {"lambda_other": 2.0, "lambda_own": -1.0}],
    "values_scaled": [{}, ({"value_factor": -2.0}, {"n_key_value_heads": 2})],
    "resformer+neutreno": [{}, {"neutreno_lambda": 0.7, "source_layer": 1}],
    "resformer+denseformer": [{"lambda_v1": 0.2}],
    "resformer_learnable+denseformer": [{"dilation": 2}],
    "svformer+gqa": [{}, {"query_group": 2, "anchors": [0, 2]}],
    "svformer+cla": [{}, ({"group": 3, "refresh_every": 2}, {"n_layers": 5})],
    "svformer+denseformer": [{"dilation": 2}],
    "svformer+neutreno": [{"anchors": [0, 2]}],
    "svformer+attention_residuals": [{"depth_blocks": 2}],
    "resformer+gqa": [{"lambda_v1": 1.2}],
    "resformer+cla": [{"lambda_v1": 2, "lambda_own": 0.4}, ({"group": 3}, {"n_layers": 7})],
    "resformer+residual_k": [{"lambda_own": 1.5}],
    "resformer+cut_skip": [{"source_layer": 1}],
    "resformer+cross_layer": [{"source": "first"}],
    "resformer+residual_attention": [{"attn_mix": "logit"}],
    "resformer+bank_of_values": [{"bank_layers": [2]}],
    "resformer_sparse+bank_of_values": [{"bank_layers": [0]}],
    "gated_value_embedding": [{}, ({"gate_scale": 0.7, "gate_channels": 5, "table_layers": "last_third"}, {"n_layers": 3})],
    "satformer": [{}, {"gate_form": "sigmoid"}, {"gate_form": "tanh"}, {"gate_form": "identity"}, {"gate_form": "softmax"},
        {"gate_form": "softmax_sigmoid"}, {"layers": [2]}],
    "skip_v1": [{}, {"skip_heads": 1}],
    "value_scale": [{}, {"scale_start": 30}],
    "value_gate": [{}, {"gate_from": "input"}],
    "value_gate_query": [{}, {"gate_from": "input"}],
    "sink_logit": [{}, {"logit": "zero"}],
    "satformer+value_scale+value_gate+held_start": [{"start_norm": 0.5}],
    "resformer+value_scale": [{"layers": [1, 3]}],
    "satformer+bank_of_values": [{"bank_layers": [0], "bank_gain": False}],
    "neutreno+exclusive_attention": [{"gated": True}],
    "identity_map+svformer": [{"anchors": [0, 2]}],
    "denseformer+cross_layer_all+gqa": [{"period": 2}],
}  # fmt: skip
COMBINED = [
    "sandwich_norm+attention_residuals", "post_norm+residual_k+denseformer", "dyt+svformer+gated_attention", "svformer+cross_layer",
    "neutreno+attention_residuals", "resformer_dense+mqa", "resformer+residual_q+residual_k", "resformer+identity_map",
    "value_gate_query+exclusive_attention+gated_attention+svformer", "skip_v1+value_gate_query+sink_logit", "neutreno+cla",
    "neutreno+gated_attention+identity_map", "neutreno+value_embedding", "denseformer+resformer+neutreno", "same_key+cla",
    "cross_layer+value_embedding", "residual_attention+residual_k+gqa", "residual_hidden+cut_skip+value_embedding",
]  # fmt: skip
CASES = [
    *((name, *(v if isinstance(v, tuple) else (v, {}))) for name, variants in VARIANTS.items() for v in variants),
    *((name, {}, {}) for name in COMBINED),
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


@pytest.mark.fast(56)
@pytest.mark.parametrize(("architecture", "options", "config"), CASES)
def test_equals_the_published_equations_in_values_and_gradients(awake, architecture, options, config):
    """With two key-value heads for four queries'; one for each is `golden`."""
    grouped, kv_heads = {"n_key_value_heads": 2}, 2
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
