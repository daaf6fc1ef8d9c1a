"""Every architecture equals its equations, reduces to the vanilla decoder, learns in all its parts, and combines or refuses."""

from __future__ import annotations

import itertools
import math
import sys

import equations
import pytest
import torch

from workbench.config import PRESETS, ModelConfig
from workbench.errors import WorkbenchError
from workbench.models import ARCHITECTURES, build, compose
from workbench.models.resformer_learnable import PlusResFormer

WIDE = torch.float64
SMALL = ModelConfig(n_layers=4, d_model=96, n_heads=4, d_mlp=256, d_vocab=1024, n_ctx=2048)
DEEP = {"n_layers": 8}


def tokens(model, length, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.d_vocab, (batch, length), generator=generator)


# ---- the published equations -----------------------------------------------------------------------------------------

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
    ("gated_attention", {}, {}),
    *(("cut_skip", {"cut": cut}, {}) for cut in ("attn", "mlp", "both")),
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
    ("gated_attention+resformer", {}, {}),
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
GROUPED = ("gqa", "mqa")
SLOW = pytest.mark.slow


def test_each_registered_architecture_and_option_has_a_formula():
    """Options that only set where training starts, or how it decays, show in no formula."""
    silent = {"decay_lambda", "decay_alpha"}
    for name in ARCHITECTURES:
        alone = [options for case, options, _ in CASES if case == name]
        assert {} in alone or name in ("denseformer", "residual_attention", "cut_skip", "resformer+denseformer"), name
    tried = {}
    for name, options, config in CASES:
        for shortcut in compose(name, SMALL.replace(**config), **options).shortcuts:
            tried.setdefault(type(shortcut), set()).update(options)
    for entry in ARCHITECTURES.values():
        for shortcut in entry.shortcuts:
            assert set(type(entry)("", (shortcut,)).options) - silent <= tried[shortcut], shortcut


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=SLOW), 2])
@pytest.mark.parametrize(("architecture", "options", "config"), CASES)
def test_equals_the_published_equations_in_values_and_gradients(awake, architecture, options, config, kv_heads):
    grouped = {"n_key_value_heads": kv_heads}
    if set(architecture.split("+")) & set(GROUPED):
        grouped, kv_heads = {}, 4  # query_group says how many key-value heads there are
    model = awake(architecture, dtype=WIDE, config={"n_layers": 4, **config, **grouped}, **options)
    ids, weights = tokens(model, 9), dict(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(2, 9, model.config.d_vocab, generator=generator, dtype=WIDE)
    found = model(ids)
    true = equations.logits(architecture, weights, model.config.replace(n_key_value_heads=kv_heads), ids, options)
    assert found.dtype == WIDE
    assert (found - true).abs().max() < 1e-11 * max(1, true.abs().max())
    gradients = [torch.autograd.grad((x * out).sum(), list(weights.values())) for x in (found, true)]
    for name, mine, naive in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(mine, naive, atol=1e-10 * max(1.0, naive.abs().max().item()), rtol=0, msg=name)


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


# ---- degenerate settings ---------------------------------------------------------------------------------------------

DEGENERATE = {
    "transformer": {},
    "resformer": {"lambda_v1": 0, "lambda_own": 1},
    "resformer_constant": {"lambda_v1": 0, "lambda_own": 1},
    "resformer_sparse": {"layers": []},
    "resformer_learnable": {"lambda_v1": 0, "lambda_own": 1},
    "resformer_learnable_plus": {"plus_scale_init": 0, "lambda_own": 1},
    "resformer_dense": {"lambda_source": 0, "lambda_own": 1},
    "svformer": {"refresh_every": 1},
    "neutreno": {"neutreno_lambda": 0},
    "denseformer": {},
    "gqa": {"query_group": 1},
    "mqa": {"query_group": 1},
    "cla": {"group": 1},
    "share_q": {"group": 1},
    "share_k": {"group": 1},
    "share_v": {"group": 1},
    "same_key": {"same_key_weight": 0},
    "identity_map": {"identity_scale": 0},
    "residual_q": {"lambda_q1": 0, "lambda_q_own": 1},
    "residual_k": {"lambda_k1": 0, "lambda_k_own": 1},
    "residual_attention": {"lambda_a1": 0, "lambda_a_own": 1},
    "residual_hidden": {"lambda_h1": 0, "lambda_h_own": 1},
    "value_embedding": {"lambda_table": 0, "lambda_own": 1},
    "bank_of_values": {"bank_layers": []},
    "cut_skip": {"cut": "none"},
}
UNSET = {"cross_layer", "cross_layer_all", "gated_attention"}  # no option makes them vanilla: tests of their own below
FURTHER = [
    ("resformer_dense", {"lambda_source": 0, "dense_source": "mixed"}),
    ("svformer", {"anchors": [0, 1, 2]}),
    *(("denseformer", {"dilation": d, "period": p}) for d in (1, 2, 3, 4) for p in (1, 2, 3)),
]


def degenerate(name):
    """Options that make an architecture, or a registered combination, the vanilla decoder; None where none do."""
    parts = name.split("+")
    return None if UNSET & set(parts) else {k: v for part in parts for k, v in DEGENERATE[part].items()}


def same(a, b, ids, *, exact=True):
    torch.testing.assert_close(a(ids), b(ids), atol=0 if exact else 1e-12, rtol=0)
    grads = []
    for model in (a, b):
        model(ids, return_type="loss").backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0].keys() & grads[1].keys():
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("architecture", "options"), [*((name, degenerate(name)) for name in ARCHITECTURES), *FURTHER])
def test_degenerate_setting_is_the_vanilla_decoder_exactly(tiny, architecture, options, kv_heads):
    if options is None:
        pytest.skip("no option makes it vanilla; see the tests of it alone")
    if set(architecture.split("+")) & set(GROUPED) and kv_heads < 4:
        pytest.skip("query_group = 1 means as many key-value heads as query heads")
    config = {"n_key_value_heads": kv_heads}
    vanilla, model = (
        tiny(name, dtype=WIDE, config=config, **o) for name, o in (("transformer", {}), (architecture, options))
    )
    same(vanilla, model, tokens(vanilla, 11))


