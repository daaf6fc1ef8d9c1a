"""Experiments on whole models: each against an independent way to the same number."""

from __future__ import annotations

import math

import pytest
import torch
from seams import TOGETHER

from workbench.data.sources import Sample
from workbench.interventions import INTERVENTIONS

WIDE = torch.float64


def run(name, model, ids, batch=3):
    return list(INTERVENTIONS[name].function(model, Sample(ids, list(range(len(ids))), "x"), None, batch))


def found(rows, **axes):
    (row,) = [r for r in rows if all(r.get(k) == v for k, v in axes.items())]
    return row["value"]


@pytest.fixture
def ids():
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(1))


def document_losses(model, ids):
    with torch.no_grad():
        return model(ids, return_type="loss", loss_per_token=True).mean(1)


# ---- the lens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["resformer", "denseformer"])
def test_the_last_lens_is_the_model_itself(tiny, ids, architecture):
    model = tiny(architecture, dtype=WIDE)
    rows = run("logit_lens", model, ids)
    assert found(rows, layer=3, variant=None) == pytest.approx(document_losses(model, ids).mean().item(), abs=1e-10)
    assert found(rows, layer=3, variant="kl") == pytest.approx(0, abs=1e-10)
    log_p = model(ids)[:, :-1].log_softmax(-1)
    own = log_p.gather(-1, ids[:, 1:, None])
    assert found(rows, layer=3, variant="rank") == pytest.approx((log_p > own).sum(-1).double().mean().item())
    assert {r["layer"] for r in rows} == {0, 1, 2, 3}


def test_the_first_lens_reads_the_embedding(tiny, ids):
    model = tiny(dtype=WIDE)
    x = model.embed.weight[ids[:, :-1]]
    x = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * model.ln_final.weight
    loss = torch.nn.functional.cross_entropy((x @ model.W_U).flatten(0, 1), ids[:, 1:].flatten())
    assert found(run("logit_lens", model, ids), layer=0, variant=None) == pytest.approx(loss.item(), abs=1e-10)


@pytest.mark.parametrize("architecture", ["resformer", "value_embedding", "cross_layer"])
def test_attributions_sum_to_the_target_logit_over_the_mean(tiny, ids, architecture):
    model = tiny(architecture, dtype=WIDE)
    logits = model(ids)[:, :-1]
    true = (logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.mean(-1)).mean()
    rows = run("logit_attribution", model, ids)
    assert sum(r["value"] for r in rows) == pytest.approx(true.item(), abs=1e-9)
    assert {"resformer": "attn.first", "value_embedding": "attn.table", "cross_layer": "attn.cross"}.get(
        architecture, "embed"
    ) in {r["part"] for r in rows}


# ---- what is lost without a path -------------------------------------------------------------------------------------


def test_removing_the_shortcut_is_a_coefficient_of_zero(tiny, ids):
    model, without = tiny("resformer", dtype=WIDE), tiny("resformer", dtype=WIDE, lambda_v1=0.0)
    without.load_state_dict(model.state_dict())
    change = (document_losses(without, ids) - document_losses(model, ids)).mean()
    rows = run("skip_ablation", model, ids)
    together = [r for r in rows if "layer" not in r and r["variant"] == "zero"]
    assert together[0]["value"] == pytest.approx(change.item(), abs=1e-12)
    one = tiny("resformer", dtype=WIDE, layers=[1])
    one.load_state_dict(model.state_dict())
    with one.hooks([("blocks.2.attn.own.hook_v", lambda v, hook: 0.5 * v)]):
        alone = (document_losses(one, ids) - document_losses(model, ids)).mean()
    assert found(rows, layer=2, variant="zero") == pytest.approx(alone.item(), abs=1e-12)


def test_first_values_of_another_document_or_position_are_really_others(tiny):
    """Documents that are all alike lose nothing by exchange; positions that are all alike nothing by shuffling."""
    model = tiny("svformer", dtype=WIDE)
    same_documents = torch.randint(61, (1, 9), generator=torch.Generator().manual_seed(0)).expand(4, -1).contiguous()
    rows = run("skip_ablation", model, same_documents, batch=4)
    assert found(rows, layer=1, variant="other") == pytest.approx(0, abs=1e-12)
    assert abs(found(rows, layer=1, variant="shuffled")) > 1e-6
    rows = run("skip_ablation", model, torch.full((3, 9), 7), batch=3)
    assert found(rows, layer=1, variant="shuffled") == pytest.approx(0, abs=1e-12)
    assert found(rows, layer=1, variant="mean") == pytest.approx(0, abs=1e-12)


