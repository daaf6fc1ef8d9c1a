"""Attention of a prompt, all heads at once and windows of one: equal to the patterns of the model itself, in every architecture."""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from prompt_ids import some_ids
from seams import ATTENDING

import workbench
from workbench.errors import BadData, UnknownName
from workbench.kernels.pooled_maps import bucket_edges
from workbench.metrics.attention_patterns import effective_keys, row_entropy, sink_mass
from workbench.prompts import AttentionInputs, attention_inputs, attention_map, attention_overview
from workbench.prompts.attention_maps import SoftmaxArrays


def dense(model, ids):
    """Whole patterns [layer, head, query, key], all sets of keys together."""
    _, cache = model.run_with_cache(ids)
    found = []
    for n in range(model.config.n_layers):
        pattern = cache[f"blocks.{n}.attn.hook_pattern"][0]
        if model.architecture.startswith("cross_layer"):
            stem = f"blocks.{n}.attn.cross"
            names = [f"{stem}.hook_pattern", *(f"{stem}.{j}.hook_pattern" for j in range(n))]
            pattern = pattern + sum(cache[name][0] for name in names if name in model.hook_dict)
        found.append(pattern)
    return torch.stack(found).double().numpy()


def pooled(pattern, queries, keys, how=np.mean):
    """The slow truth of the pooled pictures [..., query bucket, key bucket]."""
    cells = np.full((*pattern.shape[:-2], len(queries) - 1, len(keys) - 1), np.nan)
    for i, (q0, q1) in enumerate(itertools.pairwise(queries)):
        for j, (k0, k1) in enumerate(itertools.pairwise(keys)):
            if k0 < q1:
                cell = pattern[..., q0:q1, k0:k1]
                cells[..., i, j] = cell.sum(-1).mean(-1) if how is np.mean else cell.max((-2, -1))
    return cells


def test_overview_and_windows_equal_the_patterns(awake, any_attention):
    model, ids = awake(any_attention), some_ids()
    pattern, found = dense(model, ids), attention_overview(model, ids, buckets=5)
    inputs = attention_inputs(model, ids)
    assert found.edges == bucket_edges(23, 5)
    np.testing.assert_allclose(found.tiles, pooled(pattern, found.edges, found.edges), atol=1e-5)
    future = np.triu(np.ones((23, 23), dtype=bool), 1)
    for layer in range(3):
        for head in range(4):
            whole = attention_map(inputs, layer, head)
            assert whole.exact
            assert np.isnan(whole.weights[future]).all()
            np.testing.assert_allclose(whole.weights[~future], pattern[layer, head][~future], atol=1e-5)


def test_statistics_equal_those_the_model_shows(awake, any_attention):
    model, ids = awake(any_attention), some_ids()
    names = {n: [f"blocks.{n}.attn.hook_{x}" for x in ("row_entropy", "sink")] for n in range(3)}
    _, cache = model.run_with_cache(ids, names_filter=[*itertools.chain(*names.values())])
    found = attention_overview(model, ids)
    assert list(zip(found.statistics["layer"], found.statistics["head"], strict=True)) == [
        (n, h) for n in range(3) for h in range(4)
    ]
    table = found.statistics.set_index(["layer", "head"])
    for layer, (entropies, sinks) in names.items():
        null = 1.0 if "attn.hook_null" in str(list(model.hook_dict)) else None
        expected = {
            "row_entropy": row_entropy(cache[entropies]),
            "normalised_entropy": row_entropy(cache[entropies], null, normalised=True),
            "effective_keys": effective_keys(cache[entropies]),
            "sink_mass": sink_mass(cache[sinks]),
        }
        for name, values in expected.items():
            assert table.loc[layer, name].tolist() == pytest.approx(values[0].tolist(), abs=1e-4), (layer, name)