def test_scores_mixed_with_nothing_are_the_vanilla_decoders(tiny):
    """To rounding: the two halves of its heads are scaled by sqrt(2)."""
    vanilla, model = (
        tiny(dtype=WIDE),
        tiny("residual_attention", dtype=WIDE, **DEGENERATE["residual_attention"], attn_mix="logit"),
    )
    same(vanilla, model, tokens(vanilla, 11), exact=False)


@pytest.mark.parametrize("architecture", ["cross_layer", "cross_layer_all", "same_key", "identity_map", "resformer"])
def test_with_one_layer_there_is_nothing_earlier(tiny, architecture):
    vanilla, model = (tiny(name, dtype=WIDE, config={"n_layers": 1}) for name in ("transformer", architecture))
    same(vanilla, model, tokens(vanilla, 11))


@pytest.mark.parametrize("architecture", ["cross_layer", "cross_layer_all"])
def test_keys_that_no_query_sees_or_that_are_its_own_leave_the_vanilla_decoder(tiny, architecture):
    vanilla, model = tiny(dtype=WIDE), tiny(architecture, dtype=WIDE)
    ids, seen = tokens(model, 9), {}
    hidden = [(lambda n: ".cross." in n and n.endswith("scores"), lambda s, hook: torch.full_like(s, -math.inf))]

    def keep(tensor, hook):
        seen[hook.name] = tensor

    def own(tensor, hook):
        block, point = hook.name.split(".cross.")[0], hook.name.rsplit(".", 1)[-1]
        return seen[f"{block}.{point}"]

    copied = [
        (lambda n: n.endswith(("attn.hook_rot_k", "attn.hook_v")), keep),
        (lambda n: ".cross." in n and n.endswith(("hook_rot_k", "hook_v")), own),
    ]
    for hooks in (hidden, copied):
        torch.testing.assert_close(model.run_with_hooks(ids, fwd_hooks=hooks), vanilla(ids), atol=1e-12, rtol=0)


def test_a_gate_without_weights_halves_the_output(tiny):
    vanilla, model = tiny(dtype=WIDE), tiny("gated_attention", dtype=WIDE)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            model.get_parameter(f"gated_attention.gates.{layer}").zero_()
            block.attn.o_proj.weight.mul_(2)
    ids = tokens(model, 9)
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-12, rtol=0)