def test_models_without_a_value_path_have_no_skip_to_ablate(tiny, ids):
    assert run("skip_ablation", tiny(), ids) == []


@pytest.mark.parametrize(("part", "projection"), [("attention", "attn.o_proj"), ("mlp", "mlp.down_proj")])
def test_removing_a_sublayer_is_an_output_matrix_of_zeros(tiny, ids, part, projection):
    model, without = tiny("resformer", dtype=WIDE), tiny("resformer", dtype=WIDE)
    with torch.no_grad():
        without.get_submodule(f"blocks.1.{projection}").weight.zero_()
    change = (document_losses(without, ids) - document_losses(model, ids)).mean().item()
    assert found(run("sublayer_removal", model, ids), layer=1, part=part) == pytest.approx(change, abs=1e-12)


def test_cross_layer_approximation_against_the_trained_form(tiny, ids):
    """In layer 1 the exact output is that of the cross-layer architecture with the same weights, and same-key its own."""
    model, exact, same = (
        tiny(a, dtype=WIDE, **o) for a, o in (("transformer", {}), ("cross_layer", {}), ("same_key", {}))
    )
    z = {}
    for name, m in (("exact", exact), ("same", same), ("plain", model)):
        m.load_state_dict(model.state_dict())
        z[name] = m.run_with_cache(ids)[1]["z", 1].flatten(2)
    cosine = torch.cosine_similarity(z["exact"], z["same"], dim=-1).mean().item()
    rows = run("cross_layer_approximation", model, ids)
    assert found(rows, layer=1, variant="same_key") == pytest.approx(cosine, abs=1e-12)
    alone = torch.cosine_similarity(z["exact"], z["plain"], dim=-1).mean().item()
    assert found(rows, layer=1, control="own") == pytest.approx(alone, abs=1e-12)


def test_same_key_is_perfect_where_two_layers_have_one_key(tiny, ids):
    model = tiny("share_k", dtype=WIDE)
    rows = run("cross_layer_approximation", model, ids)
    assert found(rows, layer=1, variant="same_key") == pytest.approx(1, abs=1e-12)
    assert found(rows, layer=1, variant="identity") < 0.99


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_activation_gradients_do_not_depend_on_the_batch_and_equal_autograd(tiny, ids):
    model = tiny("resformer", dtype=WIDE)
    a, b = (run("activation_gradient_norm", model, ids, batch=n) for n in (5, 2))
    for one, other in zip(a, b, strict=True):
        assert one["value"] == pytest.approx(other["value"], rel=1e-9)
    norms = []
    for row in ids:
        kept = {}
        with model.hooks(
            [("blocks.2.hook_resid_pre", lambda x, hook, kept=kept: kept.setdefault("x", x.detach().requires_grad_()))]
        ):
            model(row[None], return_type="loss").backward()
        norms.append(kept["x"].grad.norm())
    assert found(a, site="stream", layer=2, variant=None) == pytest.approx(torch.stack(norms).mean().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("architecture", "options", "made"),
    [
        ("denseformer", {}, {0: "hook_embed"}),
        ("denseformer", {"period": 2}, {0: "hook_embed", 1: "blocks.0.hook_resid_post"}),
        ("residual_hidden", {}, {0: "hook_embed"}),
    ],
)
def test_a_streams_gradient_counts_the_averages_that_read_it_past_its_block(awake, ids, architecture, options, made):
    model = awake(architecture, dtype=WIDE, **options)
    rows = run("activation_gradient_norm", model, ids[:1])
    for layer, point in made.items():
        own = f"blocks.{layer}.hook_resid_pre"
        _, _, grads = model.run_with_grads(ids[:1], [point, own])
        assert found(rows, site="stream", layer=layer, variant=None) == pytest.approx(grads[point].norm().item())
        assert not torch.allclose(grads[point], grads[own], rtol=1e-3)


@pytest.mark.parametrize("architecture", TOGETHER)
def test_gradient_shares_of_the_first_values_sum_to_one(tiny, ids, architecture):
    rows = run("shortcut_gradient_share", tiny(architecture, dtype=WIDE), ids)
    assert sum(r["value"] for r in rows) == pytest.approx(1, abs=1e-9)
    assert rows[0]["layer"] == 0


def test_gradient_share_of_a_layer_is_its_coefficient_times_its_own_gradient(tiny, ids):
    model = tiny("resformer", dtype=WIDE, lambda_v1=0.3)
    names = [f"blocks.{n}.attn.hook_v" for n in range(3)]
    share = []
    for row in ids:
        _, _, grads = model.run_with_grads(row[None], names)
        g = [grads[n].flatten() for n in names]
        share.append((0.3 * g[2] @ g[0] / (g[0] @ g[0])).item())
    rows = run("shortcut_gradient_share", model, ids)
    assert found(rows, layer=2) == pytest.approx(sum(share) / len(share), rel=1e-9)


