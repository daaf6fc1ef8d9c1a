"""A value followed: its parts sum to it, its readers get what plain torch says, the view's sentence tells its table."""

from __future__ import annotations

import re

import dashboard
import numpy as np
import pytest
import strangers
import torch
from prompt_ids import some_ids

import workbench
from workbench.errors import BadData, WorkbenchError
from workbench.prompts import value_flow
from workbench.views import Link, drawings
from workbench.views.token_names import number

AT = 6
MADE = {  # of each architecture: the values of a layer from the own ones of all layers up to it
    "transformer": lambda own: own[-1],
    "gqa": lambda own: own[-1],
    "neutreno": lambda own: own[-1],
    "svformer": lambda own: own[0],
    "resformer": lambda own: 0.5 * own[0] + 0.5 * own[-1] if len(own) > 1 else own[0],
}


def by_hand(model, ids, name):
    """Of each layer: own values (zero where the layer projects none) and effective ones [T, head, d_head], pattern, W_O [head, ...]."""
    _, cache = model.run_with_cache(ids)
    weights, owns, found = model.state_dict(), [], []
    for n in range(3):
        x = cache[f"blocks.{n}.hook_resid_pre"][0]
        x = (
            x
            / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
            * weights[f"blocks.{n}.ln1.weight"]
        )
        matrix = weights.get(f"blocks.{n}.attn.v_proj.weight")
        own = torch.zeros_like(owns[0]) if matrix is None else (x @ matrix.T).unflatten(-1, (-1, 8))
        owns.append(own.repeat_interleave(4 // own.shape[1], dim=1))
        w_o = weights[f"blocks.{n}.attn.o_proj.weight"].T.unflatten(0, (4, 8))
        found.append((owns[-1], MADE[name](owns), cache[f"blocks.{n}.attn.hook_pattern"][0], w_o))
    return found


def lengths(pattern, vectors, w_o):
    """||A[h, q, p] x[p, h] W_O[h]||, one by one, [head, query, position]."""
    heads, T = pattern.shape[:2]
    found = torch.zeros(heads, T, T, dtype=torch.double)
    for h in range(heads):
        for q in range(T):
            for p in range(q + 1):
                found[h, q, p] = (pattern[h, q, p] * vectors[p, h] @ w_o[h]).norm()
    return found


@pytest.mark.fast(2)
@torch.no_grad()
@pytest.mark.parametrize("name", MADE)
def test_readers_get_what_plain_torch_says(tiny, name):
    model, ids = tiny(name, dtype=torch.float64), some_ids(12)
    layers = by_hand(model, ids, name)
    for layer in (0, 2):
        flow = value_flow(model, ids, AT, layer, top=99)
        here = flow.readers[(flow.readers["layer"] == layer) & (flow.readers["way"] == "attention")]
        _, value, pattern, w_o = layers[layer]
        each = lengths(pattern, value, w_o)
        total, seen = each.sum(-1)[:, AT:], torch.arange(AT + 1, 13)
        np.testing.assert_allclose(here["amount"], each[:, AT:, AT].sum(-1), rtol=1e-9)
        np.testing.assert_allclose(here["total"], total.sum(-1), rtol=1e-9)
        np.testing.assert_allclose(here["share"], each[:, AT:, AT].sum(-1) / total.sum(-1), rtol=1e-9)
        np.testing.assert_allclose(here["even"], (total / seen).sum(-1) / total.sum(-1), rtol=1e-9)
        for row in flow.queries.to_dict("records"):
            assert row["amount"] == pytest.approx(float(each[row["head"], row["query"], AT]), rel=1e-9)
            assert row["share"] == pytest.approx(row["amount"] / float(total[row["head"], row["query"] - AT]), rel=1e-9)
        assert len(flow.queries) == 4 * 6
        assert flow.norm == pytest.approx(
            float(model.run_with_cache(ids)[1][f"blocks.{layer}.attn.hook_v"][0, AT].norm())
        )


def test_projections_sum_to_the_length_in_every_architecture(awake, some_architecture):
    model, ids = awake(some_architecture), some_ids(12)
    _, cache = model.run_with_cache(ids)
    for layer in range(3):
        if layer and {"satformer", "skip_v1"} & set(some_architecture.split("+")):
            with pytest.raises(BadData, match="times one coefficient each"):
                value_flow(model, ids, AT, layer)
            continue
        flow = value_flow(model, ids, AT, layer)
        length = float(cache[f"blocks.{layer}.attn.hook_v"][0, AT].norm())
        assert flow.parts["projection"].sum() == pytest.approx(length, abs=1e-5)
        assert flow.parts["share"].sum() == pytest.approx(1, abs=1e-5)
        assert set(flow.readers["layer"]) <= set(range(layer, 3))


@torch.no_grad()
def test_several_vectors_that_a_later_layer_sums_are_measured_as_one(tiny):
    model, ids = tiny("resformer_dense", dtype=torch.float64), some_ids(12)
    rows = value_flow(model, ids, AT, 1).readers.query("layer == 2").set_index("path")
    assert list(dict.fromkeys(rows.index)) == ["first", "own", "together"]
    _, cache = model.run_with_cache(ids)
    both = sum(cache[f"blocks.{n}.attn.own.hook_v"][0] for n in (0, 1))
    each = lengths(cache["blocks.2.attn.hook_pattern"][0], both, model.blocks[2].attn.W_O)
    np.testing.assert_allclose(rows.loc["together", "amount"], each[:, AT:, AT].sum(-1), rtol=1e-9)
    apart = rows.loc["first", "amount"].to_numpy() + rows.loc["own", "amount"].to_numpy()
    assert (rows.loc["together", "amount"].to_numpy() <= apart).all()


@pytest.mark.slow
@torch.no_grad()
def test_an_observed_model_is_followed_as_our_own():
    ids = some_ids()
    observed = workbench.observe(strangers.large(strangers.GPT([(0.4, 0.6)] * 3)), ids, quiet=True)
    flow = value_flow(observed, ids, AT, 1)
    assert flow.error < 1e-5
    found = flow.parts.drop_duplicates("path").set_index("path")["coefficient"]
    assert found.to_dict() == pytest.approx({"first": 0.4, "own": 0.6}, abs=1e-5)
    _, cache = observed.run_with_cache(ids)
    w_o = observed.foreign.transformer.h[1].attn.c_proj.weight.T.unflatten(0, (4, 8))
    each = lengths(*(cache[f"blocks.1.attn.hook_{x}"][0].double() for x in ("pattern", "v")), w_o.double())
    np.testing.assert_allclose(flow.readers.query("layer == 1")["amount"], each[:, AT:, AT].sum(-1), rtol=1e-4)
    pulled = workbench.observe(strangers.large(strangers.GPT(attention=strangers.Pulled)), ids, quiet=True)
    flow = value_flow(pulled, ids, AT, 1)
    assert flow.error < 1e-5
    assert not flow.notes, "what is added to the attention's output is a part of the path"
    headwise = strangers.large(strangers.GPT(attention=strangers.HeadwiseMixed))
    headwise = workbench.observe(headwise, ids, quiet=True)
    assert value_flow(headwise, ids, AT, 0).notes == ["Layers 1, 2: unknown what their values hold, left out."]
    with pytest.raises(BadData, match="values of layer 1 hold more than what layers project"):
        value_flow(headwise, ids, AT, 1)


@torch.no_grad()
def test_a_source_that_is_not_fitted_is_missed_in_half_precision_too():
    """Half of a bfloat16 value could be unexplained: the own part of this one was 0.61 of the projection, and no first part was shown."""

    def bent(q, k, v, layer=0):
        return strangers.causal(q, k, v + 0.03 * v.abs() if layer else v)

    ids = some_ids()
    module = strangers.large(strangers.GPT([(0.4, 0.6)] * 3, bent)).bfloat16()
    with pytest.raises(BadData, match="values of layer 1 hold more"):
        value_flow(workbench.observe(module, ids, quiet=True), ids, 5, 1)


def test_gates_are_said_to_be_left_out_and_wrong_places_refused(tiny):
    assert "gate" in value_flow(tiny("gated_attention"), some_ids(12), AT, 1).notes[0]
    with pytest.raises(BadData, match=r"layers 0\.\.2"):
        value_flow(tiny(), some_ids(12), AT, 3)
    with pytest.raises(BadData, match="position 12"):
        value_flow(tiny(), some_ids(12), 12, 0)


# ---- the view --------------------------------------------------------------------------------------------------------


def drawn(folder, **options):
    chosen = {"a": "text-resformer-s0", "prompt": "return values", "show": "follow", "position": "0"} | options
    chosen = {k: v for k, v in chosen.items() if v is not None}
    ((_, drawing),) = drawings(dashboard.kept(folder), Link("prompt", chosen), "follow")
    return drawing


@pytest.mark.slow
def test_the_sentence_tells_the_table_and_the_path_is_that_of_the_largest_reader(populated):
    drawing = drawn(populated, layer="0")
    table, said = drawing.table, drawing.sentence
    source, here, later = (table[table["kind"] == kind] for kind in ("source", "reader", "later"))
    norm = number(source["amount"].sum())
    assert f"has norm {norm}: own values {norm} (100.0%)" in said
    amount, total = here["amount"].sum(), here["total"].sum()
    assert f"{number(amount)} of {number(total)} ({amount / total:.1%};" in said
    best = here.loc[here["amount"].idxmax()]
    assert f"most through head {best['head']} ({number(best['amount'])}, {best['share']:.1%} of" in said
    queries = table[(table["kind"] == "query") & (table["query"] > 0)]
    most = queries.loc[queries["amount"].idxmax()]
    assert f"(token {most['query']}), {number(most['amount'])} through head {most['head']}, {most['share']:.1%}" in said
    assert f"most layer 1: {number(later['amount'].sum())} of {number(later['total'].sum())}" in said
    path = table[table["kind"].isin(["score", "logit"])]
    assert set(path["query"]) == {most["query"]}
    assert set(path["head"]) == {most["head"]}
    assert table.loc[table["kind"] == "score", "amount"].sum() == pytest.approx(
        float(re.search(r"score minus the others' mean ([+-][\d.e+-]+\d)", said)[1]), rel=0.01
    )
    other = drawn(populated, layer="0", head="1", query="5").table
    assert set(other.loc[other["kind"] == "logit", "query"]) == {5}


@pytest.mark.slow
def test_two_models_are_followed_below_each_other_and_a_layer_that_one_lacks_is_refused(populated):
    drawing = drawn(populated, compare="1", b="text-transformer-s0")
    assert {name[:2] for name in drawing.table["model"]} == {"A:", "B:"}
    assert "No later layer reads a part of it again" in drawing.sentence
    with pytest.raises(WorkbenchError, match=r"0\.\.1"):
        drawn(populated, layer="2")


def test_the_last_token_is_read_by_itself_alone(populated):
    said = drawn(populated, position=None, layer="0").sentence
    assert "The queries from it on (1) receive from it" in said
    assert not re.search("nan|Later token", said)