def test_a_bank_of_the_first_layers_own_values_is_that_layer(tiny):
    vanilla, model = tiny(dtype=WIDE), tiny("bank_of_values", dtype=WIDE, bank_layers=[0])
    first = vanilla.blocks[0]
    with torch.no_grad():
        model.get_parameter("bank_of_values.tables.0").copy_(first.attn.v_proj(first.ln1(vanilla.embed.weight)))
    ids = tokens(model, 9)
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-12, rtol=0)


# ---- the algebra between them ----------------------------------------------------------------------------------------


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
    found = exact.run_with_hooks(ids, fwd_hooks=same_keys)
    torch.testing.assert_close(found, averaged(ids), atol=1e-12, rtol=0)


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


# ---- parameters ------------------------------------------------------------------------------------------------------


def expected_parameters(name, c):
    """2 vocab d + L (2 d^2 + 2 d D + 3 d f) + (2 L + 1) d, and what each architecture adds or saves."""
    L, d, parts = c.n_layers, c.d_model, name.split("+")
    D = d // {"gqa": 4 if "svformer" in parts else 2, "mqa": c.n_heads}.get(parts[-1], 1)
    pairs, bank, tables = L - math.ceil(L / 2), L // 3, 3 if L >= 6 else L // 2
    extra = {
        "resformer_learnable": 2 * (L - 1),
        "resformer_learnable_plus": 2 * (L - 1) + 1,
        "resformer_dense": L * (L + 1) // 2 - 1,
        "svformer": -(L - 1) * d * D,
        "denseformer": L * (L + 3) // 2,
        "cla": -pairs * d * D * (1 if "svformer" in parts else 2),
        "share_q": -pairs * d * d,
        "share_k": -pairs * d * D,
        "share_v": -pairs * d * D,
        "value_embedding": tables * c.d_vocab * D + L + 2 * tables,
        "bank_of_values": bank * (c.d_vocab - d) * D,
        "gated_attention": L * d * d,
    }
    whole = 2 * c.d_vocab * d + L * (2 * d * d + 2 * d * D + 3 * d * c.d_mlp) + (2 * L + 1) * d
    return whole + sum(extra.get(part, 0) for part in parts)


@pytest.mark.parametrize(
    ("size", "parameters", "saved", "architectures"),
    [
        ("2m", 1_623_856, 768, ARCHITECTURES),
        ("82m", 81_901_056, 1_835_008, ("svformer", "transformer")),
        ("180m", 179_874_048, 6_488_064, ("svformer", "transformer")),
        ("468m", 467_921_920, 24_117_248, ("svformer", "transformer")),
        pytest.param("468m", 467_921_920, 24_117_248, ARCHITECTURES, marks=SLOW),
    ],
)
def test_published_sizes_have_the_published_parameters(size, parameters, saved, architectures):
    config = PRESETS[size].model
    assert expected_parameters("transformer", config) == parameters
    assert expected_parameters("svformer", config) == parameters - saved
    for name in architectures:
        if name == "svformer+gqa" and config.n_heads % 4:
            continue  # four query heads for each key-value head need four
        with torch.device("meta"):
            found = sum(p.numel() for p in compose(name, config).parameters())
        assert found == expected_parameters(name, config), name


def test_parameters_of_anchors_groups_and_grouped_heads():
    def count(name, **options):
        with torch.device("meta"):
            return sum(p.numel() for p in compose(name, SMALL, **options).parameters())

    vanilla, matrix = count("transformer"), 96 * 96
    assert count("svformer", anchors=[0, 3]) == vanilla - 2 * matrix
    assert count("cla", group=3) == vanilla - 2 * 2 * matrix
    assert count("cla", group="all") == vanilla - 3 * 2 * matrix
    assert count("gqa", query_group=4) == vanilla - 4 * 2 * matrix * 3 // 4
    assert count("svformer+cla", group=4, anchors=[0, 2]) == vanilla - 3 * matrix - 2 * matrix
    assert count("value_embedding", value_tables=1) == vanilla + 1024 * 96 + 4 + 2
    assert count("bank_of_values", bank_layers=[1, 2, 3]) == vanilla + 3 * (1024 * 96 - matrix)


