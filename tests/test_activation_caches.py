"""Caches of activations: names, filters, layouts, slices, and patterns that are rebuilt when they are named."""

from __future__ import annotations

import pytest
import torch
from hooked import KV_HEADS, WIDE, tokens
from kernel_inputs import LargestTensor
from seams import TOGETHER
from transformer_lens import ActivationCache

from workbench.errors import UnknownName, WorkbenchError
from workbench.hook_names import QUADRATIC, is_statistic
from workbench.kernels.joint_and_null_softmax import STRIP


def test_a_cache_is_an_activation_cache_with_our_names_and_layouts(tiny, some_architecture):
    kv_heads = KV_HEADS.get(some_architecture, 2)
    model = tiny(some_architecture, config={"n_key_value_heads": kv_heads})
    plain = model(tokens(5))
    logits, cache = model.run_with_cache(tokens(5))
    assert isinstance(cache, ActivationCache)
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)  # streamed statistics take the streamed output
    assert set(cache.keys()) == {name for name in model.hook_dict if not name.endswith(QUADRATIC)}
    shapes = {
        "q": (2, 5, 4, 8),
        "k": (2, 5, kv_heads, 8),
        "v": (2, 5, kv_heads, 8),
        "z": (2, 5, 4, 8),
        "pattern": (2, 4, 5, 5),
    }
    for name, shape in shapes.items():
        assert cache[name, 1].shape == shape
    assert cache["resid_pre", 1].shape == (2, 5, 32)
    assert cache["blocks.1.attn.hook_received"].shape == (2, 4, 5)
    assert cache["blocks.1.ln1.hook_normalized"].shape == (2, 5, 32)
    assert cache["ln_final.hook_scale"].shape == (2, 5, 1)
    assert cache["blocks.2.mlp.hook_post"].shape == (2, 5, 48)


def test_filters_by_name_names_and_function(tiny):
    model = tiny()
    for given, expected in (
        ("blocks.0.attn.hook_v", {"blocks.0.attn.hook_v"}),
        (["hook_embed", "blocks.2.attn.hook_z"], {"hook_embed", "blocks.2.attn.hook_z"}),
        (lambda name: name.endswith("hook_q"), {f"blocks.{i}.attn.hook_q" for i in range(3)}),
        ([], set()),
    ):
        assert set(model.run_with_cache(tokens(4), names_filter=given)[1].keys()) == expected
    with pytest.raises(UnknownName, match=r"blocks\.0\.attn\.hook_pattern"):
        model.run_with_cache(tokens(4), names_filter=["blocks.0.attn.hook_patern"])
    (logits, loss), cache = model.run_with_cache(tokens(4), names_filter=[], return_type="both")
    assert logits.shape == (2, 4, 61)
    assert loss.ndim == 0
    with pytest.raises(KeyError, match=r"no .*'v', 0.* was cached"):
        cache["v", 0]
    whole = model.run_with_cache(tokens(4))[1]
    for wrong in ("blocks.0.atn.hook_v", ("vv", 0), ("v", 1, "source.7")):
        with pytest.raises(KeyError, match=r"was cached; did you mean .*blocks\.[01]\.attn"):
            whole[wrong]
    with pytest.raises(KeyError):
        cache["pattern", 0]
    with pytest.raises(WorkbenchError, match="2 sequences, not 1"):
        model.run_with_cache(tokens(4), remove_batch_dim=True)


@pytest.mark.slow
def test_caching_everything_forms_no_quadratic_tensor(some_architecture, tiny):
    """T = 512 with 4 heads: a pattern has 4 T^2 elements; all else at most a strip of queries with the keys they see."""
    T = 512
    model = tiny(some_architecture, config={"n_ctx": T, "n_layers": 2})
    ids = tokens(T, batch=1)
    names = [name for name in model.hook_dict if not is_statistic(name)]
    sets = 2 if "cross_layer" in some_architecture else 0
    with torch.no_grad(), LargestTensor() as largest:
        model.run_with_cache(ids)
    assert largest.numel <= T * T * 2
    with torch.no_grad(), LargestTensor() as plain:
        model.run_with_cache(ids, names_filter=[n for n in names if not n.endswith(QUADRATIC)])
    streams = 32 * max([1, *(s.streams for s in model.shortcuts)])
    assert plain.numel <= T * max(61, STRIP * sets, streams)  # logits, a strip's mask, or several streams
    with torch.no_grad(), LargestTensor() as eager:
        model.run_with_cache(ids, names_filter="blocks.0.attn.hook_pattern")
    assert eager.numel == T * T * 4


@pytest.mark.fast(3)
@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rebuilt_scores_and_patterns_equal_the_cached(tiny, kv_heads, dtype):
    model = tiny("resformer", config={"n_key_value_heads": kv_heads}, dtype=dtype)
    ids = tokens(7, batch=1)
    names = [name for name in model.hook_dict if name.endswith(QUADRATIC)]
    eager = model.run_with_cache(ids, names_filter=names)[1]
    rebuilt = model.run_with_cache(ids)[1]
    moved = model.run_with_cache(ids)[1].to("cpu")
    single = model.run_with_cache(ids, remove_batch_dim=True)[1]
    later = model.run_with_cache(ids)[1].remove_batch_dim()
    first = model.run_with_cache(tokens(7, batch=1).repeat(3, 1))[1].apply_slice_to_batch_dim([0])
    tight = 1e-5 if dtype == torch.float32 else 1e-13
    for layer in range(3):
        for name in ("pattern", "attn_scores"):
            true = eager[name, layer]
            for cache in (rebuilt, moved, first):
                assert cache[name, layer].dtype == dtype
                torch.testing.assert_close(cache[name, layer], true, atol=tight, rtol=tight)
            for cache in (single, later):
                torch.testing.assert_close(cache[name, layer], true[0], atol=tight, rtol=tight)
    assert f"blocks.0.attn.{QUADRATIC[0]}" in rebuilt.cache_dict
    assert torch.equal(rebuilt["pattern", -1], rebuilt["pattern", 2])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TOGETHER[::3])
def test_pos_slice_cuts_the_position_of_every_hook_point(tiny, architecture):
    """Sizes are all different, so a cut along heads or the batch would show."""
    config = {"d_model": 36, "n_heads": 6, "n_layers": 2} | ({} if architecture == "mqa" else {"n_key_value_heads": 3})
    model = tiny(architecture, config=config, **({"query_group": 2} if architecture == "svformer+gqa" else {}))
    everything, ids = list(model.hook_dict), {False: tokens(8), True: tokens(8, batch=1)}
    whole = {remove: model.run_with_cache(ids[remove], names_filter=everything)[1] for remove in ids}
    for cut, remove in ((2, False), ((1, 4), False), ([0, 3, 5], False), (2, True), ([0, 3, 5], True)):
        sliced = model.run_with_cache(ids[remove], pos_slice=cut, remove_batch_dim=remove)[1]
        assert sliced.has_batch_dim != remove
        assert set(sliced.keys()) == set(everything)
        index = torch.tensor({2: [2], (1, 4): [1, 2, 3]}[cut] if not isinstance(cut, list) else cut)
        for name in everything:
            true, point = whole[remove][name], name.rsplit(".", 1)[-1]
            if is_statistic(name) or name.endswith(QUADRATIC):
                axis = 2
            elif point.endswith("_mix") or point == "hook_dwa_weights":
                axis = None
            else:
                axis = 1
            if axis is not None:
                assert true.shape[axis] == 8
                true = true.index_select(axis, index)
                true = true[0] if remove else true
            torch.testing.assert_close(sliced[name], true, msg=name)
