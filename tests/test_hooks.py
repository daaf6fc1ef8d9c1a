"""Hooks: free when absent, exact when present, gone afterwards; caches, gradients, statistics, threads, lenses."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint

from workbench.errors import UnknownName, WorkbenchError
from workbench.kernels import attention_reference
from workbench.kernels.joint import STRIP
from workbench.models import ARCHITECTURES
from workbench.names import QUADRATIC, STATISTICS, is_statistic, position_axis

WIDE = torch.float64
COMBINED = ["resformer+cross_layer", "neutreno+gated_attention", "value_embedding+residual_k"]
KV_HEADS = {"gqa": 2, "mqa": 1, "svformer+gqa": 1}
"""Of four heads, where the architecture itself says how many."""


def grouped(architecture, kv_heads):
    """Config with so many key-value heads; an architecture with a number of its own is tested once."""
    if kv_heads == 4 and architecture in KV_HEADS:
        pytest.skip(f"{architecture} has {KV_HEADS[architecture]} key-value heads of 4 beside the others' 2 as well")
    return {"n_key_value_heads": KV_HEADS.get(architecture, kv_heads)}


def tokens(length, *, batch=2, seed=0):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def listening(model):
    return [name for name, point in model.hook_dict.items() if point._forward_hooks or point._backward_hooks]


# ---- absent hooks ----------------------------------------------------------------------------------------------------


def test_without_hooks_no_hook_point_is_called(any_architecture, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(HookPoint, "__call__", lambda self, x: calls.append(self.name) or x)
    model = tiny(any_architecture)
    model(tokens(9), return_type="loss").backward()
    assert calls == []
    with model.hooks([("blocks.1.attn.hook_v", lambda v, hook: None)]):
        model(tokens(9))
    assert calls == ["blocks.1.attn.hook_v"]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_every_hook_point_fires_once_a_run(tiny, architecture):
    model = tiny(architecture)
    seen = []
    with model.hooks([(lambda name: True, lambda x, hook: seen.append(hook.name))]):
        model(tokens(5))
    assert sorted(seen) == sorted(model.hook_dict)


def test_hooks_are_gone_after_a_run_and_after_an_error(tiny):
    model = tiny("resformer")

    def fail(x, hook):
        raise RuntimeError("mid-run")

    edits = [("blocks.0.hook_resid_mid", lambda x, hook: None), ("blocks.1.attn.hook_z", fail)]
    with pytest.raises(RuntimeError, match="mid-run"):
        model.run_with_hooks(tokens(4), fwd_hooks=edits)
    assert listening(model) == []
    with pytest.raises(UnknownName, match=r"did you mean blocks\.0\.hook_resid_mid"):
        model.run_with_hooks(tokens(4), fwd_hooks=[("hook_embed", fail), ("blocks.0.hook_resid_mi", fail)])
    assert listening(model) == []
    with pytest.raises(RuntimeError, match="loss"):
        model.run_with_grads(tokens(4), "hook_embed", fail_loss)
    assert listening(model) == []
    model.run_with_cache(tokens(4))
    model.run_with_grads(tokens(4), None)
    assert listening(model) == []
    taken = []
    thread = threading.Thread(target=lambda: taken.append(model.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert taken == [True]


def fail_loss(logits, ids):
    raise RuntimeError("loss")


def test_a_hook_put_on_a_point_itself_is_heard_until_it_is_removed(any_architecture, tiny):
    model = tiny(any_architecture)
    plain = model(tokens(5))
    assert not model.switch.on
    for name in ("hook_embed", "blocks.1.ln2.hook_scale", "blocks.2.attn.hook_pattern", "unembed.hook_in"):
        heard = []
        model.hook_dict[name].add_hook(lambda x, hook, heard=heard: heard.append(hook.name))
        torch.testing.assert_close(model(tokens(5)), plain, atol=1e-4, rtol=1e-4)
        assert heard == [name]
        model.reset_hooks()
        assert torch.equal(model(tokens(5)), plain)
        assert heard == [name]
        assert not model.switch.on
    slopes = []
    model.hook_dict["blocks.0.hook_resid_mid"].add_hook(lambda grad, hook: slopes.append(grad), dir="bwd")
    model(tokens(5), return_type="loss").backward()
    assert slopes[0].abs().max() > 0


def test_nested_hooks_leave_the_outer_ones_standing(tiny):
    model = tiny()
    with model.hooks([("hook_embed", lambda x, hook: x * 0)]):
        _, cache = model.run_with_cache(tokens(4))
        assert cache["embed"].abs().max() == 0
        assert listening(model) == ["hook_embed"]
    assert listening(model) == []


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_a_cache_is_an_activation_cache_with_our_names_and_layouts(tiny, architecture):
    kv_heads = KV_HEADS.get(architecture, 2)
    model = tiny(architecture, config={"n_key_value_heads": kv_heads})
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
    assert cache["blocks.1.ln1.hook_scale"].shape == (2, 5, 1)
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
    with pytest.raises(KeyError):
        cache["v", 0]
    with pytest.raises(KeyError):
        cache["pattern", 0]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_caching_everything_forms_no_quadratic_tensor(any_architecture, tiny):
    """T = 512 with 4 heads: a pattern has 4 T^2 elements; all else at most a strip of queries with the keys they see."""
    T = 512
    model = tiny(any_architecture, config={"n_ctx": T, "n_layers": 2})
    ids = tokens(T, batch=1)
    names = [name for name in model.hook_dict if not is_statistic(name)]
    sets = 2 if any_architecture.startswith("cross_layer") else 0
    with torch.no_grad(), LargestTensor() as largest:
        model.run_with_cache(ids)
    assert largest.elements <= T * T * 2
    with torch.no_grad(), LargestTensor() as plain:
        model.run_with_cache(ids, names_filter=[n for n in names if not n.endswith(QUADRATIC)])
    assert plain.elements <= T * max(61, STRIP * sets)  # logits, or a strip's mask
    with torch.no_grad(), LargestTensor() as eager:
        model.run_with_cache(ids, names_filter="blocks.0.attn.hook_pattern")
    assert eager.elements == T * T * 4


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


def test_an_edited_pattern_is_cached_as_edited(tiny):
    model = tiny()
    even = torch.ones(5, 5).tril()
    even = even / even.sum(-1, keepdim=True)
    with model.hooks([("blocks.1.attn.hook_pattern", lambda p, hook: even.expand_as(p))]):
        _, cache = model.run_with_cache(tokens(5))
    assert torch.equal(cache["pattern", 1], even.expand(2, 4, 5, 5))
    torch.testing.assert_close(cache["blocks.1.attn.hook_received"][0, 0], even.sum(0))
    torch.testing.assert_close(cache["z", 1][:, -1], cache["v", 1].mean(1))


def test_remove_batch_dim_drops_the_batch_and_nothing_else(any_architecture, tiny):
    model = tiny(any_architecture, config={"n_layers": 2})
    whole = model.run_with_cache(tokens(6, batch=1))[1]
    single = model.run_with_cache(tokens(6, batch=1), remove_batch_dim=True)[1]
    assert not single.has_batch_dim
    for name, tensor in single.items():
        expected = whole[name] if position_axis(name) is None else whole[name][0]
        torch.testing.assert_close(tensor, expected)
    with pytest.raises(WorkbenchError, match="2 sequences, not 1"):
        model.run_with_cache(tokens(6), remove_batch_dim=True)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_pos_slice_cuts_the_position_of_every_hook_point(tiny, architecture):
    """Sizes are all different, so a cut along heads or the batch would show."""
    config = {"d_model": 36, "n_heads": 6, "n_layers": 2} | ({} if architecture == "mqa" else {"n_key_value_heads": 3})
    model = tiny(architecture, config=config, **({"query_group": 2} if architecture == "svformer+gqa" else {}))
    everything, ids = list(model.hook_dict), {False: tokens(8), True: tokens(8, batch=1)}
    whole = {remove: model.run_with_cache(ids[remove], names_filter=everything)[1] for remove in ids}
    for cut, remove in ((2, False), ((1, 4), False), ([0, 3, 5], False), (2, True), ([0, 3, 5], True)):
        sliced = model.run_with_cache(ids[remove], pos_slice=cut, remove_batch_dim=remove)[1]
        assert set(sliced.keys()) == set(everything)
        index = torch.tensor({2: [2], (1, 4): [1, 2, 3]}[cut] if not isinstance(cut, list) else cut)
        for name in everything:
            true, point = whole[remove][name], name.rsplit(".", 1)[-1]
            if point.removeprefix("hook_") in STATISTICS or name.endswith(QUADRATIC):
                axis = 2
            elif point in ("hook_q_mix", "hook_k_mix", "hook_v_mix", "hook_dwa_weights"):
                axis = None
            else:
                axis = 1
            if axis is not None:
                assert true.shape[axis] == 8
                true = true.index_select(axis, index)
                true = true[0] if remove else true
            torch.testing.assert_close(sliced[name], true, msg=name)


# ---- edits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["resformer", "svformer", "neutreno", "resformer+neutreno"])
def test_an_edit_of_the_first_layers_value_reaches_every_later_layer(tiny, architecture):
    model = tiny(architecture)
    with model.hooks([("blocks.0.attn.hook_v", lambda v, hook: torch.full_like(v, 3.0))]):
        _, cache = model.run_with_cache(tokens(5))
    for layer in (1, 2):
        assert (cache[f"blocks.{layer}.attn.first.hook_v"] == 3).all()


@pytest.mark.parametrize("architecture", ["resformer", "svformer", "neutreno"])
def test_an_edit_of_one_branch_concerns_that_layer_alone(tiny, architecture):
    model = tiny(architecture)
    _, before = model.run_with_cache(tokens(5))
    with model.hooks([("blocks.1.attn.first.hook_v", lambda v, hook: v + 1)]):
        _, after = model.run_with_cache(tokens(5))
    assert torch.equal(after["v", 0], before["v", 0])
    assert torch.equal(after["blocks.2.attn.first.hook_v"], before["blocks.2.attn.first.hook_v"])
    assert not torch.allclose(after["z", 1], before["z", 1])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_an_edit_where_a_tensor_is_read_stays_with_its_reader(tiny, architecture):
    """Whatever a layer borrows or mixes: earlier layers and the other readers keep what they had, its own output moves."""
    model = tiny(architecture, dtype=WIDE)
    ids, points = tokens(5), ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k")
    layers = [
        [n for n in model.hook_dict if n.startswith(f"blocks.{i}.attn.") and n.endswith(points)] for i in range(3)
    ]
    _, before = model.run_with_cache(ids)
    for layer in (1, 2):
        for name in layers[layer]:
            if name.count(".") == 3:
                continue  # the layer's own points; branches have a part of their own
            with model.hooks([(name, lambda x, hook: x * torch.linspace(0.5, 2, 5, dtype=WIDE)[:, None, None])]):
                _, after = model.run_with_cache(ids)
            assert all(torch.equal(before[other], after[other]) for i in range(layer) for other in layers[i]), name
            borrowed = [other for other in layers[layer] if other.count(".") > 3 and other != name]
            assert all(torch.equal(before[other], after[other]) for other in borrowed), name
            assert not torch.allclose(before["z", layer], after["z", layer]), name


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_mixed_tensors_are_their_branches_times_the_coefficients_in_use(tiny, architecture):
    """`hook_v_mix` is [sources + 1], own last; the sources in the order of their layers."""
    model = tiny(architecture, dtype=WIDE)
    _, cache = model.run_with_cache(tokens(5))
    mixed = [name for name in model.hook_dict if name.endswith("_mix")]
    for name in mixed:
        stem, tensor = name.rsplit(".", 1)[0], name[-5]
        sources = [n for n in model.hook_dict if n.startswith(f"{stem}.source.") and n.endswith(f".hook_{tensor}")]
        sources += [n for n in (f"{stem}.first.hook_{tensor}", f"{stem}.table.hook_{tensor}") if n in model.hook_dict]
        parts = [cache[n] for n in (*sources, f"{stem}.own.hook_{tensor}")]
        if architecture == "value_embedding+residual_k" and len(parts) == 1:
            assert cache[name].shape == (1,)  # a layer without a table: its own values alone, times their coefficient
        total = sum(w * part for w, part in zip(cache[name], parts, strict=True))
        torch.testing.assert_close(cache[f"{stem}.hook_{tensor}"], total, atol=1e-12, rtol=0)
    assert bool(mixed) == any(
        "v" in b.attn.mixers or "k" in b.attn.mixers or "q" in b.attn.mixers for b in model.blocks
    )


def test_own_and_mix_edits_by_hand(tiny):
    """Zero own values and coefficients (3, 1): the effective value is three times the first layer's."""
    model = tiny("resformer")
    edits = [
        ("blocks.1.attn.own.hook_v", lambda v, hook: v * 0),
        ("blocks.1.attn.hook_v_mix", lambda mix, hook: torch.tensor([3.0, 1.0])),
    ]
    with model.hooks(edits):
        _, cache = model.run_with_cache(tokens(5))
    torch.testing.assert_close(cache["v", 1], 3 * cache["v", 0])