@pytest.mark.parametrize("architecture", ["sink_logit", "cross_layer", "residual_attention", "gqa"])
def test_shares_of_the_keys_in_sight_are_1_where_all_are_alike_and_never_more(tiny, awake, architecture):
    """Queries and logits of zero: each key, each layer's key at a position, and the column for no token weigh the same."""
    model, ids = tiny(architecture), torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "sink_logit" in name:
                p.zero_()
    columns = np.arange(1, 18) + (architecture == "sink_logit")
    measured = workbench.measure(model, ["row_entropy", "effective_keys"], ids).query("control.isna()")
    for _, rows in measured[measured["layer"] > 0].groupby("layer"):
        of = {
            (m, v or ""): g["value"].to_numpy()
            for (m, v), g in rows.fillna({"variant": ""}).groupby(["metric", "variant"])
        }
        np.testing.assert_allclose(of["row_entropy", ""], np.log(columns).mean(), rtol=1e-5)
        np.testing.assert_allclose(of["effective_keys", ""], columns.mean(), rtol=1e-5)
        np.testing.assert_allclose(of["row_entropy", "normalised"], 1, rtol=1e-5)
        np.testing.assert_allclose(of["effective_keys", "share"], 1, rtol=1e-5)
    shares = workbench.measure(awake(architecture), ["row_entropy", "effective_keys"], ids).query("variant.notna()")
    assert shares["value"].between(0, 1).all()


def test_uniform_attention_has_the_uniform_numbers(tiny):
    """Queries of zero look everywhere alike: three queries by hand."""
    model = tiny()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.zero_()
    found = attention_overview(model, [3, 1, 4])
    tile = found.tiles[1, 2]
    np.testing.assert_allclose(tile[~np.isnan(tile)], [1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], atol=1e-6)
    row = found.statistics.iloc[5]
    assert row["row_entropy"] == pytest.approx((math.log(2) + math.log(3)) / 3)
    assert row["normalised_entropy"] == pytest.approx(1)
    assert row["effective_keys"] == pytest.approx(2)
    assert row["sink_mass"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert {name: row[name] for name in found.uniform} == pytest.approx(found.uniform)


@pytest.mark.parametrize("architecture", ATTENDING[::3])
def test_largest_weights_survive_pooling(awake, architecture):
    model, ids = awake(architecture), some_ids()
    pattern, edges = dense(model, ids), bucket_edges(23, 5)
    found = attention_overview(model, ids, buckets=5, pool="max")
    np.testing.assert_allclose(found.tiles, pooled(pattern, edges, edges, np.max), atol=1e-5)
    cells = attention_map(attention_inputs(model, ids), 2, 1, most=5, pool="max")
    np.testing.assert_allclose(cells.weights, pooled(pattern[2, 1], edges, edges, np.max), atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "strip"),
    [((0, 50), (0, 50), 40), ((13, 44), (7, 30), 1), ((2, 9), (20, 50), 2**22), ((49, 50), (3, 4), 1)],
)
def test_any_window_in_any_number_of_cells(awake, monkeypatch, queries, keys, strip):
    monkeypatch.setattr("workbench.prompts.attention_maps.STRIP", strip)
    model, ids = awake("gqa"), some_ids(50)
    pattern, inputs = dense(model, ids)[1, 3], attention_inputs(model, ids)
    for most in (1, 4, 7, 512):
        found = attention_map(inputs, 1, 3, slice(*queries), slice(*keys), most=most)
        rows = [queries[0] + e for e in bucket_edges(queries[1] - queries[0], most)]
        columns = [keys[0] + e for e in bucket_edges(keys[1] - keys[0], most)]
        assert (found.queries, found.keys) == (rows, columns)
        assert found.exact == (most == 512 or (queries, keys) == ((49, 50), (3, 4)))
        np.testing.assert_allclose(found.weights, pooled(pattern, rows, columns), atol=1e-5)
        if keys == (0, 50):
            np.testing.assert_allclose(np.nansum(found.weights, 1), 1, atol=1e-5)


def test_keys_of_other_layers_can_be_looked_at_alone(awake):
    model, ids = awake("cross_layer_all"), some_ids()
    _, cache = model.run_with_cache(ids)
    inputs = attention_inputs(model, ids)
    assert inputs.branches(2) == ["own", "cross.0", "cross.1"]
    for branch, name in (("own", "hook_pattern"), ("cross.1", "cross.1.hook_pattern")):
        found = attention_map(inputs, 2, 0, branch=branch).weights
        np.testing.assert_allclose(np.nan_to_num(found), cache[f"blocks.2.attn.{name}"][0, 0], atol=1e-5)