@pytest.mark.parametrize(
    ("dilation", "period", "weights"), [(1, 1, 14), (2, 1, 2 + 2 + 3 + 1), (1, 2, 3 + 5), (4, 4, 2)]
)
def test_denseformer_weights_by_hand(dilation, period, weights):
    """4 blocks: after block i (from 0) floor((i + 1) / dilation) + 1 weights where (i + 1) mod period = 0."""
    model = compose("denseformer", SMALL, dilation=dilation, period=period)
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith("dwa.")) == weights
    table = model.shortcuts[0].coefficients()
    own = [table[f"alpha_{i + 1}"][i] for i in range(4)]
    assert [value for value in own if not math.isnan(value)] == [1.0] * (4 // period)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [3, 4])
def test_every_parameter_and_every_coefficient_learns_from_the_start(any_architecture, tiny, layers):
    model = tiny(any_architecture, config={"n_layers": layers})
    model(tokens(model, 8), return_type="loss").backward()
    own = tuple(f"{s.prefix}." for s in model.shortcuts)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
        if name.startswith(own) and (p.ndim < 2 or min(p.shape) == 1):
            assert (p.grad != 0).all(), name


READERS = [
    "resformer", "resformer_constant", "resformer_sparse", "resformer_learnable", "resformer_learnable_plus", "resformer_dense",
    "svformer", "neutreno", "resformer+neutreno", "same_key", "identity_map", "cross_layer_all", "svformer+cla",
]  # fmt: skip


@pytest.mark.parametrize("architecture", READERS)
def test_first_values_hear_from_every_layer(tiny, architecture):
    """With every other path through the first layer's attention cut, its value projection still learns from each layer."""
    model = tiny(architecture)
    ids = tokens(model, 8)
    branches = [
        n for n in model.hook_dict if n.endswith(("first.hook_v", "source.0.hook_v", "cross.0.hook_v", "cross.hook_v"))
    ]
    assert len(branches) == (1 if architecture == "resformer_sparse" else 2)
    for heard in branches:
        cut = [(name, lambda v, hook: v.detach()) for name in branches if name != heard]
        cut.append(("blocks.0.attn.hook_z", lambda z, hook: z.detach()))
        model.zero_grad()
        with model.hooks(cut):
            model(ids, return_type="loss").backward()
        assert model.blocks[0].attn.v_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("architecture", "projection"), [("residual_q", "q"), ("residual_k", "k"), ("share_q", "q"), ("cla", "k")]
)
def test_the_first_queries_and_keys_hear_from_their_readers(tiny, architecture, projection):
    model = tiny(architecture)
    with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: z.detach())]):
        model(tokens(model, 8), return_type="loss").backward()
    assert getattr(model.blocks[0].attn, f"{projection}_proj").weight.grad.abs().max() > 0


# ---- pairs -----------------------------------------------------------------------------------------------------------

PAIR = {"n_layers": 3, "d_model": 16, "n_heads": 4, "d_mlp": 8, "d_vocab": 11, "n_ctx": 16, "init_std": 0.3}
IDS = torch.randint(11, (1, 6), generator=torch.Generator().manual_seed(0))


def moved(model):
    """Averages off their neutral start, where DenseFormer is no DenseFormer yet."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if name.startswith("dwa."):
            p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def built_or_refused(name):
    """(model, "") or (None, why not)."""
    try:
        return moved(build(name, PAIR, dtype=WIDE)), ""
    except WorkbenchError as error:
        return None, str(error)


@pytest.fixture(scope="module")
def alone():
    """Each architecture's options and logits at the size of the pairs."""
    with torch.no_grad():
        models = {name: moved(build(name, PAIR, dtype=WIDE)) for name in ARCHITECTURES}
        return {name: (model.options, model(IDS)) for name, model in models.items()}