def test_listening_changes_nothing(any_architecture, tiny):
    """In float64 the streamed and the fused attention agree to rounding, and constants keep all their digits."""
    model = tiny(any_architecture, dtype=WIDE, **({"lambda_v1": 0.3} if any_architecture == "resformer" else {}))
    plain = model(tokens(6))
    with torch.no_grad():
        torch.testing.assert_close(model.run_with_cache(tokens(6))[0], plain, atol=1e-12, rtol=1e-12)
        everything = model.run_with_cache(tokens(6), names_filter=list(model.hook_dict))[0]
        torch.testing.assert_close(everything, plain, atol=1e-12, rtol=1e-12)


def test_denseformer_points_show_output_weights_and_what_is_read(tiny):
    """`hook_dwa_in`: raw output; `hook_resid_post`: the same, in the last block the final norm's input."""
    model = tiny("denseformer", dtype=WIDE)
    with torch.no_grad():
        for alpha in model.dwa.alphas.values():
            alpha.weight.copy_(torch.arange(1.0, alpha.weight.numel() + 1))
    _, c = model.run_with_cache(tokens(5))
    raw = [c["embed"], *(c[f"blocks.{i}.hook_dwa_in"] for i in range(3))]
    for layer in range(3):
        assert c[f"blocks.{layer}.hook_dwa_weights"].tolist() == [float(n) for n in range(1, layer + 3)]
        reads = sum((j + 1) * raw[j] for j in range(layer + 2))
        following = c["resid_pre", layer + 1] if layer < 2 else c["resid_post", 2]
        torch.testing.assert_close(following, reads)
        if layer < 2:
            assert torch.equal(c["resid_post", layer], raw[layer + 1])
    normalised = c["resid_post", 2] / c["ln_final.hook_scale"]
    torch.testing.assert_close(normalised, c["ln_final.hook_normalized"])
    with model.hooks([("blocks.2.hook_dwa_weights", lambda w, hook: torch.tensor([0.0, 0, 0, 1], dtype=WIDE))]):
        _, c = model.run_with_cache(tokens(5))
    torch.testing.assert_close(c["resid_post", 2], c["blocks.2.hook_dwa_in"])