def test_mixed_scores_and_negative_mixtures(awake):
    """A mixture may have weights below 0, of which a cell's largest is not the masked 0."""
    for options in ({"attn_mix": "logit"}, {"lambda_a1": -0.5, "lambda_a_own": -0.25}):
        model, ids = awake("residual_attention", **options), some_ids()
        pattern, inputs = dense(model, ids), attention_inputs(model, ids)
        edges = bucket_edges(23, 6)
        for pool, how in (("mean", np.mean), ("max", np.max)):
            masked = pattern[2, 1].copy()
            masked[np.triu_indices(23, 1)] = 0 if pool == "mean" else -np.inf
            found = attention_map(inputs, 2, 1, most=6, pool=pool).weights
            np.testing.assert_allclose(found, pooled(masked, edges, edges, how), atol=1e-5)


def test_a_window_by_hand():
    """One head of width 1: scores 0, ln 3 give weights 1/4, 3/4."""
    q, k = np.ones((2, 1, 1), np.float32), np.array([0, math.log(3)], np.float32).reshape(2, 1, 1)
    softmax = SoftmaxArrays(
        weight=1.0, queries=q, keys=[k], branches=["own"], lse=np.array([[0, math.log(4)]], np.float32)
    )
    inputs = AttentionInputs(T=2, layers=[[softmax]])
    np.testing.assert_allclose(attention_map(inputs, 0, 0).weights, [[1, np.nan], [0.25, 0.75]], atol=1e-6)
    assert attention_map(inputs, 0, 0, most=1).weights.tolist() == [[pytest.approx(1)]]
    largest = attention_map(inputs, 0, 0, slice(1, 2), most=1, pool="max").weights
    assert largest.tolist() == [[pytest.approx(0.75)]]


def test_wrong_windows_are_refused_by_name(tiny):
    model = tiny()
    inputs = attention_inputs(model, some_ids())
    with pytest.raises(UnknownName, match="unknown layer 3"):
        attention_map(inputs, 3, 0)
    with pytest.raises(UnknownName, match="unknown head 4"):
        attention_map(inputs, 1, 4)
    with pytest.raises(UnknownName, match="unknown pool 'mass'"):
        attention_map(inputs, 1, 0, pool="mass")
    with pytest.raises(UnknownName, match="unknown pool 'sum'"):
        attention_overview(model, some_ids(), pool="sum")
    with pytest.raises(UnknownName, match="unknown branch 'cross'"):
        attention_map(inputs, 1, 0, branch="cross")
    with pytest.raises(BadData, match="slice of neighbours"):
        attention_map(inputs, 1, 0, slice(30, 40))
    with pytest.raises(BadData, match="slice of neighbours"):
        attention_map(inputs, 1, 0, slice(0, 20, 2))
    with pytest.raises(BadData, match="at least one cell"):
        attention_map(inputs, 1, 0, most=0)


@pytest.mark.slow
def test_long_prompts_need_no_square_of_memory(tiny):
    """T = 8,192: one T x T pattern of one head is 256 MiB, of all heads of a layer 1 GiB."""
    T, model = 8_192, tiny(config={"n_layers": 1, "n_ctx": 8_192})
    ids, process = some_ids(T), psutil.Process()
    attention_overview(model, ids[:, :256])  # whatever is made once
    before, peak, done = process.memory_info().rss, [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found, inputs = attention_overview(model, ids), attention_inputs(model, ids)
        whole = attention_map(inputs, 0, 2)
        corner = attention_map(inputs, 0, 2, slice(T - 100, T), slice(0, 100))
    finally:
        done.set()
        watcher.join()
    assert (peak[0] - before) / 2**20 < 200
    assert found.tiles.shape == (1, 4, 64, 64)
    assert whole.weights.shape == (512, 512)
    np.testing.assert_allclose(np.nansum(found.tiles, -1), 1, atol=1e-4)
    np.testing.assert_allclose(np.nansum(whole.weights, -1), 1, atol=1e-4)
    blocks = whole.weights.reshape(64, 8, 64, 8)
    np.testing.assert_allclose(np.nansum(blocks, -1).mean(1)[10, :10], found.tiles[0, 2, 10, :10], atol=1e-5)
    assert corner.exact
