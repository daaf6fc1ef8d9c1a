"""Looks at one prompt: equal to the patterns, decompositions and logits of the model itself, in every architecture."""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import workbench
from tests import strangers
from workbench.data import RepeatedData, Sample
from workbench.decomposition import decompose
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions.retention import nearest_embedding
from workbench.kernels.pooled import bucket_edges
from workbench.looks import attention, attribution, lens, prompt
from workbench.looks.attention import Kept, Term
from workbench.metrics.attention import effective_keys, row_entropy, sink_mass
from workbench.names import stream_hook

V = 61


def some_ids(T=23, seed=0):
    return torch.randint(V, (1, T), generator=torch.Generator().manual_seed(seed))


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


# ---- attention -------------------------------------------------------------------------------------------------------


def test_overview_and_windows_equal_the_patterns(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    pattern, found = dense(model, ids), attention.overview(model, ids, buckets=5)
    kept = attention.keep(model, ids)
    assert found.edges == bucket_edges(23, 5)
    np.testing.assert_allclose(found.tiles, pooled(pattern, found.edges, found.edges), atol=1e-5)
    np.testing.assert_allclose(found.received, pattern.sum(-2), atol=2e-5)  # a point for each position
    future = np.triu(np.ones((23, 23), dtype=bool), 1)
    for layer in range(3):
        for head in range(4):
            whole = attention.window(kept, layer, head)
            assert whole.exact
            assert np.isnan(whole.weights[future]).all()
            np.testing.assert_allclose(whole.weights[~future], pattern[layer, head][~future], atol=1e-5)


def test_statistics_equal_those_the_model_shows(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    names = {n: [f"blocks.{n}.attn.hook_{x}" for x in ("row_entropy", "sink", "received")] for n in range(3)}
    _, cache = model.run_with_cache(ids, names_filter=[*itertools.chain(*names.values())])
    found = attention.overview(model, ids)
    assert list(zip(found.statistics["layer"], found.statistics["head"], strict=True)) == [
        (n, h) for n in range(3) for h in range(4)
    ]
    table = found.statistics.set_index(["layer", "head"])
    for layer, (entropies, sinks, received) in names.items():
        expected = {
            "row_entropy": row_entropy(cache[entropies]),
            "normalised_entropy": row_entropy(cache[entropies], normalised=True),
            "effective_keys": effective_keys(cache[entropies]),
            "sink_mass": sink_mass(cache[sinks]),
        }
        for name, values in expected.items():
            assert table.loc[layer, name].tolist() == pytest.approx(values[0].tolist(), abs=1e-4), (layer, name)
        np.testing.assert_allclose(found.received[layer], cache[received][0], atol=1e-4)


def test_uniform_attention_has_the_uniform_numbers(tiny):
    """Queries of zero look everywhere alike: three queries by hand."""
    model = tiny()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.zero_()
    found = attention.overview(model, [3, 1, 4])
    tile = found.tiles[1, 2]
    np.testing.assert_allclose(tile[~np.isnan(tile)], [1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], atol=1e-6)
    row = found.statistics.iloc[5]
    assert row["row_entropy"] == pytest.approx((math.log(2) + math.log(3)) / 3)
    assert row["normalised_entropy"] == pytest.approx(1)
    assert row["effective_keys"] == pytest.approx(2)
    assert row["sink_mass"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert {name: row[name] for name in found.uniform} == pytest.approx(found.uniform)
    np.testing.assert_allclose(found.uniform_received, [11 / 6, 5 / 6, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(found.received[1, 2], found.uniform_received, atol=1e-6)


def test_largest_weights_survive_pooling(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    pattern, edges = dense(model, ids), bucket_edges(23, 5)
    found = attention.overview(model, ids, buckets=5, pool="max")
    np.testing.assert_allclose(found.tiles, pooled(pattern, edges, edges, np.max), atol=1e-5)
    cells = attention.window(attention.keep(model, ids), 2, 1, most=5, pool="max")
    np.testing.assert_allclose(cells.weights, pooled(pattern[2, 1], edges, edges, np.max), atol=1e-5)


@pytest.mark.parametrize("strip", [1, 40, 2**22])
@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 50), (0, 50)), ((13, 44), (7, 30)), ((2, 9), (20, 50)), ((49, 50), (3, 4))]
)
def test_any_window_in_any_number_of_cells(awake, monkeypatch, queries, keys, strip):
    monkeypatch.setattr(attention, "STRIP", strip)
    model, ids = awake("gqa"), some_ids(50)
    pattern, kept = dense(model, ids)[1, 3], attention.keep(model, ids, layers=[1])
    for most in (1, 4, 7, 512):
        found = attention.window(kept, 1, 3, slice(*queries), slice(*keys), most=most)
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
    kept = attention.keep(model, ids)
    assert kept.branches(2) == ["own", "cross.0", "cross.1"]
    assert kept.kinds == {
        0: "one softmax",
        1: "one softmax over the keys of own and cross",
        2: "one softmax over the keys of own and cross.0 and cross.1",
    }
    for branch, name in (("own", "hook_pattern"), ("cross.1", "cross.1.hook_pattern")):
        found = attention.window(kept, 2, 0, branch=branch).weights
        np.testing.assert_allclose(np.nan_to_num(found), cache[f"blocks.2.attn.{name}"][0, 0], atol=1e-5)


def test_mixed_scores_and_negative_mixtures(awake):
    """A mixture may have weights below 0, of which a cell's largest is not the masked 0."""
    for options in ({"attn_mix": "logit"}, {"lambda_a1": -0.5, "lambda_a_own": -0.25}):
        model, ids = awake("residual_attention", **options), some_ids()
        pattern, kept = dense(model, ids), attention.keep(model, ids)
        edges = bucket_edges(23, 6)
        for pool, how in (("mean", np.mean), ("max", np.max)):
            masked = pattern[2, 1].copy()
            masked[np.triu_indices(23, 1)] = 0 if pool == "mean" else -np.inf
            found = attention.window(kept, 2, 1, most=6, pool=pool).weights
            np.testing.assert_allclose(found, pooled(masked, edges, edges, how), atol=1e-5)


def test_a_window_by_hand():
    """One head of width 1: scores 0, ln 3 give weights 1/4, 3/4."""
    q, k = np.ones((2, 1, 1), np.float32), np.array([0, math.log(3)], np.float32).reshape(2, 1, 1)
    term = Term(weight=1.0, queries=q, keys=[k], branches=["own"], lse=np.array([[0, math.log(4)]], np.float32))
    kept = Kept(T=2, layers={0: [term]}, kinds={0: "one softmax"})
    assert kept.nbytes == 24
    np.testing.assert_allclose(attention.window(kept, 0, 0).weights, [[1, np.nan], [0.25, 0.75]], atol=1e-6)
    assert attention.window(kept, 0, 0, most=1).weights.tolist() == [[pytest.approx(1)]]
    largest = attention.window(kept, 0, 0, slice(1, 2), most=1, pool="max").weights
    assert largest.tolist() == [[pytest.approx(0.75)]]


def test_wrong_windows_are_refused_by_name(tiny):
    model = tiny()
    kept = attention.keep(model, some_ids(), layers=[1])
    with pytest.raises(UnknownName, match="unknown layer 0"):
        attention.window(kept, 0, 0)
    with pytest.raises(UnknownName, match="unknown head 4"):
        attention.window(kept, 1, 4)
    with pytest.raises(UnknownName, match="unknown pool 'mass'"):
        attention.window(kept, 1, 0, pool="mass")
    with pytest.raises(UnknownName, match="unknown pool 'sum'"):
        attention.overview(model, some_ids(), pool="sum")
    with pytest.raises(UnknownName, match="unknown branch 'cross'"):
        attention.window(kept, 1, 0, branch="cross")
    with pytest.raises(BadData, match="slice of neighbours"):
        attention.window(kept, 1, 0, slice(30, 40))
    with pytest.raises(BadData, match="slice of neighbours"):
        attention.window(kept, 1, 0, slice(0, 20, 2))
    with pytest.raises(BadData, match="at least one cell"):
        attention.window(kept, 1, 0, most=0)
    with pytest.raises(UnknownName, match="unknown layer 3"):
        attention.keep(model, some_ids(), layers=[3])


@pytest.mark.parametrize("architecture", ["transformer", "cross_layer"])
def test_long_prompts_need_no_square_of_memory(tiny, architecture):
    """T = 8,192: one T x T pattern of one head is 256 MiB, of all heads of a layer 1 GiB."""
    T = 8_192 if architecture == "transformer" else 4_096
    model = tiny(architecture, config={"n_layers": 2, "n_ctx": T})
    ids, process = some_ids(T), psutil.Process()
    attention.overview(model, ids[:, :256])  # whatever is made once
    before, peak, done = process.memory_info().rss, [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found, kept = attention.overview(model, ids), attention.keep(model, ids, layers=[1])
        whole = attention.window(kept, 1, 2)
        corner = attention.window(kept, 1, 2, slice(T - 100, T), slice(0, 100))
    finally:
        done.set()
        watcher.join()
    assert (peak[0] - before) / 2**20 < 200
    assert found.tiles.shape == (2, 4, 64, 64)
    assert found.received.shape == (2, 4, 512)
    assert whole.weights.shape == (512, 512)
    np.testing.assert_allclose(np.nansum(found.tiles, -1), 1, atol=1e-4)
    np.testing.assert_allclose(found.received.mean(-1), 1, atol=1e-3)
    np.testing.assert_allclose(np.nansum(whole.weights, -1), 1, atol=1e-4)
    blocks = whole.weights.reshape(64, 8, 64, 8)
    np.testing.assert_allclose(np.nansum(blocks, -1).mean(1)[10, :10], found.tiles[1, 2, 10, :10], atol=1e-5)
    assert corner.exact


# ---- streams read as predictions -------------------------------------------------------------------------------------


def test_the_lens_ends_in_the_models_prediction(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
    found = lens.lens(model, ids, top=3)
    log_p = logits[0].log_softmax(-1)
    np.testing.assert_array_equal(found.top_ids[3], log_p.topk(3).indices)
    np.testing.assert_allclose(found.top_probability[3], log_p.exp().topk(3).values, atol=1e-5)
    np.testing.assert_allclose(found.kl[3], 0, atol=1e-5)
    assert (found.kl[:3].max(1) > 1e-4).all()
    for layer in range(4):
        early = model.unembed(model.ln_final(cache[stream_hook(layer, 3)][0])).log_softmax(-1)
        true = early[torch.arange(22), ids[0, 1:]]
        np.testing.assert_allclose(found.probability[layer, :22], true.detach().exp(), atol=1e-5)
        np.testing.assert_array_equal(found.rank[layer, :22], (early[:22] > true[:, None]).sum(-1))
        np.testing.assert_allclose(found.entropy[layer], torch.special.entr(early.exp()).sum(-1).detach(), atol=1e-4)
        gap = torch.nn.functional.kl_div(early, log_p, log_target=True, reduction="none").sum(-1)
        np.testing.assert_allclose(found.kl[layer], gap.detach(), atol=1e-4)
    assert np.isnan(found.probability[:, 22]).all()
    assert found.targets[:2] == [str(i) for i in ids[0, 1:3].tolist()]
    assert found.targets[22] == ""
    assert found.top_tokens[3][0] == [str(i) for i in found.top_ids[3, 0]]


def test_lens_of_some_positions_and_of_other_targets(awake, monkeypatch):
    model, ids = awake("resformer"), some_ids()
    whole, own = lens.lens(model, ids), lens.lens(model, ids, "own")
    monkeypatch.setattr("workbench.looks.reading.LOGITS", 5 * V)  # several chunks
    part = lens.lens(model, ids, positions=slice(3, 20))
    assert part.positions.tolist() == list(range(3, 20))
    assert part.tokens == whole.tokens[3:20]
    for name in ("probability", "rank", "entropy", "kl", "top_probability"):
        np.testing.assert_allclose(getattr(part, name), getattr(whole, name)[:, 3:20], atol=1e-6)
    token = int(ids[0, 4])
    fixed = lens.lens(model, ids, token)
    assert fixed.targets == [str(token)] * 23
    assert fixed.probability[2, 4] == own.probability[2, 4]
    assert fixed.probability[2, 3] == whole.probability[2, 3]
    with pytest.raises(UnknownName, match="unknown targets 'last'"):
        lens.lens(model, ids, "last")
    with pytest.raises(BadData, match="token id 61 leaves"):
        lens.lens(model, ids, 61)


def test_a_hooked_stream_is_no_reading_of_the_model(tiny):
    """What the head reads was replaced, so the last stream does not say what the model says."""
    model = tiny()
    with (
        model.hooks([("ln_final.hook_normalized", lambda x, hook: x * 2)]),
        pytest.raises(WorkbenchError, match="misses"),
    ):
        lens.lens(model, some_ids())


def test_identity_is_nearest_embedding_per_position(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    found = lens.identity(model, ids)
    records = pd.DataFrame(nearest_embedding(model, Sample(ids, range(1), "ids"), RepeatedData(V), 1))
    records = records[records["variant"].isna() & records["control"].isna()]
    seen = {(s, n): float(row.mean()) for s, t in found.reciprocal_rank.items() for n, row in enumerate(t)}
    expected = {(s, n): v for s, n, v in zip(records["site"], records["layer"], records["value"], strict=True)}
    assert {key: value for key, value in seen.items() if not math.isnan(value)} == pytest.approx(expected, abs=1e-6)
    assert found.chance == pytest.approx(sum(1 / n for n in range(1, 62)) / 61)


def test_identity_by_hand(tiny):
    """Embeddings and first values name their token; a place and a site can be chosen."""
    model, ids = tiny("svformer"), some_ids()
    found = lens.identity(model, ids, sites=["v"], positions=slice(4, 9))
    assert list(found.reciprocal_rank) == ["v"]
    np.testing.assert_array_equal(found.reciprocal_rank["v"], np.ones((3, 5)))
    assert (lens.identity(model, ids).reciprocal_rank["stream"][0] == 1).all()
    with pytest.raises(UnknownName, match="unknown site 'z'"):
        lens.identity(model, ids, sites=["z"])


# ---- prompts, predictions, values ------------------------------------------------------------------------------------


def test_predictions_equal_the_logits(awake, any_architecture, monkeypatch):
    model, ids = awake(any_architecture), some_ids()
    log_p = model(ids)[0].detach().log_softmax(-1)
    monkeypatch.setattr("workbench.looks.reading.LOGITS", 4 * V)
    found = prompt.predictions(model, ids, position=-2, top=4)
    assert found.position == 21
    best = log_p[21].exp().topk(4)
    assert found.top["id"].tolist() == best.indices.tolist()
    assert found.top["probability"].tolist() == pytest.approx(best.values.tolist(), abs=1e-6)
    assert np.isnan(found.loss[0])
    loss = model(ids, return_type="loss", loss_per_token=True)[0].detach()
    np.testing.assert_allclose(found.loss[1:], loss, atol=1e-5)
    true = log_p[torch.arange(22), ids[0, 1:]]
    np.testing.assert_array_equal(found.rank[1:], (log_p[:22] > true[:, None]).sum(-1))


def test_value_norms_of_a_value_residual_by_hand(tiny):
    """v_2 = 3 v_1 + 0.5 own: norms, shares and cosines against the tensors themselves."""
    model, ids = tiny("resformer_constant", lambda_v1=3.0, lambda_own=0.5), some_ids()
    _, cache = model.run_with_cache(ids)
    found = prompt.values(model, ids)
    first, own, v = (cache[f"blocks.2.attn.{x}hook_v"][0].flatten(1) for x in ("first.", "own.", ""))
    for name, expected in {
        "own": own.norm(dim=-1),
        "own_part": 0.5 * own.norm(dim=-1),
        "first_part": 3 * first.norm(dim=-1),
        "effective": v.norm(dim=-1),
        "cosine": (own * v).sum(-1) / own.norm(dim=-1) / v.norm(dim=-1),
    }.items():
        np.testing.assert_allclose(getattr(found, name)[2], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.stream[3], cache[stream_hook(3, 3)][0].norm(dim=-1), rtol=1e-5)
    ratio = found.drains.set_index(["site", "layer"])["ratio"]
    norms = v.norm(dim=-1)
    assert ratio["v", 2] == pytest.approx(float(norms[0] / norms[1:].quantile(0.5)), rel=1e-5)
    assert ("stream", 3) in ratio.index


def test_values_that_a_layer_lacks_are_absent(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    found = prompt.values(model, ids)
    assert np.isfinite(found.effective).all()
    assert np.isfinite(found.stream).all()
    has_own = [f"blocks.{n}.attn.own.hook_v" in model.hook_dict for n in range(3)]
    assert np.isfinite(found.own).all(1).tolist() == has_own
    assert np.isfinite(found.cosine).all(1).tolist() == has_own
    parts = decompose(model, ids, by="value_path").labels
    if any_architecture.startswith(("resformer", "svformer")) and "sparse" not in any_architecture:
        assert np.isfinite(found.first_part).all(1).tolist() == [False, True, True]
        assert "L2H0.first" in parts or "L2H0.source.0" in parts
    if any_architecture in ("transformer", "neutreno", "denseformer", "cross_layer"):
        assert np.isnan(found.first_part).all()


def test_a_coefficient_without_sources_counts(awake):
    """Between its tables a value embedding scales the layer's own value and adds nothing."""
    model = awake("value_embedding")
    found = prompt.values(model, some_ids())
    assert abs(float(model.value_embedding.own[1].detach()) - 1) > 0.01
    np.testing.assert_allclose(found.own_part[1], found.effective[1], rtol=1e-5)


def test_a_model_without_a_tokenizer_reads_ids(tiny):
    model = tiny()
    found = prompt.tokenise(model, " 3, 14 15\n60")
    assert found.ids.tolist() == [[3, 14, 15, 60]]
    assert found.tokens == ["3", "14", "15", "60"]
    for text in ("61 3", "9" * 5000):
        with pytest.raises(BadData, match=r"is no id of this model, whose ids are 0 to 60"):
            prompt.tokenise(model, text)
    for text in ("-1 3", "1.5 2", "٣ 4", "² 4"):
        with pytest.raises(BadData, match="so it reads token ids"):
            prompt.tokenise(model, text)


def test_prompts_of_letters_and_their_errors(tiny):
    model = tiny()
    found = prompt.tokenise(model, "ab c", letters=True)
    assert found.ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert found.tokens == list("abcabc")
    drawn = prompt.tokenise(model, None, letters=True, period=5)
    assert drawn.ids.shape == (1, 10)
    assert drawn.ids[0, :5].tolist() == drawn.ids[0, 5:].tolist()
    with pytest.raises(BadData, match="the sequence is empty"):
        prompt.tokenise(model, " ", letters=True)
    with pytest.raises(BadData, match=r"^\+: not among this model's tokens"):
        prompt.tokenise(model, "a+", letters=True)  # the 63rd symbol of 61
    with pytest.raises(BadData, match="the prompt is empty"):
        prompt.tokenise(model, "  ")
    with pytest.raises(BadData, match=r"write them as 3 14 15, or put its tokenizer\.json"):
        prompt.tokenise(model, "text")
    with pytest.raises(BadData, match="6 tokens long; this view reads 2 to 5"):
        prompt.tokenise(model, "abc", letters=True, most=5)
    with pytest.raises(BadData, match="130 tokens long; this model reads 2 to 128, its context"):
        prompt.tokenise(model, "a" * 65, letters=True, most=1000)
    assert prompt.predictions(model, found.ids, top=2, letters=True).tokens == list("abcabc")


class Words:
    """A tokenizer of four words, fewer than the model has ids."""

    vocab_size = 4

    def encode(self, text):
        return ["the", "cat", "sat", "mat"].index(text) if " " not in text else [self.encode(w) for w in text.split()]

    def token_strings(self, ids):
        return [["the", "cat", "sat", "mat"][i] for i in ids]


def test_ids_that_the_tokenizer_does_not_know_have_names_too(tiny):
    """Vocabularies are padded: a model may predict ids that are no text."""
    model = tiny()
    model.tokenizer = Words()
    given = prompt.tokenise(model, "the cat sat")
    assert given.tokens == ["the", "cat", "sat"]
    top = prompt.predictions(model, given.ids, top=V).top
    assert top.set_index("id").loc[[2, 60], "token"].tolist() == ["sat", "#60"]
    assert {"mat", "#4"} <= {t for cell in lens.lens(model, given.ids, top=V).top_tokens[0] for t in cell}


def test_what_is_no_one_prompt_is_refused(tiny):
    model = tiny()
    looks = (attention.overview, attention.keep, lens.lens, lens.identity, prompt.predictions, prompt.values)
    for look in looks:
        with pytest.raises(BadData, match="2 prompts at once"):
            look(model, some_ids().repeat(2, 1))
        with pytest.raises(BadData, match="1 token long"):
            look(model, [3])
        with pytest.raises(BadData, match="129 tokens exceed the model's context of n_ctx=128"):
            look(model, some_ids(129))
    with pytest.raises(BadData, match="position 23"):
        prompt.predictions(model, some_ids(), position=23)


# ---- a logit taken apart ---------------------------------------------------------------------------------------------


def test_every_level_sums_to_the_logit(awake, any_architecture):
    model, ids = awake(any_architecture), some_ids()
    logits = model(ids)[0].detach().double()
    for position, against in ((-1, None), (7, 11)):
        found = attribution.attribute(model, ids, position, 5, against)
        row = logits[position]
        assert found.logit == pytest.approx(float(row[5] - (0 if against is None else row[against])), abs=1e-5)
        assert list(found.totals) == ["layer", "head", "value_path"]
        assert found.error < 1e-4
        frame = found.frame
        assert len(frame[frame["level"] == "layer"]) == 7
        for finer, coarser in (("head", "layer"), ("value_path", "head")):
            keys = ["part", "layer"] if coarser == "layer" else ["part", "layer", "head"]
            sums = [frame[frame["level"] == x].groupby(keys, dropna=False)["value"].sum() for x in (finer, coarser)]
            pd.testing.assert_series_equal(*sums, atol=1e-4, rtol=0)


def test_parts_of_a_logit_are_those_of_decompose(awake):
    model, ids = awake("resformer"), some_ids()
    found = attribution.attribute(model, ids, 9, 5, 11)
    parts = decompose(model, ids, to="logits", by="value_path", tokens=5, against=11)
    paths = found.frame[found.frame["level"] == "value_path"].set_index(["layer", "head", "path"])["value"]
    for label, key in {"L2H3.first": (2, 3, "first"), "L1H0.own": (1, 0, "own")}.items():
        assert paths[key] == pytest.approx(float(parts[label][0, 9]), abs=1e-5)
    mlp = found.frame.query("level == 'layer' and part == 'mlp' and layer == 1")["value"].item()
    assert mlp == pytest.approx(float(parts["1_mlp_out"][0, 9]), abs=1e-5)
    with pytest.raises(BadData, match="token id 61 leaves"):
        attribution.attribute(model, ids, 9, 61)
    with pytest.raises(BadData, match="position 40"):
        attribution.attribute(model, ids, 40, 5)


# ---- other people's models -------------------------------------------------------------------------------------------


@pytest.fixture
def observed():
    """An observed decoder of other people's, that mixes values."""
    module = strangers.large(strangers.GPT([(0.4, 0.6)] * 3))
    return workbench.observe(module, some_ids(), quiet=True)


def test_observed_models_are_looked_at_as_far_as_they_show(observed):
    ids = some_ids()
    _, cache = observed.run_with_cache(ids)
    found, kept = attention.overview(observed, ids), attention.keep(observed, ids)
    for layer in range(3):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].detach()
        np.testing.assert_allclose(np.nan_to_num(found.tiles[layer]), pattern, atol=1e-5)
        np.testing.assert_allclose(np.nan_to_num(attention.window(kept, layer, 1).weights), pattern[1], atol=1e-5)
    log_p = observed(ids)[0].detach().log_softmax(-1)
    next_tokens = prompt.predictions(observed, ids, top=3).top["probability"].tolist()
    assert next_tokens == pytest.approx(log_p[-1].exp().topk(3).values.tolist(), abs=1e-6)
    sizes = prompt.values(observed, ids)
    norms = cache["blocks.2.attn.hook_v"][0].detach().flatten(1).norm(dim=-1)
    np.testing.assert_allclose(sizes.effective[2], norms, rtol=1e-5)
    own, first = (cache[f"blocks.2.attn.{x}.hook_v"][0].detach().flatten(1).norm(dim=-1) for x in ("own", "first"))
    np.testing.assert_allclose(sizes.own_part[2], 0.6 * own, rtol=1e-4)
    np.testing.assert_allclose(sizes.first_part[2], 0.4 * first, rtol=1e-4)
    assert lens.identity(observed, ids).reciprocal_rank["v"].shape == (3, 23)


@torch.no_grad()
def test_the_lens_of_an_observed_model_is_its_own_norm_and_head_on_each_stream(observed):
    ids, module = some_ids(), observed.foreign
    _, cache = observed.run_with_cache(ids)
    found = lens.lens(observed, ids, top=3)
    for layer in range(4):
        stream = cache["blocks.2.hook_resid_post" if layer == 3 else f"blocks.{layer}.hook_resid_pre"]
        chances = module.lm_head(module.transformer.ln_f(stream))[0].softmax(-1)
        best = chances.topk(3)
        np.testing.assert_allclose(found.top_probability[layer], best.values, atol=1e-6)
        np.testing.assert_array_equal(found.top_ids[layer], best.indices)
    assert found.kl[-1].max() == 0 < found.kl[0].min()
    some = lens.lens(observed, ids, positions=slice(3, 5))
    np.testing.assert_array_equal(some.kl, found.kl[:, 3:5])


@pytest.mark.parametrize("zero", ["blocks", "head"])
def test_the_lens_of_an_observed_model_that_has_learned_nothing_reads_the_same_everywhere(observed, zero):
    """Output projections, or the head, at zero, as many trainings begin."""
    module = observed.foreign
    with torch.no_grad():
        for block in module.transformer.h:
            for p in (*block.attn.c_proj.parameters(), *block.mlp[-1].parameters()) if zero == "blocks" else ():
                p.zero_()
        if zero == "head":
            module.lm_head.weight.zero_()
    found = lens.lens(observed, some_ids())
    np.testing.assert_allclose(found.kl, 0, atol=1e-6)


def test_first_values_are_each_tokens_alone_where_positions_are_in_the_stream(observed):
    """A token further on in a text has another first value, and none of the table's rows may be one of those."""
    from workbench.interventions.retention import token_tables

    ids = some_ids()
    _, cache = observed.run_with_cache(ids, names_filter="blocks.0.attn.hook_v")
    first = torch.nn.functional.normalize(cache["blocks.0.attn.hook_v"][0, 0].flatten().double(), dim=-1)
    table = token_tables(observed, ["v"])["v"]
    assert table.shape == (61, 32)
    assert not table.requires_grad
    torch.testing.assert_close(table[ids[0, 0]], first, atol=1e-6, rtol=0)
    alone = observed.run_with_cache(ids[:, 7:8], names_filter="blocks.0.attn.hook_v")[1]["blocks.0.attn.hook_v"]
    torch.testing.assert_close(
        table[ids[0, 7]], torch.nn.functional.normalize(alone.flatten().double(), dim=-1), atol=1e-6, rtol=0
    )


def test_an_observed_model_whose_output_does_not_follow_its_last_stream_has_no_lens(observed, monkeypatch):
    fixed = observed.everywhere(some_ids())
    monkeypatch.setattr(observed, "everywhere", lambda ids: fixed)
    with pytest.raises(BadData, match="reads its output from elsewhere"):
        lens.lens(observed, some_ids())


def test_what_an_observed_model_cannot_be_asked_is_said(observed):
    with pytest.raises(BadData, match="parts cannot be told of a model that is observed from outside"):
        attribution.attribute(observed, some_ids(), -1, 5)
