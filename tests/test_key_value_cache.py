"""The key-value cache: the same logits with and without it, what it holds, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from decoding import EVERY, NAMES, in_chunks
from inputs import WIDE, tokens

from workbench.config import PRESETS
from workbench.errors import BadData
from workbench.measurement.measuring import measure
from workbench.metrics.weights import cache_bytes, cache_traffic
from workbench.models import compose

# ---- cached and uncached are one -------------------------------------------------------------------------------------


@pytest.mark.fast(9)
@pytest.mark.parametrize(("architecture", "options", "config"), EVERY, ids=NAMES)
def test_cached_decoding_equals_the_full_pass(awake, architecture, options, config):
    model = awake(architecture, dtype=WIDE, config=config, **options)
    ids = tokens(model, 11)
    whole = model(ids)
    for sizes in ((), (4, 3), (11,)):
        cache = model.new_cache(2)
        assert (in_chunks(model, ids, sizes, cache) - whole).abs().max() < 1e-10
        assert cache.length == 11
    model.float()
    assert (in_chunks(model, ids, (5,)) - model(ids)).abs().max() < 1e-5 * whole.abs().max()


def test_a_narrow_cache_stores_what_it_says(awake):
    model = awake("svformer")
    ids, cache = tokens(model, 12), model.new_cache(2, dtype=torch.bfloat16)
    found = in_chunks(model, ids, (6,), cache)
    assert {entry.dtype for entry in cache.entries.values()} == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert 0 < (found - model(ids)).abs().max() < 0.05 * found.abs().max()


# ---- what the cache holds --------------------------------------------------------------------------------------------


def elements(name, options, L, D):
    """Cached elements per token by the published formulas, D the width of all key-value heads."""
    anchors = len(options.get("anchors", ())) or -(-L // options.get("refresh_every", L))
    group = options.get("group", 2)
    leaders = 1 if group == "all" else -(-L // group)
    keys = values = L
    parts = name.split("+")
    share = options.get("share", "k" if name.startswith("svformer+cla") else "kv")
    for part in parts:
        if part == "svformer":
            values = anchors
        values = (L + 1) / 2 if part == "skip_v1" else values
        shared = {"cla": share, "share_k": "k", "share_v": "v"}.get(part, "")
        keys = leaders if "k" in shared else keys
        values = leaders if "v" in shared else values
    return (keys + values) * D


@pytest.mark.fast(9)
@pytest.mark.parametrize(("architecture", "options", "config"), EVERY, ids=NAMES)
def test_bytes_held_equal_the_formula_and_the_storage(tiny, architecture, options, config):
    model = tiny(architecture, config=config, **options)
    c = model.config
    cache = model.new_cache(2, reserve=10)
    in_chunks(model, tokens(model, 10), (6,), cache)
    each = elements(architecture, options, c.n_layers, c.d_key_value)
    assert cache.nbytes() == 2 * 10 * each * 4
    storages = {e.untyped_storage().data_ptr(): e.untyped_storage().nbytes() for e in cache.entries.values()}
    assert sum(storages.values()) == cache.nbytes()
    if architecture not in {
        "transformer",
        "svformer",
        "gqa",
        "cla",
        "cla+cross_layer_all",
        "skip_v1",
        "bank_of_values",
    }:
        return  # what is measured is the same cache
    frame = measure(model, ["cache_bytes", "cache_traffic"], tokens(model, 10))
    assert frame["control"].fillna("").tolist() == ["", "formula", "", "capacity"]
    assert frame["value"][[0, 1, 3]].tolist() == [2.0 * each] * 3
    assert frame["value"][2] >= 2.0 * each


PUBLISHED = {  # bytes a token at 16 bits: 82M and 468M
    ("transformer",): (16_384, 98_304), ("svformer",): (9_216, 51_200), ("gqa",): (8_192, 49_152), ("cla",): (8_192, 49_152),
    ("svformer+gqa",): (2_304, 12_800), ("gqa", ("query_group", 8)): (2_048, 12_288),
    ("cla+gqa", ("query_group", 4)): (2_048, 12_288),
}  # fmt: skip


@pytest.mark.parametrize("preset", [0], ids=["82m"])
@pytest.mark.parametrize("key", PUBLISHED, ids=lambda key: "-".join(map(str, key)))
def test_bytes_of_the_published_shapes(key, preset):
    shape = PRESETS[("82m", "468m")[preset]].model.replace(d_vocab=5, d_mlp=2, n_ctx=8)
    with torch.device("meta"):
        model = compose(key[0], shape, **dict(key[1:]))
    model.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    for p in model.parameters():
        p.zero_()
    cache = model.new_cache()
    in_chunks(model, torch.tensor([[1, 2, 3]]), (2,), cache)
    weights, found = dict(model.named_parameters()), PUBLISHED[key][preset]
    assert cache_bytes(cache, weights)[0].value == cache_bytes(cache, weights, formula=True)[0].value == found
    # sharing between layers saves room, not reads; grouped heads save both
    grouped = model.config.n_heads // model.config.n_key_value_heads
    assert cache_traffic(cache)[0].value == PUBLISHED["transformer",][preset] / grouped


def test_traffic_counts_every_reader(tiny):
    """Elements of width 32 that three layers read of each position: own keys and values, and those of other layers."""
    reads = {"transformer": 6, "svformer": 6, "cla": 6, "cross_layer": 6 + 2 + 2, "cross_layer_all": 6 + 2 + 4}
    reads["residual_attention"] = 6 + 1 + 1
    for architecture, expected in reads.items():
        model = tiny(architecture)
        cache = model.new_cache(2)
        in_chunks(model, tokens(model, 7), (4,), cache)
        assert cache.traffic() == 2 * 7 * 32 * 4 * expected, architecture


# ---- using the cache oneself -----------------------------------------------------------------------------------------


def test_a_cache_refuses_another_model_batch_or_too_much(tiny):
    model, other = tiny(), tiny(seed=1)
    cache = model.new_cache(2)
    model(tokens(model, 100), past_kv_cache=cache)
    with pytest.raises(BadData, match=r"another model: make one with model.new_cache"):
        other(tokens(model, 3), past_kv_cache=cache)
    with pytest.raises(BadData, match=r"holds 2 sequences, these are 3; make one with new_cache\(3\)"):
        model(tokens(model, 3, batch=3), past_kv_cache=cache)
    with pytest.raises(BadData, match=r"100 cached and 29 new tokens exceed .* room for 28"):
        model(tokens(model, 29), past_kv_cache=cache)
    with pytest.raises(BadData, match=r"choose from 0\.\.100"):
        cache.truncate(101)
    assert cache.length == 100
    model(tokens(model, 28), past_kv_cache=cache)


@pytest.mark.parametrize("architecture", ["svformer", "cross_layer_all", "bank_of_values"])
@pytest.mark.parametrize("first", [0, 5])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(awake, architecture, first):
    """Also where a hook had made a borrowing layer store values of its own, and where room ran out on the way."""
    model = awake(architecture, dtype=WIDE)
    ids, cache = tokens(model, 9), model.new_cache(2)
    whole = model(ids)
    if first:
        model(ids[:, :first], past_kv_cache=cache)
    before = cache.nbytes()

    def fail(x, hook):
        raise RuntimeError("in the last layer")

    broken = [("blocks.1.attn.hook_v", lambda v, hook: 0 * v), ("blocks.2.hook_attn_out", fail)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the last layer"), model.hooks(broken):
            model(ids[:, first:], past_kv_cache=cache)
        assert cache.length == first
    assert (model(ids[:, first:], past_kv_cache=cache) - whole[:, first:]).abs().max() < 1e-10
    fresh = model.new_cache(2)
    model(ids, past_kv_cache=fresh)
    assert cache.nbytes() == fresh.nbytes() >= before
    assert cache.traffic() == fresh.traffic()


@torch.no_grad()
@pytest.mark.parametrize("from_step", [0, 6])
@pytest.mark.parametrize("point", ["hook_v", "own.hook_v"])
def test_heads_that_are_shared_are_stored_once_a_hook_changes_them(awake, point, from_step):
    """Also from the middle of a sequence on, when the source's past is theirs."""
    model = awake("skip_v1", dtype=WIDE)
    ids, name = tokens(model, 9), f"blocks.1.attn.{point}"

    def change(v, hook):
        v[:, max(from_step - start, 0) :] *= 2  # in place: the source's own must not notice

    start = 0
    with model.hooks([(name, change)]):
        whole = model(ids)
    cache, found = model.new_cache(2), []
    for part in ids.split(3, 1):
        with model.hooks([(name, change)] if start + 3 > from_step else []):
            found.append(model(part, past_kv_cache=cache))
        start += 3
    assert (torch.cat(found, 1) - whole).abs().max() < 1e-10
    assert (whole - model(ids)).abs().max() > 1e-3
    others = [key for key in cache.entries if key[0] == "v of others"]
    assert others == ([] if point == "own.hook_v" else [("v of others", 1)])


@pytest.mark.parametrize("architecture", ["transformer", "svformer", "cla", "cross_layer"])
def test_branches_of_a_cache_and_going_back(awake, architecture):
    model = awake(architecture, dtype=WIDE)
    ids, other = tokens(model, 9), tokens(model, 9, seed=1)
    mixed = torch.cat((ids[:, :5], other[:, 5:]), 1)
    trunk = model.new_cache(2)
    model(ids[:, :5], past_kv_cache=trunk)
    branch = trunk.clone()
    found = in_chunks(model, other[:, 5:], (), branch)
    assert trunk.length == 5
    assert (found - model(mixed)[:, 5:]).abs().max() < 1e-10
    assert (in_chunks(model, ids[:, 5:], (), trunk) - model(ids)[:, 5:]).abs().max() < 1e-10
    trunk.truncate(5)
    assert (in_chunks(model, other[:, 5:], (2,), trunk) - model(mixed)[:, 5:]).abs().max() < 1e-10
    trunk.truncate(0)
    assert trunk.nbytes() == 0
    assert (in_chunks(model, ids, (2,), trunk) - model(ids)).abs().max() < 1e-10
