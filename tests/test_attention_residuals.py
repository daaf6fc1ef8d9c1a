"""Depth attention: its special cases, what its weights are and may be set to, and that they are the path weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from inputs import WIDE, tokens

from workbench.data.data_sources import Sample
from workbench.errors import BadData, WorkbenchError
from workbench.interventions import INTERVENTIONS
from workbench.models.decomposition import decompose

FORMS = [{}, {"depth_blocks": 3, "depth_heads": 4}, {"depth_blocks": 1}, {"depth_form": "delta", "depth_heads": 2}]


@pytest.mark.parametrize("options", FORMS)
def test_the_start_is_the_vanilla_decoder_but_for_eps(tiny, options):
    """Equal weights make means of sums, and the norms take the factor away."""
    config, ids = {"rms_norm_eps": 1e-30}, torch.arange(11)[None]
    vanilla, model = (
        tiny(n, dtype=WIDE, config=config, **o) for n, o in (("transformer", {}), ("attention_residuals", options))
    )
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-12, rtol=0)
    _, cache = model.run_with_cache(ids, names_filter=lambda n: n.endswith("depth_weights"))
    for n, x in cache.items():
        last, delta = n == "blocks.2.hook_depth_weights", "depth_form" in options
        equal = 1 / x.shape[-1] + delta if not (delta and last) else 1.0
        torch.testing.assert_close(x, torch.full_like(x, equal), atol=1e-15, rtol=0)


def test_with_nothing_picked_the_delta_form_is_the_vanilla_decoder(awake):
    ids = torch.arange(11)[None]
    vanilla, model = awake(dtype=WIDE), awake("attention_residuals", dtype=WIDE, depth_form="delta")
    with torch.no_grad():
        for name, p in vanilla.named_parameters():
            model.get_parameter(name).copy_(p)
    assert (model(ids) - vanilla(ids)).abs().max() > 0.01
    nothing = [(lambda n: n.endswith("depth_weights"), lambda w, hook: torch.ones_like(w))]
    torch.testing.assert_close(model.run_with_hooks(ids, fwd_hooks=nothing), vanilla(ids), atol=1e-12, rtol=0)


def test_a_block_for_each_sublayer_is_no_block(awake):
    full, blocks = (awake("attention_residuals", dtype=WIDE, depth_blocks=n) for n in (None, 6))
    assert torch.equal(full(tokens(full, 9)), blocks(tokens(full, 9)))


@pytest.mark.parametrize("options", FORMS)
def test_the_weights_of_a_run_are_its_path_weights(awake, options):
    model = awake("attention_residuals", dtype=WIDE, **options)
    ids = tokens(model, 7)
    _, cache = model.run_with_cache(ids)
    for by in ("layer", "head", "value_path"):
        for to in (1, 2, None, "logits"):
            assert decompose(model, cache, to, by).error < 1e-10
        torch.testing.assert_close(
            decompose(model, ids, by=by, pos=-2).parts, decompose(model, cache, by=by).parts[:, :, -2:-1]
        )
    single = model.run_with_cache(ids[:1], remove_batch_dim=True)[1]
    torch.testing.assert_close(decompose(model, single).parts, decompose(model, cache).parts[:, 0])
    for name in ("decompose_resid", "stack_head_results"):
        options = {"incl_remainder": True} if name == "stack_head_results" else {}
        torch.testing.assert_close(getattr(cache, name)(3, **options).sum(0), cache["resid_post", 2])
        torch.testing.assert_close(getattr(single, name)(3, **options).sum(0), single["resid_post", 2])
    with pytest.raises(BadData, match="hook_mid_depth_weights is missing: weights depend on the tokens"):
        model.stream_paths(3)


def test_weights_set_by_a_hook_are_the_ones_used_and_taken_apart(awake):
    """Only the embedding is read from block 1 on: nothing of what the sublayers said is left, and the parts know."""
    model = awake("attention_residuals", dtype=WIDE, depth_heads=2)
    ids = tokens(model, 7)

    def first(weights, hook):
        return torch.zeros_like(weights).index_fill_(-1, torch.tensor(0), 1.0)

    with model.hooks([("blocks.2.hook_depth_weights", first)]):
        logits, cache = model.run_with_cache(ids)
        found = decompose(model, ids, by="layer")
    torch.testing.assert_close(logits, model.unembed(model.ln_final(cache["embed"])))
    assert found.error < 1e-12
    assert found["embed"].abs().max() > 0
    assert found.parts[1:].abs().max() == 0


def test_neurons_have_no_vector_where_each_channel_has_its_weight(awake):
    cache = awake("attention_residuals", depth_heads=4).run_with_cache(torch.arange(5))[1]
    with pytest.raises(WorkbenchError, match="use complete MLPs"):
        cache.stack_neuron_results(3)
    cache.get_full_resid_decomposition(3, expand_neurons=False)


def of(model, name, ids, batch=2):
    rows = INTERVENTIONS[name].function(model, Sample(ids, range(len(ids)), "x"), None, batch)
    axes = ("site", "layer", "head", "part", "variant", "control")
    return {tuple(r.get(a) for a in axes): r["value"] for r in rows}


@pytest.mark.parametrize("options", [{}, {"depth_heads": 2, "depth_form": "delta"}])
def test_routing_is_what_the_tokens_weights_are(awake, options):
    model = awake("attention_residuals", dtype=WIDE, **options)
    ids = torch.cat([tokens(model, 7)] * 2)[:3]
    rows = of(model, "depth_routing", ids)
    weights = model.run_with_cache(ids, names_filter="blocks.1.hook_mid_depth_weights")[1]["mid_depth_weights", 1]
    for h in range(weights.shape[2]):
        shares = [[[x / sum(w) for x in w] for w in doc] for doc in weights[:, :, h].tolist()]
        place = "mid_depth_weights", 1, h if options else None
        flat = [w for doc in shares for w in doc]
        entropies = [-sum(x * math.log(x) for x in w) / math.log(4) for w in flat]
        assert rows[*place, None, "entropy", None] == pytest.approx(sum(entropies) / len(flat))
        assert rows[*place, None, None, "uniform"] == 1 / 4
        for j, part in enumerate(("embed", "0_attn_out", "0_mlp_out", "1_attn_out")):
            assert rows[*place, part, None, None] == pytest.approx(sum(w[j] for w in flat) / len(flat))
            spread = [sum(w[j] ** 2 for w in d) / 7 - (sum(w[j] for w in d) / 7) ** 2 for d in shares]
            assert rows[*place, part, "variance", None] == pytest.approx(sum(spread) / 3)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"depth_heads": 2, "depth_blocks": 2}])
def test_an_ablated_source_is_missing_from_one_reader_alone(awake, options):
    """Of the final norm, whose input is a sum that can be made by hand; of an earlier reader, that nothing put back is nothing."""
    model = awake("attention_residuals", dtype=WIDE, **options)
    ids = torch.cat([tokens(model, 9), tokens(model, 9).flip(1)])
    rows = of(model, "source_ablation", ids, batch=3)
    _, cache = model.run_with_cache(ids)
    name, labels = list(model.residual.depth_sources().items())[-1]
    order = ["embed", *(f"{n}_{k}_out" for n in range(3) for k in ("attn", "mlp"))]
    outputs = [cache["hook_embed"], *(cache[f"blocks.{n}.hook_{k}_out"] for n in range(3) for k in ("attn", "mlp"))]
    ends = [[order.index(end) for end in label.split(":")] for label in labels]
    ys = [sum(outputs[end[0] : end[-1] + 1]) for end in ends]
    weights = cache[name].repeat_interleave(model.config.d_model // cache[name].shape[2], 2)

    def loss(weights, ys):
        x = sum(w * y for w, y in zip(weights.unbind(-1), ys, strict=True))
        logits = model.unembed(model.ln_final(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    plain = loss(weights, ys)
    assert float(plain) == pytest.approx(float(model(ids, return_type="loss")))
    for j, label in enumerate(labels):
        place = name.split(".")[2].removeprefix("hook_"), 2, None, label
        without = weights.clone()
        without[..., j] = 0
        without *= weights.sum(-1, keepdim=True) / without.sum(-1, keepdim=True)
        assert rows[*place, "zero", None] == pytest.approx(float(loss(without, ys) - plain))
        replaced = [*ys[:j], ys[j].mean((0, 1)), *ys[j + 1 :]]
        assert rows[*place, "mean", None] == pytest.approx(float(loss(weights, replaced) - plain))
    ranked = [value for key, value in rows.items() if "rank_correlation" in key]
    assert ranked
    assert all(-1 <= value <= 1 for value in ranked)
    assert of(awake("denseformer"), "source_ablation", ids) == {}
