"""Experiments on whole models, where `truth` does not go: other architectures, hand-worked hooks. All else is in `test_truth`."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.data.data_sources import Sample
from workbench.interventions import INTERVENTIONS, edited

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


@pytest.mark.parametrize("architecture", ["value_embedding", "cross_layer"])
def test_attributions_sum_to_the_target_logit_over_the_mean(tiny, ids, architecture):
    model = tiny(architecture, dtype=WIDE)
    logits = model(ids)[:, :-1]
    true = (logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.mean(-1)).mean()
    rows = run("logit_attribution", model, ids)
    assert sum(r["value"] for r in rows) == pytest.approx(true.item(), abs=1e-9)
    assert {"value_embedding": "attn.table", "cross_layer": "attn.cross"}[architecture] in {r["part"] for r in rows}


# ---- gradients -------------------------------------------------------------------------------------------------------


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
        _, values, grads = model.run_with_grads(ids[:1], [point, own])
        norm = grads[point].norm().item()
        assert found(rows, site="stream", layer=layer, variant=None) == pytest.approx(norm)
        relative = found(rows, site="stream", layer=layer, variant="relative")
        assert relative == pytest.approx(norm * values[point].norm().item())
        assert not torch.allclose(grads[point], grads[own], rtol=1e-3)


def test_gradient_shares_of_the_first_values_sum_to_one(tiny, ids, any_architecture):
    rows = run("shortcut_gradient_share", tiny(any_architecture, dtype=WIDE), ids)
    assert sum(r["value"] for r in rows) == pytest.approx(1, abs=1e-9)
    assert rows[0]["layer"] == 0


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


@pytest.mark.parametrize("architecture", ["attention_residuals"])
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


@pytest.mark.parametrize("architecture", ["neutreno", "resformer_learnable"])
def test_a_shortcut_at_zero_is_its_coefficient_at_zero(awake, ids, architecture):
    """NeuTRENO adds lambda (V_1 - V_n): without the shortcut nothing of V_n is subtracted either."""
    model = awake(architecture, dtype=WIDE)
    rows, plain = run("skip_ablation", model, ids), document_losses(model, ids)
    for layer, at in (({"layer": 1}, ",layer=1"), ({"layer": 2}, ",layer=2"), ({"layer": None}, "")):
        with edited(model, f"coefficient:value=0{at}"):
            change = document_losses(model, ids) - plain
        assert found(rows, variant="zero", **layer) == pytest.approx(float(change.mean()), abs=1e-12)


@pytest.mark.parametrize("architecture", ["gated_attention", "value_gate_query", "exclusive_attention", "cross_layer"])
def test_what_a_sink_writes_passes_the_gates_and_comes_from_all_keys(awake, ids, architecture):
    """The other way: what the head outputs of later queries lose without the first token's values."""
    model = awake(architecture, dtype=WIDE).requires_grad_(False)
    rows = run("sink_output", model, ids)
    first = lambda v, hook: torch.cat((0 * v[:, :1], v[:, 1:]), 1)  # noqa: E731
    for layer in range(3):
        z = f"blocks.{layer}.attn.hook_z"
        values = [
            n for n in (f"blocks.{layer}.attn.hook_v", f"blocks.{layer}.attn.cross.hook_v") if n in model.hook_dict
        ]
        whole = model.run_with_cache(ids, names_filter=z)[1][z]
        with model.hooks([(name, first) for name in values]):
            rest = model.run_with_cache(ids, names_filter=z)[1][z]
        lost, out = (
            torch.einsum("bphd,hdm->bphm", x, model.blocks[layer].attn.W_O)[:, 1:] for x in (whole - rest, whole)
        )
        ratio = (lost.norm(dim=-1) / out.norm(dim=-1)).mean((0, 1))
        told = [found(rows, layer=layer, head=head, variant=None) for head in range(4)]
        assert told == pytest.approx(ratio.tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("architecture", "layers"), [("transformer", {1, 2}), ("sink_logit", set()), ("residual_attention", set())]
)
def test_only_plain_softmaxes_are_compared_with_cross_layer_attention(tiny, ids, architecture, layers):
    assert {row["layer"] for row in run("cross_layer_approximation", tiny(architecture), ids)} == layers
