"""Values that are mixed by the token: weights, their mean and spread, the table, all as plain torch has them."""

from __future__ import annotations

import pytest
import torch
from gated_mixes import GATED, Tabled, elementwise, halved, replaced
from gated_mixes import Mixing as GatedAttention
from observed import see
from strangers import GPT, HEADS, large

from workbench.errors import BadData, WorkbenchError
from workbench.models.decomposition import decompose
from workbench.prompts import logit_attribution, value_flow

WIDE = torch.float64


def gates(module, ids, name):
    """[batch, pos, head] of each gated layer, read by hooks of their own."""
    seen = {}
    for i, block in enumerate(module.transformer.h):
        block.attn.gate.register_forward_hook(lambda m, a, out, i=i: seen.setdefault(i, out))
    module(ids)
    for block in module.transformer.h:
        block.attn.gate._forward_hooks.clear()
    form = {
        "added": torch.relu,
        "convex": lambda g: g.sigmoid()[..., :1].expand(*g.shape),
        "embedded": lambda g: 3 * g.sigmoid(),
    }
    return {i: form[name](g) for i, g in seen.items()}


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("name", [*GATED][1:])
def test_gates_are_read_for_every_token_and_told_by_mean_and_spread(name, ids):
    make, source, layers = GATED[name]
    module = large(make()).to(WIDE)
    observed, true = see(module, ids), gates(module, ids, name)
    named = {"first": "first", "table": "table value_embeds.{}"}[source]
    paths = observed.value_paths()
    assert paths["residual"].max() < 1e-10
    assert sorted(paths.loc[paths["spread"].notna(), "layer"].unique()) == list(layers)
    for layer in layers:
        point = f"blocks.{layer}.attn.hook_v_weights"
        weights = observed.run_with_cache(ids, point)[1][point]
        own = 1 - true[layer] if name == "convex" else torch.ones_like(true[layer])
        torch.testing.assert_close(weights, torch.stack([true[layer], own], -1), atol=1e-8, rtol=0)
        rows = paths[(paths["layer"] == layer) & (paths["source"] == named.format(layer))]
        assert rows["head"].isna().all() == (name == "convex")
        for row in rows.to_dict("records"):
            mine = true[layer][..., 0 if name == "convex" else row["head"]]
            assert row["coefficient"] == pytest.approx(float(mine.mean()), abs=1e-8)
            assert row["spread"] == pytest.approx(float(mine.std(correction=0)), abs=1e-8)
    names = {"added": "satformer", "embedded": "gated_value_embedding"}
    assert observed.architecture == names.get(name, "unknown")
    told = "values are weighted by token in layers 1, 2: gates on first and own (as in SATFormer)" in repr(observed)
    assert told == (name not in names), "own values are weighed too"


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [*GATED][:1])
def test_logits_are_taken_apart_into_gated_paths(name, ids):
    make, source, layers = GATED[name]
    module = large(make()).to(WIDE)
    observed = see(module, ids)
    found = decompose(observed, ids, "logits", "value_path")
    torch.testing.assert_close(found.parts.sum(0), observed.everywhere(ids), atol=1e-9, rtol=0)
    layer, path = layers[-1], source
    base = f"blocks.{layer}.attn.{'table' if source == 'table' else 'source.0'}.hook_v"
    _, cache = observed.run_with_cache(ids)
    weight = cache[f"blocks.{layer}.attn.hook_v_weights"][..., 0, None]
    z = torch.einsum("bhqk,bkhd->bqhd", cache[f"blocks.{layer}.attn.hook_pattern"], weight * cache[base])
    w_o = module.transformer.h[layer].attn.o.weight.T.unflatten(0, (HEADS, -1))
    stream = decompose(observed, ids, by="value_path")
    torch.testing.assert_close(stream[f"L{layer}H1.{path}"], z[:, :, 1] @ w_o[1])
    assert {"own", path} == set(logit_attribution(observed, ids[:1], -1, 5).frame["path"].dropna())


@torch.no_grad()
def test_tables_with_constants_are_named_and_their_values_shown(ids):
    module = large(Tabled(halved)).to(WIDE)
    observed = see(module, ids)
    assert observed.architecture == "value_embedding"
    paths = observed.value_paths().query("layer == 2").set_index("source")["coefficient"]
    assert paths["table value_embeds.2"] == pytest.approx(0.6, abs=1e-9)
    assert paths["own"] == pytest.approx(0.4, abs=1e-9)
    _, cache = observed.run_with_cache(ids)
    torch.testing.assert_close(cache["blocks.0.attn.table.hook_v"].flatten(2), module.value_embeds["0"](ids))
    with (
        observed.hooks([("blocks.0.attn.table.hook_v", lambda v, hook: 2 * v)]),
        pytest.raises(WorkbenchError, match="can be read, not replaced"),
    ):
        observed(ids)
    bank = see(large(Tabled(replaced, tables=(2,), own=lambda i: i < 2)).to(WIDE), ids)
    assert bank.architecture == "bank_of_values"
    found = bank.value_paths().query("layer == 2").set_index("source")["coefficient"].to_dict()
    assert found == pytest.approx({"first": 0, "table value_embeds.2": 1.5}, abs=1e-9)
    assert bank.run_with_cache(ids, "blocks.2.attn.hook_v_weights")[1]["blocks.2.attn.hook_v_weights"].shape[-1] == 1
    torch.testing.assert_close(
        decompose(bank, ids, "logits", "value_path").parts.sum(0), bank.everywhere(ids), atol=1e-9, rtol=0
    )


@torch.no_grad()
def test_what_any_values_would_fit_is_refused(ids):
    observed = see(large(GPT(attention=lambda i: GatedAttention(i, elementwise))).to(WIDE), ids)
    assert observed.value_paths().query("layer == 1")["residual"].min() > 0.01
    assert "unexplained" in repr(observed)
    with pytest.raises(BadData, match="layer 1 shows no value paths"):
        decompose(observed, ids, by="value_path")


@torch.no_grad()
def test_a_gated_value_is_not_followed_by_a_constant(ids):
    observed = see(large(GATED["added"][0]()).to(WIDE), ids)
    with pytest.raises(BadData, match="times one coefficient each"):
        value_flow(observed, ids[:1], 5, 1)