MECHANISMS = {entry.shortcuts: name for name, entry in reversed(ARCHITECTURES.items()) if len(entry.shortcuts) == 1}
"""The first name of each shortcut. Pairs with other names, the same classes under other options, are slow."""


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(*pair, marks=() if set(pair) <= set(MECHANISMS.values()) else SLOW)
        for pair in itertools.combinations(ARCHITECTURES, 2)
    ],
)
def test_a_pair_works_in_all_its_parts_or_is_refused_by_name(alone, a, b):
    name = f"{a}+{b}"
    model, refusal = built_or_refused(name)
    if model is None:
        said = refusal.removeprefix(f"{name}: ")
        assert said != refusal
        assert all(any(part in said for part in x.split("+")) for x in (a, b)), said
        assert built_or_refused(f"{b}+{a}")[0] is None
        return
    logits = model(IDS)
    logits.square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not idle
    with torch.no_grad():
        eager = model.run_with_hooks(IDS, fwd_hooks=[(lambda n: n.endswith("attn.hook_pattern"), lambda x, hook: None)])
        torch.testing.assert_close(logits, eager, atol=1e-12, rtol=1e-9)
        changed = IDS.clone()
        changed[0, 3] = (changed[0, 3] + 1) % 11
        difference = (model(changed) - logits).abs().amax((0, 2))
        assert difference[:3].max() == 0
        assert (difference[3:] > 0).all()
        swapped = moved(build(f"{b}+{a}", PAIR, dtype=WIDE))
        torch.testing.assert_close(swapped(IDS), logits, atol=1e-12, rtol=1e-9)
        for one, other in ((a, b), (b, a)):
            if one != "transformer":
                assert not torch.allclose(logits, alone[other][1], rtol=1e-6), f"{one} does nothing beside {other}"
            if (neutral := degenerate(one)) is not None and "denseformer" not in one:
                reduced = moved(build(name, PAIR, dtype=WIDE, **{**alone[other][0], **neutral}))
                torch.testing.assert_close(reduced(IDS), alone[other][1], atol=1e-12, rtol=1e-9)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options", "told"),
    [
        ("resformer", {"layers": [9]}, r"layers=\[9\].* the layers 1..3; nearest \[3\]"),
        ("resformer", {"layers": [0, 2]}, r"nearest \[1, 2\]"),
        ("resformer", {"layers": "early"}, "choose 'all', 'late' or a list"),
        ("resformer", {"layers": 2}, "layers"),
        ("resformer", {"source_layer": 3}, r"source_layer=3: .* 0..2; nearest 2"),
        ("resformer", {"source_layer": 1, "layers": [1]}, r"2..3; nearest \[2\]"),
        ("resformer", {"source_layer": 0.5}, "source_layer=0.5"),
        ("resformer", {"lambda_v1": None}, "lambda_v1=None: must be a finite number"),
        ("resformer", {"lambda_v1": "much"}, "lambda_v1='much'"),
        ("resformer", {"lambda_own": math.nan}, "lambda_own=nan"),
        ("resformer_learnable", {"lambda_own": math.inf}, "lambda_own=inf"),
        ("resformer_learnable_plus", {"plus_logit_init": "randn"}, "zeros, randn:<sd> or ramp:<slope>"),
        ("resformer_learnable_plus", {"plus_logit_init": "steep:2"}, "as randn:0.1"),
        ("resformer_learnable_plus", {"plus_scale_init": math.nan}, "plus_scale_init=nan"),
        ("resformer_dense", {"dense_source": "row"}, "did you mean raw"),
        ("svformer", {"anchors": (1,)}, r"must rise from 0 within the layers 0..3; nearest \(0, 1\)"),
        ("svformer", {"anchors": (0, 7)}, r"nearest \(0, 3\)"),
        ("svformer", {"anchors": (0, 2, 1)}, r"nearest \(0, 1, 2\)"),
        ("svformer", {"anchors": 3}, "anchors.*3"),
        ("svformer", {"refresh_every": 0}, "nearest 1"),
        ("svformer", {"refresh_every": 9}, r"1..4 \(n_layers\); nearest 4"),
        ("svformer", {"refresh_every": 3, "anchors": [0, 2]}, r"contradict refresh_every=3, which means \(0, 3\)"),
        ("neutreno", {"neutreno_lambda": "0.4"}, "neutreno_lambda='0.4'"),
        ("denseformer", {"period": 5}, "period from 1 to n_layers=4; nearest dilation=1, period=4"),
        ("denseformer", {"dilation": 9}, "dilation from 1 to 5, .*nearest dilation=5"),
        ("denseformer", {"dilation": 0}, "dilation from 1.*nearest dilation=1"),
        ("denseformer", {"dilation": 1.5}, "dilation.*1.5"),
        (
            "gqa",
            {"query_group": 3},
            r"query_group=3 does not divide n_heads=4: choose 'all' or from \[1, 2, 4\], nearest 2",
        ),
        ("gqa", {"query_group": "some"}, "choose 'all' or from"),
        ("cla", {"group": 0}, r"1..4 \(n_layers\); nearest 1"),
        ("cla", {"group": 9}, "nearest 4"),
        ("cla", {"group": "some"}, "'all' or a number of layers 1..4"),
        ("cla", {"share": "vk"}, "did you mean v, k, kv"),
        ("cross_layer", {"source": "prior"}, "previous"),
        ("cross_layer", {"source": 3}, "0..2; nearest 2"),
        ("same_key", {"same_key_weight": -1}, "must be 0 or more; nearest 0"),
        ("identity_map", {"identity_source": -1}, "nearest 0"),
        ("identity_map", {"identity_source": "prev"}, "did you mean previous"),
        ("residual_q", {"lambda_q1": "a"}, "lambda_q1='a'"),
        ("residual_attention", {"attn_mix": "logits"}, "did you mean logit"),
        ("residual_hidden", {"lambda_h1": math.nan}, "lambda_h1=nan"),
        ("value_embedding", {"value_tables": 3}, "must be 1..2 for 4 layers; nearest 2"),
        ("value_embedding", {"value_tables": 0}, "nearest 1"),
        ("bank_of_values", {"bank_layers": [4]}, r"nearest \[3\]"),
        ("cut_skip", {"cut": "atn"}, "did you mean attn"),
        ("svformer+gqa", {"query_group": 3}, "nearest 2"),
        # parts that contradict each other, or leave each other nothing to do
        (
            "resformer+svformer",
            {},
            "resformer and svformer cannot be combined: no layer that resformer mixes has its own",
        ),
        ("resformer+svformer", {"anchors": [0, 2], "layers": [3]}, "resformer and svformer cannot be combined"),
        (
            "svformer+neutreno",
            {},
            "neutreno and svformer cannot be combined: all layers share what neutreno would tell apart",
        ),
        ("neutreno+cla", {"group": "all"}, "neutreno and cla cannot be combined"),
        ("cross_layer+cla", {"group": "all"}, "cross_layer and cla cannot be combined"),
        ("resformer+cla", {"group": "all"}, "resformer and cla cannot be combined"),
        ("resformer_learnable+cla", {}, "coefficients of resformer_learnable would do nothing in some layers"),
        ("svformer+bank_of_values", {}, "svformer and bank_of_values both define v of layer 3; keep one"),
        ("cross_layer+residual_attention", {}, "cross_layer and residual_attention both define the attention"),
        ("denseformer+residual_hidden", {}, "denseformer and residual_hidden both define what a block reads"),
        ("cross_layer+same_key", {}, "cross_layer and same_key both take source"),
        ("cla+share_k", {}, "cla and share_k set one shortcut; keep one"),
        ("denseformer+denseformer", {}, "denseformer cannot be combined with itself"),
        (
            "resformer_dense+identity_map",
            {"dense_source": "mixed"},
            "resformer_dense and identity_map cannot be combined: layer 2 would read v of layer 1 both before and after",
        ),
    ],
)
def test_what_an_architecture_cannot_do_is_refused_with_the_nearest_choice(architecture, options, told):
    with pytest.raises(WorkbenchError, match=told):
        compose(architecture, SMALL, **options)


def test_grouped_heads_of_the_config_and_of_the_architecture_must_agree():
    assert compose("gqa", SMALL.replace(n_key_value_heads=2)).config.n_key_value_heads == 2
    with pytest.raises(
        WorkbenchError, match="query_group=4 means 1 key-value heads, but the config has n_key_value_heads=2"
    ):
        compose("mqa", SMALL.replace(n_key_value_heads=2))


# ---- what is written about them --------------------------------------------------------------------------------------


def test_each_file_says_its_formula_source_seam_parameters_cache_and_degenerate_case():
    files = {sys.modules[s.__module__] for entry in ARCHITECTURES.values() for s in entry.shortcuts}
    for file in files:
        said = str(file.__doc__)
        assert "=" in said.partition("Source:")[0], file
        heads = [line.partition(":")[0] for line in said.splitlines()]
        for head in ("Source", "Seam", "Parameters", "Cache", "Degenerate case"):
            assert heads.count(head) == 1, (file, head)
