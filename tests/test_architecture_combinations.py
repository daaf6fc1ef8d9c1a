"""Pairs of architectures work in all their parts or are refused by name, and so are impossible options."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from inputs import SMALL, WIDE
from seams import COVERING

from workbench.errors import WorkbenchError
from workbench.models import ARCHITECTURES, build, compose

PAIR = {"n_layers": 3, "d_model": 16, "n_heads": 4, "d_mlp": 8, "d_vocab": 11, "n_ctx": 16, "init_std": 0.3}
IDS = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))


def moved(model):
    """Averages off their neutral start, where they are no averages yet."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if name.startswith(("dwa.", "attention_residuals.", "hyper_connections.matrices.")):
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


PAIRS = list(itertools.combinations(COVERING, 2))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if number % 48 else ())
        for number, pair in enumerate(PAIRS)
        if number % 4 == 0
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
            if (neutral := ARCHITECTURES[one].neutral) is not None and "denseformer" not in one:
                reduced = moved(build(name, PAIR, dtype=WIDE, **{**alone[other][0], **neutral}))
                torch.testing.assert_close(reduced(IDS), alone[other][1], atol=1e-12, rtol=1e-9)


# ---- refusals --------------------------------------------------------------------------------------------------------


REFUSED = {  # options, and what is said of them
    "resformer": [({"layers": [9]}, r"layers=\[9\].* the layers 1..3; nearest \[3\]"), ({"layers": [0, 2]}, r"nearest \[1, 2\]"),
        ({"layers": "early"}, "choose 'all', 'late', 'last_third' or a list"), ({"layers": 2}, "layers"),
        ({"source_layer": 3}, r"source_layer=3: must be 0..2 \(layers\); nearest 2"),
        ({"source_layer": 1, "layers": [1]}, r"2..3; nearest \[2\]"),
        ({"source_layer": 0.5}, "source_layer=0.5"), ({"lambda_v1": None}, "lambda_v1=None: must be a finite number"),
        ({"lambda_v1": "much"}, "lambda_v1='much'"), ({"lambda_own": math.nan}, "lambda_own=nan")],
    "resformer_learnable": [({"lambda_own": math.inf}, "lambda_own=inf")],
    "resformer_learnable_plus": [({"plus_logit_init": "randn"}, "zeros, randn:<sd> or ramp:<slope>"),
        ({"plus_logit_init": "steep:2"}, "as randn:0.1"), ({"plus_scale_init": math.nan}, "plus_scale_init=nan")],
    "resformer_dense": [({"dense_source": "row"}, "did you mean raw")],
    "svformer": [({"anchors": (1,)}, r"must rise from 0 within the layers 0..3; nearest \(0, 1\)"),
        ({"anchors": (0, 7)}, r"nearest \(0, 3\)"), ({"anchors": (0, 2, 1)}, r"nearest \(0, 1, 2\)"),
        ({"anchors": 3}, "anchors.*3"), ({"refresh_every": 0}, "nearest 1"),
        ({"refresh_every": 9}, r"1..4 \(n_layers\); nearest 4"),
        ({"refresh_every": 3, "anchors": [0, 2]}, r"contradict refresh_every=3, which means \(0, 3\)"),
        ({"shared_layers": [0]}, r"1..3; nearest \[1\]"),
        ({"shared_layers": [3], "anchors": [0, 2]}, r"anchors=\(0, 2\) others' too; give one")],
    "neutreno": [({"neutreno_lambda": "0.4"}, "neutreno_lambda='0.4'")],
    "denseformer": [({"period": 5}, r"period=5: must be 1..4 \(n_layers\); nearest 4"),
        ({"dilation": 9}, "dilation=9: must be 1..5 .*nearest 5"), ({"dilation": 0}, "dilation=0: .*nearest 1"),
        ({"dilation": 1.5}, "dilation.*1.5")],
    "attention_residuals": [({"depth_blocks": 0}, r"1..8 \(sublayers\); nearest 1"), ({"depth_blocks": 9}, "nearest 8"),
        ({"depth_blocks": "two"}, "depth_blocks='two': must be 1..8"),
        ({"depth_heads": 5}, r"depth_heads=5: .*divisors of d_model=96.*nearest 4"),
        ({"depth_form": "full"}, "unknown depth_form 'full'"),
        ({"depth_form": "delta", "depth_blocks": 2}, "leave depth_blocks out")],
    "sandwich_norm": [({"norms": "prenorm"}, "unknown norms 'prenorm'")],
    "hyper_connections": [({"streams": 0}, "streams=0: must be 1 or more; nearest 1")],
    "mhc": [({"streams": 2.5}, "streams=2.5: must be"),
        ({"streams": 7, "mixing": "permutations"}, r"streams=7: must be 1..6 \(mixing=permutations\); nearest 6"),
        ({"mixing": "softmax"}, "unknown mixing 'softmax'")],
    "gqa": [({"query_group": 3}, r"query_group=3: must be one of \[1, 2, 4\] \('all' or divisors of n_heads=4\); nearest 2"),
        ({"query_group": "some"}, "'all' or divisors of")],
    "cla": [({"group": 0}, r"1..4 \(n_layers, or 'all'\); nearest 1"), ({"group": 9}, "nearest 4"),
        ({"group": "some"}, "must be 1..4 .n_layers, or 'all'"), ({"share": "vk"}, "did you mean v, k, kv")],
    "cross_layer": [({"source": "prior"}, "previous"), ({"source": 3}, r"0..2 \(layers\); nearest 2")],
    "same_key": [({"same_key_weight": -1}, "must be 0 or more; nearest 0")],
    "identity_map": [({"identity_source": -1}, "nearest 0"), ({"identity_source": "prev"}, "did you mean previous")],
    "residual_q": [({"lambda_q1": "a"}, "lambda_q1='a'")],
    "residual_attention": [({"attn_mix": "logits"}, "did you mean logit")],
    "residual_hidden": [({"lambda_h1": math.nan}, "lambda_h1=nan")],
    "value_embedding": [({"value_tables": 3}, r"must be 1..2 \(for 4 layers\); nearest 2"), ({"value_tables": 0}, "nearest 1")],
    "bank_of_values": [({"bank_layers": [4]}, r"nearest \[3\]"), ({"bank": "tables"}, "did you mean table"),
        ({"bank": "first", "bank_layers": [0]}, r"the layers 1..3; nearest \[1\]")],
    "gated_value_embedding": [({"gate_channels": 0}, r"1..96 \(d_model\); nearest 1"), ({"gate_scale": -1}, "must be 0 or more"),
        ({"table_layers": "second"}, "choose 'all', 'late', 'last_third' or a list")],
    "satformer": [({"gate_form": "softplus"}, "unknown gate_form 'softplus'.*softmax"), ({"layers": [0]}, r"nearest \[1\]")],
    "skip_v1": [({"skip_heads": 5}, r"0..4 \(key-value heads\); nearest 4")],
    "value_scale": [({"scale_start": -1}, "scale_start=-1: must be 0 or more")],
    "value_gate": [({"gate_from": "key"}, "unknown gate_from .*choose from input, value")],
    "satformer+resformer": [({"layers": [1]}, "satformer and resformer both take layers; keep one")],
    "cut_skip": [({"cut": "atn"}, "did you mean attn")],
    "values_scaled": [({"value_factor": "half"}, "value_factor='half': must be a finite number")],
    "sink_logit": [({"logit": "none"}, "choose from learned, zero|learned, zero")],
    "held_start": [({"start_norm": "zero"}, "choose 'free' or a norm"), ({"start_norm": -1.0}, "must be 0 or more"),
        ({"others_norm": "one"}, "others_norm='one': choose 'free' or a norm")],
    "svformer+gqa": [({"query_group": 3}, "nearest 2")],
    "resformer+svformer": [({}, "resformer and svformer cannot be combined: no layer that resformer mixes has its own"),
        ({"anchors": [0, 2], "layers": [3]}, "resformer and svformer cannot be combined")],
    "neutreno+cla": [({"group": "all"}, "neutreno and cla cannot be combined")],
    "cross_layer+cla": [({"group": "all"}, "cross_layer and cla cannot be combined")],
    "resformer+cla": [({"group": "all"}, "resformer and cla cannot be combined")],
    "resformer_dense+identity_map": [({"dense_source": "mixed"},
        "resformer_dense and identity_map cannot be combined: layer 2 would read v of layer 1 both before and after")],
}  # fmt: skip
CONTRADICTIONS = {  # parts that contradict each other, or leave each other nothing to do
    "attention_residuals+denseformer": "attention_residuals and denseformer both define what a block reads",
    "attention_residuals+cut_skip": "attention_residuals and cut_skip both define what passes by a sublayer",
    "sandwich_norm+dyt": "sandwich_norm and dyt set one shortcut; keep one",
    "mhc+hyper_connections": "mhc and hyper_connections both take streams; keep one",
    "mhc+denseformer": "mhc and denseformer both define what a block reads",
    "hyper_connections+cut_skip": "hyper_connections and cut_skip both define what passes by a sublayer",
    "value_scale+svformer": "coefficients of value_scale would do nothing in some layers",
    "skip_v1+value_gate": "coefficients of value_gate would do nothing in some layers",
    "satformer+skip_v1": "satformer and skip_v1 cannot be combined: no layer that satformer mixes",
    "skip_v1+svformer": "skip_v1 and svformer both define v of layer 1; keep one",
    "cross_layer+sink_logit": "cross_layer and sink_logit both define the attention; keep one",
    "svformer+neutreno": "neutreno and svformer cannot be combined: all layers share what neutreno would tell apart",
    "resformer_learnable+cla": "coefficients of resformer_learnable would do nothing in some layers",
    "svformer+bank_of_values": "svformer and bank_of_values both define v of layer 3; keep one",
    "cross_layer+residual_attention": "cross_layer and residual_attention both define the attention",
    "denseformer+residual_hidden": "denseformer and residual_hidden both define what a block reads",
    "cross_layer+same_key": "cross_layer and same_key both take source",
    "cla+share_k": "cla and share_k set one shortcut; keep one",
    "first_layer_shuffled+neutreno": "first_layer_shuffled and neutreno both read earlier layers' values",
    "denseformer+denseformer": "denseformer cannot be combined with itself",
}


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        *((name, *told) for name, cases in REFUSED.items() for told in cases),
        *((name, {}, told) for name, told in CONTRADICTIONS.items()),
    ],
)
def test_what_an_architecture_cannot_do_is_refused_with_the_nearest_choice(architecture, options, message):
    with pytest.raises(WorkbenchError, match=message):
        compose(architecture, SMALL, **options)


def test_grouped_heads_of_the_config_and_of_the_architecture_must_agree():
    assert compose("gqa", SMALL.replace(n_key_value_heads=2)).config.n_key_value_heads == 2
    with pytest.raises(
        WorkbenchError, match="query_group=4 means 1 key-value heads, but the config has n_key_value_heads=2"
    ):
        compose("mqa", SMALL.replace(n_key_value_heads=2))
