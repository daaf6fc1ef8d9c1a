"""Mixtures of experts: router logits and expert weights as activations of observed decoders, and measures of the routing."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from foreign import hugging_face
from observed import see
from prompt_ids import some_ids
from test_extremes import check

import workbench
from workbench.checkpoints.transformers_modules import quiet
from workbench.errors import ObservedInstead, WorkbenchError
from workbench.metrics.experts import expert_load, first_token_experts, router_entropy
from workbench.runs.checkpoint_import import import_run
from workbench.views import Link, Source, drawings

SIX = {"num_experts": 6, "num_experts_per_tok": 2}
FAMILIES = {  # options, router, its scores, whether they are divided by their sum, a factor, number of groups and of the best groups
    "Mixtral": ({"num_local_experts": 6, "num_experts_per_tok": 2}, "mlp.gate", "softmax", True, 1.0, 1, 1),
    "Qwen3Moe": (
        SIX | {"moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": False},
        "mlp.gate", "softmax", False, 1.0, 1, 1,
    ),
    "GptOss": ({"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}, "mlp.router", "softmax", True, 1.0, 1, 1),
    "MiniMaxM2": (
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 8},
        "mlp.gate", "sigmoid", True, 1.0, 1, 1,
    ),
    "DeepseekV3": (
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
         "first_k_dense_replace": 1, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
        "mlp.gate", "sigmoid", True, 2.5, 4, 2,
    ),
    "Llama4": (
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size_mlp": 16},
        "feed_forward.router", "sigmoid", False, 1.0, 1, 1,
    ),
}  # fmt: skip


def observed_experts(name, **changes):
    options, router, *rule = FAMILIES[name]
    config = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = hugging_face(kind, getattr(transformers, config), **options | changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in (*model.named_parameters(), *model.named_buffers()):
            if router in key or "correction_bias" in key:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "correction" in key else 1.0))
    return model, router, rule


def routed(x, router, bias, top, scores, normed, factor, groups, best):
    """Logits, scores and weights of all experts, token by token as papers write them."""
    logits = x @ router.weight.T + (router.bias if getattr(router, "bias", None) is not None else 0)
    made = logits.softmax(-1) if scores == "softmax" else 1 / (1 + (-logits).exp())
    weights = torch.zeros_like(made)
    for t, row in enumerate((made + bias).tolist()):
        parts = [range(g * len(row) // groups, (g + 1) * len(row) // groups) for g in range(groups)]
        parts = sorted(parts, key=lambda part: -sum(sorted((row[e] for e in part), reverse=True)[:2]))[:best]
        experts = sorted((e for part in parts for e in part), key=lambda e: -row[e])[:top]
        total = sum(made[t, e] for e in experts) if normed else 1.0
        for e in experts:
            weights[t, e] = factor * made[t, e] / total
    return logits, made, weights


@pytest.mark.parametrize("name", FAMILIES)
def test_the_router_is_shown_as_it_routes(name):
    foreign, router, rule = observed_experts(name)
    model = see(foreign, torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(5)))
    ids, point = torch.cat([some_ids(9), some_ids(9, seed=2)]), "blocks.1.mlp.hook_{}"
    seen, module = [], foreign.get_submodule(f"model.layers.1.{router}")
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args))
    sites = "router_logits", "router_scores", "expert_weights"
    _, cache = model.run_with_cache(ids, [point.format(site) for site in sites])
    handle.remove()
    bias = getattr(module, "e_score_correction_bias", seen[-1][1] if len(seen[-1]) > 1 else 0.0)
    with torch.no_grad():
        expected = routed(seen[-1][0].reshape(18, -1), module, bias, module.top_k, *rule)
    for site, truth in zip(sites, expected, strict=True):
        assert site in model.sites["site"].to_numpy()
        torch.testing.assert_close(cache[site, 1, "mlp"].flatten(0, 1), truth, rtol=1e-5, atol=1e-6)
    taken = expected[2].ne(0)
    assert name not in ("MiniMaxM2", "DeepseekV3") or not torch.equal(
        taken, torch.zeros_like(taken).scatter(-1, expected[1].topk(module.top_k, -1).indices, True)
    ), "the bias and the groups change no selection"
    frame = workbench.measure(model, ["router_entropy", "expert_load"], ids)
    rows = frame[(frame.layer == 1) & frame.variant.isna() & frame.control.isna()]
    shares = expected[1] / expected[1].sum(-1, keepdim=True)
    share = -(shares * shares.log()).sum(-1).mean() / torch.tensor(float(shares.shape[1])).log()
    assert rows[rows.metric == "router_entropy"]["value"].item() == pytest.approx(share.item(), abs=1e-5)
    loads = rows[rows.metric == "expert_load"].sort_values("index")["value"]
    assert loads.to_numpy() == pytest.approx((taken.sum(0) / taken.sum() * shares.shape[1]).numpy(), abs=1e-6)
    assert set(frame.layer) == ({1} if name == "DeepseekV3" else {0, 1}), "a dense layer has no router"


def test_what_a_router_does_not_show_is_refused_with_the_reason(monkeypatch):
    ids, example = some_ids(9), torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(5))
    model = see(
        observed_experts("Mixtral", num_experts_per_tok=1)[0], example
    )  # one expert, divided by itself: weight 1
    with (
        model.hooks([("blocks.1.mlp.hook_router_logits", lambda x, hook: 2 * x)]),
        pytest.raises(WorkbenchError, match="can be read, not replaced"),
    ):
        model(ids)
    assert "blocks.1.mlp.hook_expert_weights" in model.hook_dict
    with pytest.raises(WorkbenchError, match=r"hook_router_scores does not exist: unknown scores \(one expert"):
        workbench.measure(model, "router_entropy", ids)
    foreign, *_ = observed_experts("Mixtral")
    gate = type(foreign.model.layers[0].mlp.gate)
    plain = gate.forward
    monkeypatch.setattr(gate, "forward", lambda self, x: (lambda a, b, c: (a, b.square(), c))(*plain(self, x)))
    with pytest.raises(
        WorkbenchError, match=r"the weights of model.layers.0.mlp.gate are no multiple of a softmax or sigmoid"
    ):
        workbench.measure(see(foreign, example), "expert_load", ids)


def test_dense_models_have_no_router(awake):
    assert not any(".mlp.hook_router" in name for name in awake().hook_dict)
    model = see(hugging_face(), torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0)))
    assert not any(".mlp." in name for name in model.hook_dict)


def test_measures_by_hand():
    assert router_entropy(torch.full((1, 2, 4), 0.3)).item() == pytest.approx(1)
    assert router_entropy(torch.tensor([[[0.7, 0, 0, 0]] * 2])).item() == pytest.approx(0, abs=1e-6)
    assert router_entropy(torch.tensor([[[0.9, 0.3, 0, 0]]])).item() == pytest.approx(  # 3/4 and 1/4 of the sum
        (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4)
    )
    # 4 experts, 2 for each token: the first takes 0 and 1; the later ones 1 2, 2 3, 2 3
    weights = torch.zeros(1, 4, 4)
    for position, pair in enumerate(((0, 1), (1, 2), (2, 3), (2, 3))):
        weights[0, position, list(pair)] = 0.5
    assert expert_load(weights)[0].tolist() == pytest.approx([0.5, 1, 1.5, 1])  # 1, 2, 3, 2 of 4 tokens, even: 1 / 2
    assert expert_load(weights, tokens_used="first")[0].tolist() == pytest.approx([2, 2, 0, 0])
    assert expert_load(weights, tokens_used="later")[0].tolist() == pytest.approx([0, 2 / 3, 2, 4 / 3])
    dropped = weights * (torch.arange(4) < 2)[:, None]  # the last two tokens take no expert
    assert torch.equal(expert_load(torch.cat([weights, dropped]))[:1], expert_load(weights)), "not by the batch"
    assert not expert_load(dropped.flip(1), tokens_used="first").any()
    assert first_token_experts(weights).item() == pytest.approx(1 / 6)  # one of two in one of three tokens
    assert first_token_experts(weights, between_later=True).item() == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    assert first_token_experts(weights[:, :, [1, 0, 2, 3]]).item() == pytest.approx(1 / 6), "experts have no order"


def test_sinks_elsewhere_are_compared_with_the_tokens_on_which_no_head_rests():
    T, sink = 16, 3
    pattern = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    pattern[sink:] = torch.eye(T)[sink]  # one of two heads rests on token 3
    two = torch.stack((pattern, torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]))[None]
    weights = torch.zeros(1, T, 4)
    weights[0, :, :2] = 0.5  # all tokens take experts 0 and 1,
    weights[0, sink] = torch.tensor([0, 0.5, 0.5, 0])  # the sink 1 and 2,
    weights[0, 5] = torch.tensor([0, 0, 0.5, 0.5])  # and token 5 2 and 3
    rest = {"received": two.sum(2), "row_max": two.amax(-1), "positions": "found"}
    assert first_token_experts(weights, **rest).item() == pytest.approx(1 / 2)  # one of two in each of 15 tokens
    assert first_token_experts(weights).item() == pytest.approx((13 + 0.5) / 15)  # the first token
    between = first_token_experts(
        weights, **rest, between_later=True
    )  # 14 of 15 take the same two, in pairs with 13 of 14 others
    assert between.item() == pytest.approx(14 * 13 / (15 * 14))
    none = dict(rest, received=two[:, 1:].sum(2), row_max=two[:, 1:].amax(-1))
    for between_later in (False, True):
        value = first_token_experts(weights, **none, between_later=between_later)
        assert value.isnan().all(), "no head rests on a token: no share and no baseline"


SINK, PLACE = 1, 5  # a token id on which heads rest, and its place in each document


@pytest.fixture
def sunk(tmp_path):
    """An imported Mixtral whose heads rest on a token that is not first, and documents with it."""
    foreign, *_ = observed_experts("Mixtral")
    with torch.no_grad():
        foreign.model.embed_tokens.weight[:, :2] = torch.tensor([3.0, 0.0])
        foreign.model.embed_tokens.weight[SINK, 1] = 3.0
        for layer in foreign.model.layers:
            for projection, column in ((layer.self_attn.q_proj, 0), (layer.self_attn.k_proj, 1)):
                projection.weight.zero_()[3::8, column] = 1.0  # the channel of each head that rotates least
    with quiet():
        foreign.save_pretrained(tmp_path / "moe")
    with pytest.warns(ObservedInstead):
        run = import_run(tmp_path / "moe", tmp_path / "runs", name="moe")
    ids = torch.randint(2, 61, (4, 32), generator=torch.Generator().manual_seed(0))
    ids[:, PLACE] = SINK
    return run, ids


def test_views_draw_routers_beside_their_baselines(sunk):
    run, ids = sunk
    metrics, link = ["expert_load", "router_entropy", "first_token_experts"], "depth?metric=router_entropy"
    workbench.measure(run, metrics, ids)
    source = Source(run.path.parent)
    load, first = (dict(drawings(source, Link.parse(link), only))[only] for only in ("experts", "routers"))
    assert "--positions found" in first.sentence
    workbench.measure(run, "first_token_experts", ids, positions="found")  # which leaves the first position's records
    ((_, both),) = drawings(Source(run.path.parent), Link.parse(link), "routers")
    assert not both.sentence
    assert both.table["measure"].nunique() == 3
    check(load.figure)
    check(both.figure)
    _, cache = run.load().run_with_cache(ids)
    for layer in (0, 1):
        taken = cache["expert_weights", layer, "mlp"].ne(0).double()  # [document, pos, expert], two of six
        grid = load.figure.data[0]
        assert grid.z[layer] == pytest.approx((taken.mean((0, 1)) * 3).numpy())
        shared = taken @ taken.mT / 2  # of two tokens
        values = {}
        for name, place in (("first token", 0), ("found sinks", PLACE)):
            rest = [p for p in range(32) if p != place]
            pairs = shared[:, rest][:, :, rest].sum((1, 2)) - 31  # each with all others
            values[f"experts shared with {'the ' * (place == 0)}{name}"] = (
                shared[:, place, rest].mean(),
                (pairs / (31 * 30)).mean(),
            )
        scores = cache["router_scores", layer, "mlp"].double()
        entropy = -(scores * scores.log()).sum(-1).mean() / math.log(6)
        values["router entropy (share of ln E)"] = entropy, 1.0
        rows = both.table[both.table["layer"] == layer].set_index("measure")
        for name, (value, chance) in values.items():
            assert rows.loc[name, ["value", "chance"]].tolist() == pytest.approx(
                [float(value), float(chance)], abs=1e-6
            ), name
            drawn = [t for t in both.figure.data if t.xaxis == _axis(both, name)]
            assert [t.y[layer] for t in drawn] == pytest.approx([float(value), float(chance)], abs=1e-6)


def _axis(drawing, title):
    """The horizontal axis of the panel with this title."""
    place = [a.text for a in drawing.figure.layout.annotations].index(title)
    return f"x{place + 1 if place else ''}"