def test_a_layer_that_mixes_and_attends_to_the_first_values_counts_both_branches(tiny, ids, monkeypatch):
    assert [r["layer"] for r in run("shortcut_gradient_share", tiny("cross_layer", dtype=WIDE), ids)] == [0, 1]
    model, row = tiny("resformer+cross_layer", dtype=WIDE), ids[:1]
    origin, *both = (f"blocks.{at}.hook_v" for at in ("0.attn", "1.attn.source.0", "1.attn.cross"))
    _, _, grads = model.run_with_grads(row, [origin])
    with model.hooks([(name, lambda value, hook: value.detach()) for name in both]):
        _, _, rest = model.run_with_grads(row, [origin])
    missing = 1 - (rest[origin] * grads[origin]).sum() / grads[origin].square().sum()
    rows = run("shortcut_gradient_share", model, row)
    assert found(rows, layer=1) == pytest.approx(missing.item(), rel=1e-9)
    # by hand: g = (3, 4), through the mixed values (1, 0), through the attention (0, 2), layer 2 nothing:
    # (3 * 1 + 4 * 2) / 25 = 0.44
    by_hand = {origin: [3.0, 4.0], both[0]: [1.0, 0.0], both[1]: [0.0, 2.0]}
    given = lambda ids, names, loss: (None, {}, {n: torch.tensor([by_hand.get(n, [0.0, 0.0])]) for n in names})  # noqa: E731
    monkeypatch.setattr(model, "run_with_grads", given)
    rows = run("shortcut_gradient_share", model, row)
    assert [found(rows, layer=n) for n in range(3)] == pytest.approx([0.56, 0.44, 0.0])


# ---- likeness of layers, tokens found again, what a sink writes --------------------------------------------------------


def test_layer_similarity_is_the_cosine_of_a_tokens_vectors(tiny, ids):
    model = tiny(dtype=WIDE)
    _, cache = model.run_with_cache(ids)
    rows = run("layer_similarity", model, ids)
    a, b = cache["resid_pre", 2], cache["resid_pre", 1]
    cosine = torch.cosine_similarity(a, b, dim=-1).mean().item()
    assert found(rows, site="stream", layer=2, source=1, unit="cosine") == pytest.approx(cosine, abs=1e-12)
    assert found(rows, site="stream", layer=2, source=2, unit="cosine") == pytest.approx(1)


def test_cka_equals_its_gram_form_and_ignores_rotation_and_scale(tiny, ids):
    model = tiny("resformer", dtype=WIDE)
    _, cache = model.run_with_cache(ids)

    def gram(x):
        x = x.flatten(2).flatten(0, 1)
        x = x - x.mean(0)
        return x @ x.T

    k, m = (
        gram(cache["own_v"] if "own_v" in cache else cache["blocks.2.attn.own.hook_v"]),
        gram(cache["blocks.1.attn.own.hook_v"]),
    )
    true = ((k * m).sum() / (k.norm() * m.norm())).item()
    rows = run("layer_similarity", model, ids, batch=2)
    assert found(rows, site="own_v", layer=2, source=1, variant="cka") == pytest.approx(true, abs=1e-10)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=WIDE))[0]
    with torch.no_grad():
        weight = model.blocks[2].attn.v_proj.weight
        weight.copy_(3 * turn @ weight)
    with model.hooks([("blocks.2.attn.hook_v", lambda v, hook: cache["v", 2])]):
        turned = run("layer_similarity", model, ids, batch=5)
    assert found(turned, site="own_v", layer=2, source=1, variant="cka") == pytest.approx(true, abs=1e-10)


def test_the_embedding_and_first_values_name_their_token_and_noise_does_not(tiny, ids):
    rows = run("nearest_embedding", tiny("svformer", dtype=WIDE), ids)
    assert found(rows, site="stream", layer=0, variant="top_1") == 1
    for layer in range(3):
        assert found(rows, site="v", layer=layer, variant="top_1") == 1
    chance = found(rows, site="stream", layer=0, control="chance")
    assert chance == pytest.approx(sum(1 / r for r in range(1, 62)) / 61)
    model = tiny(dtype=WIDE)
    generator = torch.Generator().manual_seed(3)
    with model.hooks(
        [("blocks.2.hook_resid_pre", lambda x, hook: torch.randn(x.shape, generator=generator, dtype=WIDE))]
    ):
        rows = run("nearest_embedding", model, ids, batch=5)
    assert found(rows, site="stream", layer=2, unit="1 / rank", control=None) < 4 * chance


