"""Every architecture equals itself by another path, obeys causality, starts as published, and copies whole."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from inputs import SMALL, WIDE, tokens
from seams import COVERING, TOGETHER

from workbench.hook_names import ACTIVATIONS, position_axis
from workbench.models import build

# ---- two paths, one result -------------------------------------------------------------------------------------------


def test_fused_attention_equals_eager_in_values_and_gradients(any_architecture, awake):
    model = awake(any_architecture, dtype=WIDE, config={} if "qa" in any_architecture else {"n_key_value_heads": 2})
    ids = tokens(model, 33)
    results = []
    for hooks in ([], [(lambda name: name.endswith("hook_pattern"), lambda pattern, hook: None)]):
        model.zero_grad()
        with model.hooks(hooks):
            logits = model(ids)
            logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, atol=1e-12, rtol=1e-9)


# ---- what the named activations are ----------------------------------------------------------------------------------


@pytest.mark.fast(11)
@pytest.mark.parametrize("architecture", [*COVERING, "resformer+cross_layer"])
def test_activations_obey_their_identities(awake, architecture):
    """Queries, keys and values that a layer attends with, computed from what it reads, its own and its coefficients."""
    heads = {} if "qa" in architecture else {"n_key_value_heads": 2}  # query_group says how many
    model = awake(architecture, dtype=WIDE, config={"n_layers": 4, **heads})
    _, cache = model.run_with_cache(tokens(model, 7))
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}.attn."

        def found(point, at=at):
            return cache.cache_dict.get(at + point)

        for tensor in ("q", "k", "v"):
            point, own = f"hook_{tensor}", found(f"own.hook_{tensor}")
            sources = [
                cache.cache_dict[n]
                for n in sorted(model.hook_dict)
                if re.fullmatch(rf"{at}(first|source\.\d+|table)\.{point}", n)
            ]
            weights, by_token = found(f"{point}_mix"), found(f"{point}_weights")
            if weights is not None:
                terms = sources if own is None else [*sources[: len(weights) - 1], own]
                mixed = sum(w * x for w, x in zip(weights, terms, strict=True))
                torch.testing.assert_close(found(point), mixed, atol=1e-13, rtol=0)
            elif by_token is not None:
                mixed = sum(w[..., None] * x for w, x in zip(by_token.unbind(-1), [*sources, own], strict=True))
                torch.testing.assert_close(found(point), mixed, atol=1e-13, rtol=0)
            elif own is not None and own.shape != found(point).shape:
                assert torch.equal(found(point), torch.cat((own, sources[0][:, :, own.shape[2] :]), 2))
            elif own is not None:
                assert torch.equal(found(point), own)
            elif not hasattr(block.attn, f"{tensor}_proj"):
                assert any(torch.equal(found(point), x) for x in sources)
            if (first := found(f"first.{point}")) is not None:
                assert torch.equal(first, cache[tensor, 0])


@pytest.mark.fast(6)
@pytest.mark.parametrize(
    ("architecture", "options"), [*((a, {}) for a in TOGETHER), ("residual_attention", {"attn_mix": "logit"})]
)
def test_every_hook_point_fires_once_with_its_positions_where_the_vocabulary_says(tiny, architecture, options):
    """13 positions: no other axis of these tensors is as long."""
    model = tiny(architecture, config={"n_layers": 4}, **options)
    seen = []
    hooks = [(lambda name: True, lambda x, hook: seen.append((hook.name, x.shape)))]
    model.run_with_hooks(tokens(model, 13), fwd_hooks=hooks)
    assert sorted(name for name, _ in seen) == sorted(model.hook_dict)
    for name, shape in seen:
        axis = position_axis(name)
        assert (13 in shape) == (axis is not None), name
        assert axis is None or shape[axis] == 13, name


@pytest.mark.slow
def test_named_activations_exist_and_have_their_axes():
    """Each name's hook point stands in some architecture, with as many axes as it says."""
    shapes = {}
    for architecture in [*COVERING, "residual_k", "resformer+share_q"]:
        model = build(architecture, SMALL.replace(n_ctx=16, d_model=16, d_vocab=16, d_mlp=16))
        hooks = [(lambda name: True, lambda x, hook: shapes.update({hook.name: x.shape}))]
        model.run_with_hooks(torch.arange(10).view(2, 5), fwd_hooks=hooks)
    for name, activation in ACTIVATIONS.items():
        found = [shapes[hook] for layer in range(4) if (hook := activation.hook.format(layer=layer)) in shapes]
        of_observed = ("latent", "null", "v_weights", "router_logits", "router_scores", "expert_weights")
        assert found or not activation.hook or name in of_observed, name
        assert all(len(shape) == len(activation.axes.split()) for shape in found), name
        axis = position_axis(activation.hook)
        wanted = "query" if "query" in activation.axes else "pos"
        if activation.hook:
            assert (None if axis is None else activation.axes.split()[axis]) == (None if axis is None else wanted), name


# ---- at initialisation -----------------------------------------------------------------------------------------------


def test_one_seed_gives_every_architecture_the_same_tensors(some_architecture):
    config = SMALL.replace(d_vocab=64)
    vanilla, model = build("transformer", config, seed=3), build(some_architecture, config, seed=3)
    mine, theirs = dict(model.named_parameters()), dict(vanilla.named_parameters())
    shared = {name for name in mine.keys() & theirs.keys() if mine[name].shape == theirs[name].shape}
    # borrowed, of fewer heads, or norms that stand elsewhere
    assert all(re.search(r"attn\.[qkv]_proj|ln[12]\.", name) for name in theirs.keys() - shared)
    assert all(torch.equal(mine[name], theirs[name]) for name in shared)
    other = dict(build(some_architecture, config, seed=4).named_parameters())
    assert not torch.equal(mine["embed.weight"], other["embed.weight"])
    matrix = mine["blocks.2.mlp.up_proj.weight"]
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(matrix, mine["blocks.1.mlp.up_proj.weight"])


# ---- types, copies, modes --------------------------------------------------------------------------------------------


def test_a_run_in_inference_mode_leaves_the_model_trainable(tiny):
    model = tiny()
    with torch.inference_mode():
        model(torch.arange(6))
    model(torch.arange(6), return_type="loss").backward()


@pytest.mark.slow
@pytest.mark.fast(7)
@pytest.mark.parametrize(
    ("architecture", "pickled"),
    [*((name, False) for name in TOGETHER), ("transformer", True), ("cross_layer_all", True)],
)
def test_a_copy_is_whole_and_independent(architecture, awake, pickled):
    model = awake(architecture)
    ids = tokens(model, 6)
    before = model(ids)
    copied = pickle.loads(pickle.dumps(model)) if pickled else copy.deepcopy(model)  # noqa: S301
    assert copied.lock is not model.lock
    assert torch.equal(copied(ids), before)
    assert (copied.options, copied.config) == (model.options, model.config)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert copied(ids).abs().max() == 0
    assert torch.equal(model(ids), before)
    with copied.hooks([("hook_embed", lambda x, hook: x + 1)]):
        assert torch.equal(model(ids), before)
        assert copied.run_with_cache(ids, names_filter="hook_embed")[1]["embed"].min() == 1


def test_replacing_a_submodule_takes_effect(tiny):
    model = tiny()
    ids = torch.arange(6)
    before = model(ids)
    model.blocks[1].mlp.up_proj = torch.nn.Linear(32, 48, bias=False)
    assert not torch.allclose(model(ids), before)