def test_denseformer_points_exist_only_where_an_average_stands(tiny):
    model = tiny("denseformer", period=2)
    assert "blocks.1.hook_dwa_weights" in model.hook_dict
    assert "blocks.0.hook_dwa_weights" not in model.hook_dict
    _, cache = model.run_with_cache(tokens(4))
    assert torch.equal(cache["resid_pre", 1], cache["blocks.0.hook_dwa_in"])
    assert torch.equal(cache["resid_post", 2], cache["blocks.2.hook_dwa_in"])


# ---- statistics ------------------------------------------------------------------------------------------------------


def softmax_of(scores):
    """Rows of exponentials over their sum, minus infinity masked."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def scores_of(q, k):
    """[batch, head, query, key] of rotated q and k, one head and pair at a time."""
    B, T, H, d = q.shape
    scores = torch.full((B, H, T, T), float("-inf"), dtype=q.dtype)
    for h in range(H):
        kv = h * k.shape[2] // H
        for i in range(T):
            scores[:, h, i, : i + 1] = (q[:, i : i + 1, h] * k[:, : i + 1, kv]).sum(-1) / d**0.5
    return scores


def attention_by_hand(architecture, cache, layer):
    """(patterns by part, all keys' log-sum-exp or None) of a layer, from the architecture's equation.

    Cross-layer attention: one softmax over own keys and the others'; residual attention: half of the first layer's
    pattern and half of the own; all others: their own softmax.
    """
    own = scores_of(cache["rot_q", layer], cache["rot_k", layer])
    stem = f"blocks.{layer}.attn"
    if architecture == "residual_attention" and layer > 0:
        first = softmax_of(scores_of(cache["rot_q", 0], cache["rot_k", 0]))
        return {f"{stem}.first": first, f"{stem}.own": softmax_of(own)}, None
    read = {"cross_layer": (layer - 1,), "cross_layer_all": range(layer)}.get(architecture, ()) if layer else ()
    others = [scores_of(cache["rot_q", layer], cache["rot_k", j]) for j in read]
    whole = torch.cat([own, *others], -1)
    names = [stem, *(f"{stem}.cross" + (f".{j}" if len(read) > 1 else "") for j in read)]
    return dict(zip(names, softmax_of(whole).split(own.shape[-1], -1), strict=True)), whole.logsumexp(-1)


@pytest.mark.parametrize(("eager", "grad"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.slow), 2])
def test_statistics_are_those_of_the_pattern(any_architecture, tiny, kv_heads, grad, eager):
    """Streamed beside the fused attention, or taken from patterns that were formed: what a naive attention has.

    Of several key sets a position receives what it receives in all together, and the row's entropy is over all keys.
    """
    model = tiny(any_architecture, config=grouped(any_architecture, kv_heads), dtype=WIDE)
    with torch.set_grad_enabled(grad):
        _, cache = model.run_with_cache(tokens(9), names_filter=list(model.hook_dict) if eager else None)
    for layer in range(3):
        parts, lse = attention_by_hand(any_architecture, cache, layer)
        for part, pattern in parts.items():
            torch.testing.assert_close(cache[f"{part}.hook_pattern"], pattern, atol=1e-12, rtol=1e-9)
        whole, weight = torch.stack(list(parts.values()), -2), 1.0
        if lse is None:
            whole, weight = whole.mean(-2, keepdim=True), 0.5
            assert f"blocks.{layer}.attn.hook_lse" not in cache
            torch.testing.assert_close(cache["pattern", layer], weight * sum(parts.values()), atol=1e-12, rtol=1e-9)
        expected = {
            "received": whole.sum((-3, -2)),
            "row_entropy": -torch.xlogy(whole, whole).sum((-1, -2)),
            "row_max": whole.amax((-1, -2)),
            "sink": whole[..., 0].sum(-1),
            "lse": lse,
        }
        assert expected.keys() == set(STATISTICS)
        for name, true in expected.items():
            if true is not None:
                torch.testing.assert_close(cache[name, layer, "attn"], true, atol=1e-12, rtol=1e-9)
        if len(parts) == 1:
            reference = attention_reference(cache["rot_q", layer], cache["rot_k", layer], cache["v", layer])[2]
            torch.testing.assert_close(reference.received, expected["received"], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("architecture", ["cross_layer", "cross_layer_all", "resformer+cross_layer"])
def test_rows_of_all_halves_of_a_cross_layer_attention_sum_to_1(tiny, architecture):
    model = tiny(architecture, dtype=WIDE)
    _, cache = model.run_with_cache(tokens(7))
    for layer in (1, 2):
        stem = f"blocks.{layer}.attn."
        halves = [n for n in model.hook_dict if n.startswith(stem) and n.endswith("hook_pattern")]
        assert len(halves) == (layer + 1 if architecture.endswith("all") else 2)
        total = sum(cache[half].sum(-1) for half in halves)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-12, rtol=0)
        assert min(cache[half].sum(-1).max() for half in halves) > 0.2  # none is idle


def test_what_a_mixture_of_patterns_lacks_is_refused_with_the_reason(tiny):
    """Mixed before the softmax (`logit`) it is one softmax again, and has both."""
    model = tiny("residual_attention")
    for point, told in (("lse", "no log-sum-exp"), ("attn_scores", "not the softmax of any scores")):
        name = f"blocks.1.attn.hook_{point}"
        with pytest.raises(WorkbenchError, match=f"{name} does not exist: .*{told}.*first and own hook_attn_scores"):
            model.run_with_cache(tokens(4), names_filter=name)
        assert f"blocks.0.attn.hook_{point}" in model.hook_dict
        assert name in tiny("residual_attention", attn_mix="logit").hook_dict


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_statistics_cut_no_gradient(tiny, trained):
    """Whichever projection alone is trained, listening to statistics leaves its gradient as it was."""
    model = tiny()
    model.requires_grad_(False)
    weight = getattr(model.blocks[0].attn, trained).weight.requires_grad_(True)
    grads = []
    for hooks in ([], [(lambda name: is_statistic(name), lambda x, hook: None)]):
        with model.hooks(hooks):
            grads.append(torch.autograd.grad(model(tokens(6), return_type="loss"), weight)[0])
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("eager", [False, True])
def test_statistics_are_read_only(tiny, name, eager):
    model = tiny()
    hook = f"blocks.1.attn.hook_{name}"
    edits = [(hook, lambda x, hook: x * 2)]
    if eager:
        edits.append(("blocks.1.attn.hook_pattern", lambda p, hook: None))
    with pytest.raises(WorkbenchError, match=f"{hook} can be read, not replaced"):
        model.run_with_hooks(tokens(4), fwd_hooks=edits)
    assert listening(model) == []


def test_mixed_precision_runs_with_every_hook(any_architecture, tiny):
    model = tiny(any_architecture)
    plain = model(tokens(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(tokens(6))
        logits, cache = model.run_with_cache(tokens(6))
        model.run_with_cache(tokens(6), names_filter=list(model.hook_dict))
        loss, _, grads = model.run_with_grads(tokens(6), "blocks.0.attn.hook_v")
    assert half.dtype == logits.dtype == torch.bfloat16
    assert cache["v", 1].dtype == cache["q", 1].dtype == torch.bfloat16
    assert cache["resid_pre", 1].dtype == cache["received", 1, "attn"].dtype == torch.float32
    assert (half - plain).abs().mean() < 0.1 * plain.abs().mean()
    assert loss.isfinite()
    assert grads["blocks.0.attn.hook_v"].abs().max() > 0


# ---- gradients of activations ----------------------------------------------------------------------------------------


def differences(model, ids, directions, *, step=1e-6):
    """Slope of the loss when what leaves each of the hook points moves along its direction, all at once."""
    losses = []
    for sign in (1, -1):
        moves = [(name, lambda x, hook, d=d, s=sign: x + s * step * d) for name, d in directions.items()]
        with torch.no_grad(), model.hooks(moves):
            losses.append(model(ids, return_type="loss"))
    return ((losses[0] - losses[1]) / (2 * step)).item()


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_gradients_of_activations_equal_finite_differences(tiny, architecture, kv_heads, alone):
    """Slopes add up: all points of one kind in one layer move together, or each alone."""
    model = tiny(architecture, dtype=WIDE, config=grouped(architecture, kv_heads))
    ids = tokens(6)
    loss, values, grads = model.run_with_grads(ids, None)
    assert loss.item() == pytest.approx(model(ids, return_type="loss").item(), abs=1e-12)
    assert set(grads) == {name for name in model.hook_dict if not is_statistic(name)}
    generator, directions = torch.Generator().manual_seed(1), {}
    for name, grad in grads.items():
        if name.endswith("hook_attn_scores"):
            continue  # the masked entries are infinite; its pattern is checked
        assert grad.shape == values[name].shape
        part = name if alone else (*name.split(".")[:2], name.endswith(QUADRATIC))
        direction = torch.randn(grad.shape, generator=generator, dtype=WIDE)
        directions.setdefault(part, {})[name] = direction
    for part, moved in directions.items():
        slope = differences(model, ids, moved)
        found = sum((grads[name] * direction).sum() for name, direction in moved.items()).item()
        assert found == pytest.approx(slope, abs=1e-7, rel=1e-5), part


def read_from(model, layer):
    """Hook points where later layers read a layer's values."""
    found = []
    for block in model.blocks[layer + 1 :]:
        for branches in ({j: b for j, (b, _) in block.attn.branches["v"].items()}, block.attn.reads.get("v", {})):
            if layer in branches:
                found.append(branches[layer].hook_v.name)
    return found


def test_gradient_of_the_first_value_is_its_own_path_plus_every_branch(any_architecture, tiny):
    """Own path: the gradient when later layers read a detached copy."""
    model = tiny(any_architecture, dtype=WIDE)
    name, branches = "blocks.0.attn.hook_v", read_from(model, 0)
    _, _, grads = model.run_with_grads(tokens(6), [name, *branches])
    with model.hooks([(branch, lambda v, hook: v.detach()) for branch in branches]):
        own = model.run_with_grads(tokens(6), name)[2][name]
    torch.testing.assert_close(grads[name], own + sum(grads[b] for b in branches), atol=1e-14, rtol=1e-10)
    assert all(grads[branch].abs().max() > 0 for branch in branches)


@pytest.mark.parametrize(
    ("architecture", "read"),
    [
        ("transformer", []),
        ("resformer", ["1.attn.first", "2.attn.first"]),
        ("resformer_dense", ["1.attn.first", "2.attn.source.0"]),
        ("cla", ["1.attn.first"]),
        ("cross_layer_all", ["1.attn.cross", "2.attn.cross.0"]),
        ("value_embedding", []),
    ],
)
def test_branches_stand_where_a_value_is_read(tiny, architecture, read):
    assert read_from(tiny(architecture), 0) == [f"blocks.{branch}.hook_v" for branch in read]


def test_gradient_of_the_coefficients_by_hand(tiny):
    """dLoss/dlambda_j = <gradient at the effective value, source j>."""
    model = tiny("resformer", dtype=WIDE)
    at = "blocks.2.attn."
    _, values, grads = model.run_with_grads(
        tokens(6), [f"{at}{x}hook_v" for x in ("", "own.", "first.")] + [f"{at}hook_v_mix"]
    )
    upstream = grads[f"{at}hook_v"]
    expected = torch.stack([(upstream * values[f"{at}{x}.hook_v"]).sum() for x in ("first", "own")])
    torch.testing.assert_close(grads[f"{at}hook_v_mix"], expected)
    torch.testing.assert_close(grads[f"{at}own.hook_v"], 0.5 * upstream)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_activation_gradients_work_frozen_and_leave_parameters_alone(tiny, mode):
    model = tiny("resformer")
    name = "blocks.1.attn.hook_z"
    expected = model.run_with_grads(tokens(5), name)[2][name]
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(False)
    ids = tokens(5)
    with mode():
        loss, values, grads = model.run_with_grads(ids, name)
    torch.testing.assert_close(grads[name], expected)
    assert not loss.requires_grad
    assert not values[name].requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_any_scalar_and_of_points_without_influence(tiny):
    model = tiny(dtype=WIDE)
    name = "unembed.hook_in"
    loss, values, grads = model.run_with_grads(
        tokens(5), [name, "blocks.2.attn.hook_q"], lambda logits, ids: logits[:, 0, 7].sum()
    )
    torch.testing.assert_close(loss, (values[name][:, 0] @ model.unembed.weight[7]).sum())
    torch.testing.assert_close(grads[name][:, 0], model.unembed.weight[7].expand(2, -1))
    assert grads[name][:, 1:].abs().max() == 0
    assert grads["blocks.2.attn.hook_q"][:, 1:].abs().max() == 0  # position 0 attends to itself alone
    with pytest.raises(WorkbenchError, match="hook_received carries no gradient"):
        model.run_with_grads(tokens(5), "blocks.0.attn.hook_received")


def test_transformer_lens_backward_caching_works(any_architecture, tiny):
    model = tiny(any_architecture, dtype=WIDE)
    ids = tokens(6)
    _loss, cache = model.run_with_cache(ids, incl_bwd=True, return_type="loss")
    _, _, grads = model.run_with_grads(ids, None)
    for name in ("blocks.0.attn.hook_v", "blocks.1.attn.hook_z", "blocks.2.hook_resid_mid", "blocks.1.mlp.hook_post"):
        torch.testing.assert_close(cache[f"{name}_grad"], grads[name], atol=1e-12, rtol=1e-9)
    assert model.embed.weight.grad is not None
    assert listening(model) == []


# ---- threads ---------------------------------------------------------------------------------------------------------


def wrong_caches(model, rounds=12):
    """Two threads cache one model at once; how many of their caches are not what one thread alone gets."""
    inputs = [tokens(16, seed=1), tokens(16, seed=2)]
    names = ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"]
    true = [model.run_with_cache(ids, names_filter=names)[1] for ids in inputs]
    wrong, start = [], threading.Barrier(2)

    def work(mine):
        start.wait()
        for _ in range(rounds):
            try:
                cache = model.run_with_cache(inputs[mine], names_filter=names)[1]
                wrong.append(any(not torch.equal(cache[name], true[mine][name]) for name in names))
            except Exception:
                wrong.append(True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 2 * rounds
    return sum(wrong)


def test_one_lock_keeps_two_threads_apart(tiny, monkeypatch):
    model = tiny()
    real = model.logits

    def slow(ids):  # hooks are state of the module: whoever runs while another's stand is caught in them
        time.sleep(2e-3)
        return real(ids)

    monkeypatch.setattr(model, "logits", slow)
    assert wrong_caches(model) == 0
    monkeypatch.setattr(model, "lock", nullcontext())
    assert wrong_caches(model) > 0


def test_one_thread_may_nest(tiny):
    model = tiny()
    with model.lock, model.hooks([("hook_embed", lambda x, hook: None)]):
        _, cache = model.run_with_cache(tokens(4), names_filter="hook_embed")
    assert "hook_embed" in cache.cache_dict


# ---- TransformerLens' own tools --------------------------------------------------------------------------------------


@pytest.fixture
def lensed(any_architecture, tiny):
    """A model with gains away from 1, its logits and a whole cache, in float64."""
    model = tiny(any_architecture, dtype=WIDE, config={"n_key_value_heads": KV_HEADS.get(any_architecture, 2)})
    with torch.no_grad():
        model.ln_final.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
        return model, *model.run_with_cache(tokens(6))


def test_residual_parts_sum_to_the_stream(lensed):
    _model, _, cache = lensed
    parts, labels = cache.decompose_resid(return_labels=True)
    assert labels[:3] == ["embed", "0_attn_out", "0_mlp_out"]
    assert len(labels) == 7
    torch.testing.assert_close(parts.sum(0), cache["resid_post", 2])
    accumulated, labels = cache.accumulated_resid(return_labels=True)
    assert labels == ["0_pre", "1_pre", "2_pre", "final_post"]
    torch.testing.assert_close(accumulated[-1], cache["resid_post", 2])
    heads, attention = cache.stack_head_results(), cache.decompose_resid(mode="attn", incl_embeds=False)
    torch.testing.assert_close(heads.sum(0), attention.sum(0))


def test_logit_attributions_sum_to_the_logits(lensed):
    _model, logits, cache = lensed
    ids = tokens(6, seed=3)
    parts = cache.decompose_resid(apply_ln=False)
    found = cache.logit_attrs(parts, tokens=ids).sum(0)
    torch.testing.assert_close(found, logits.gather(-1, ids[..., None]).squeeze(-1))


def test_logit_lens_ends_at_the_models_own_prediction(lensed):
    from transformer_lens.tools.analysis import logit_lens

    model, _logits, _ = lensed
    with torch.no_grad():
        result = logit_lens(model, tokens(6))
    assert result is not None
    assert model.W_U.shape == (32, 61)
    assert model.b_U.abs().sum() == 0
    assert model.W_E.shape == (61, 32)


def test_patching_restores_the_clean_run_at_the_last_stream(tiny):
    from transformer_lens import patching

    model = tiny("resformer")
    clean, corrupted = tokens(5, batch=1, seed=1), tokens(5, batch=1, seed=2)
    with torch.no_grad():
        logits, cache = model.run_with_cache(clean)
        patched = patching.get_act_patch_resid_pre(model, corrupted, cache, lambda found: found[0, -1, 0])
    assert patched.shape == (3, 5)
    assert patched[2, 4].item() != patched[2, 0].item()
    everything = [("blocks.0.hook_resid_pre", lambda x, hook: cache["resid_pre", 0])]
    torch.testing.assert_close(model.run_with_hooks(corrupted, fwd_hooks=everything), logits, atol=1e-4, rtol=1e-4)