def test_a_massive_state_emerges_where_it_grows_most(tiny, ids):
    """Silent blocks leave the stream as it is; then the first state is ten-fold after the second, and doubled after the third."""
    model = tiny(dtype=WIDE)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    times = lambda by: lambda x, hook: torch.cat((by * x[:, :1], x[:, 1:]), 1)  # noqa: E731
    with model.hooks([("blocks.2.hook_resid_pre", times(10)), ("blocks.2.hook_resid_post", times(2))]):
        rows = run("massive_emergence", model, ids)
    for variant, layer in ((None, "layer"), ("dimension", "dimension_layer")):
        jumps = [found(rows, variant=variant, layer=n, control=None) for n in range(3)]
        assert jumps == pytest.approx([0, math.log(10), math.log(2)], abs=1e-12)
        assert [found(rows, variant=variant, layer=n, control="others") for n in range(3)] == pytest.approx([0, 0, 0])
        assert found(rows, variant=layer) == 1
    assert [found(rows, variant="invariance", layer=n) for n in range(3)] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("architecture", ["transformer", "attention_residuals"])
def test_values_that_read_no_embedding_are_those_of_a_stream_without_it(awake, ids, architecture):
    """The other way: values made by hand of the stream less what the embedding says of each token, put in at their hook point."""
    model = awake(architecture, dtype=WIDE).requires_grad_(False)
    rows, plain = run("reader_ablation", model, ids), document_losses(model, ids)
    assert len(rows) == 2 * 2 * 3
    _, cache = model.run_with_cache(ids)
    for layer in (1, 2):
        weight = cache[f"blocks.{layer - 1}.hook_depth_weights"][..., 0] if architecture != "transformer" else 1.0
        said = weight * cache["hook_embed"]
        read = model.blocks[layer].ln1(cache[f"blocks.{layer}.hook_resid_pre"] - said + said.mean(1, keepdim=True))
        v = model.blocks[layer].attn.v_proj(read).unflatten(-1, (4, -1))
        with model.hooks([(f"blocks.{layer}.attn.hook_v", lambda x, hook, v=v: v)]):
            change = document_losses(model, ids) - plain
        assert found(rows, site="v", layer=layer, part="embed") == pytest.approx(float(change.mean()), abs=1e-12)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_gain_of_several_streams_by_hand(tiny, ids):
    """M = [[2, -1], [0, 1]] at attention alone: M, then M^2 = [[4, -3], [0, 1]]; of the third layer the MLP sums them up."""
    model = tiny("hyper_connections", streams=2)
    plain = run("stream_gain", model, ids)
    assert [r["value"] for r in plain] == pytest.approx([1] * 6, abs=0.1)
    put = lambda rows: lambda x, hook: torch.tensor(rows, dtype=x.dtype).expand_as(x)  # noqa: E731
    grows, stays, sums = [[2.0, -1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]]
    hooks = [(f"blocks.{n}.hook_attn_h_res", put(grows if n < 2 else stays)) for n in range(3)]
    hooks += [(f"blocks.{n}.hook_mlp_h_res", put(stays if n < 2 else sums)) for n in range(3)]
    with model.hooks(hooks):
        rows = run("stream_gain", model, ids)
    assert [found(rows, layer=n, variant=None) for n in range(3)] == pytest.approx([3, 7, 6])
    assert [found(rows, layer=n, variant="backward") for n in range(3)] == pytest.approx([2, 4, 4])
    assert [r["value"] for r in run("stream_gain", tiny("mhc"), ids)] == pytest.approx([1] * 6, abs=1e-3)
    assert run("stream_gain", tiny(), ids) == []


def test_a_head_that_only_sees_a_drained_first_token_writes_nothing_and_a_full_one_everything(tiny, ids):
    model = tiny(dtype=WIDE)
    only_first = lambda s, hook: s.masked_fill(torch.arange(s.shape[-1]) > 0, -torch.inf)  # noqa: E731
    with model.hooks([("blocks.1.attn.hook_attn_scores", only_first)]):
        rows = run("sink_output", model, ids)
    assert found(rows, layer=1, head=2, variant=None) == pytest.approx(1)
    assert found(rows, layer=1, head=2, variant="spread") == pytest.approx(0, abs=1e-9)

    def drained(v, hook):
        v = v.clone()
        v[:, 0] = 0
        return v

    with model.hooks([("blocks.1.attn.hook_v", drained)]):
        rows = run("sink_output", model, ids)
    assert found(rows, layer=1, head=2, variant=None) == 0
    assert found(rows, layer=1, head=2, variant="spread") > 0.1
