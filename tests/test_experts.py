"""Mixtures of experts: router logits and expert weights as activations of observed decoders, and measures of the routing."""

from __future__ import annotations

import pytest
import torch
import transformers
from foreign import hugging_face
from observed import see
from prompt_ids import some_ids

import workbench
from workbench.errors import WorkbenchError
from workbench.metrics.experts import expert_load, first_token_experts, router_entropy

FAMILIES = {
    "Mixtral": ({"num_local_experts": 6, "num_experts_per_tok": 2}, "mlp.gate", True),
    "Qwen3Moe": (
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "norm_topk_prob": False,
        },
        "mlp.gate",
        False,
    ),
    "Olmoe": ({"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}, "mlp.gate", True),
    "GptOss": ({"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}, "mlp.router", True),
}


def observed_experts(name):
    changes, router, normed = FAMILIES[name]
    model = hugging_face(getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config"), **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if router in key:
                p.copy_(torch.randn(p.shape, generator=generator))
    return see(model, torch.randint(61, (2, 12), generator=generator)), router, normed


@pytest.mark.parametrize("name", FAMILIES)
def test_the_router_is_shown_as_it_routes(name):
    model, router, normed = observed_experts(name)
    ids, point = torch.cat([some_ids(9), some_ids(9, seed=2)]), "blocks.1.mlp.hook_{}"
    seen = []
    module = model.foreign.get_submodule(f"model.layers.1.{router}")
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output))
    _, cache = model.run_with_cache(ids, [point.format("router_logits"), point.format("expert_weights")])
    handle.remove()
    logits, weights, indices = seen[-1]
    assert cache["router_logits", 1, "mlp"].shape == (2, 9, 6)
    torch.testing.assert_close(cache["router_logits", 1, "mlp"].flatten(0, 1), logits)
    expected = torch.zeros(18, 6).scatter(-1, indices, weights.float())
    torch.testing.assert_close(cache["expert_weights", 1, "mlp"].flatten(0, 1), expected)
    assert (expected.sum(-1) - 1).abs().max().item() < 1e-6 if normed else expected.sum(-1).min() < 0.99
    assert "router_logits" in model.sites["site"].to_numpy()
    with (
        model.hooks([(point.format("router_logits"), lambda x, hook: 2 * x)]),
        pytest.raises(WorkbenchError, match="can be read, not replaced"),
    ):
        model(ids)
    frame = workbench.measure(model, ["router_entropy", "expert_load", "first_token_experts"], ids)
    rows = frame[(frame.layer == 1) & frame.variant.isna() & frame.control.isna()]
    share = torch.special.entr(logits.softmax(-1)).sum(-1).mean() / torch.tensor(6.0).log()
    assert rows[rows.metric == "router_entropy"]["value"].item() == pytest.approx(share.item(), abs=1e-5)
    loads = rows[rows.metric == "expert_load"].sort_values("index")["value"]
    assert loads.to_numpy() == pytest.approx(
        (torch.bincount(indices.flatten(), minlength=6) / 18 * 3).numpy(), abs=1e-6
    )


def test_dense_models_have_no_router(awake):
    assert not any(".mlp.hook_router" in name for name in awake().hook_dict)
    model = see(hugging_face(), torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0)))
    assert not any(".mlp." in name for name in model.hook_dict)


def test_measures_by_hand():
    even, one = torch.zeros(1, 2, 4), torch.tensor([[[100.0, 0, 0, 0]] * 2])
    assert router_entropy(even).item() == pytest.approx(1)
    assert router_entropy(one).item() == pytest.approx(0, abs=1e-6)
    # 4 experts, 2 for each token: the first takes 0 and 1; the later ones 1 2, 2 3, 2 3
    weights = torch.zeros(1, 4, 4)
    for position, pair in enumerate(((0, 1), (1, 2), (2, 3), (2, 3))):
        weights[0, position, list(pair)] = 0.5
    assert expert_load(weights)[0].tolist() == pytest.approx([0.5, 1, 1.5, 1])  # 1, 2, 3, 2 of 4 tokens, even: 1 / 2
    assert expert_load(weights, tokens_used="first")[0].tolist() == pytest.approx([2, 2, 0, 0])
    assert expert_load(weights, tokens_used="later")[0].tolist() == pytest.approx([0, 2 / 3, 2, 4 / 3])
    assert first_token_experts(weights).item() == pytest.approx(1 / 6)  # one of two in one of three tokens
    assert first_token_experts(weights, between_later=True).item() == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
