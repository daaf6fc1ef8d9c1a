"""Attention statistics at hook points are those of the pattern in use, read-only, and cut no gradient."""

from __future__ import annotations

import pytest
import torch
from hooked import WIDE, grouped, listening, tokens

from workbench.errors import WorkbenchError
from workbench.hook_names import STATISTICS, is_statistic
from workbench.kernels import attention_reference
from workbench.measurement.measuring import measure


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


def attention_by_hand(architecture, cache, layer, logits):
    """(patterns by part, all keys' log-sum-exp or None) of a layer, from the architecture's equation.

    Cross-layer attention: one softmax over own keys and the others'; residual attention: half of the first layer's
    pattern and half of the own; sink logits: one more column, the part `null`; all others: their own softmax.
    """
    own = scores_of(cache["rot_q", layer], cache["rot_k", layer])
    stem = f"blocks.{layer}.attn"
    if architecture == "residual_attention" and layer > 0:
        first = softmax_of(scores_of(cache["rot_q", 0], cache["rot_k", 0]))
        return {f"{stem}.source.0": first, f"{stem}.own": softmax_of(own)}, None
    read = {"cross_layer": (layer - 1,), "cross_layer_all": range(layer)}.get(architecture, ()) if layer else ()
    others = [scores_of(cache["rot_q", layer], cache["rot_k", j]) for j in read]
    whole = torch.cat([own, *others], -1)
    names = [stem, *(f"{stem}.cross" + (f".{j}" if len(read) > 1 else "") for j in read)]
    if logits is not None:
        whole = torch.cat([own, logits.view(-1, 1, 1).expand(*own.shape[:-1], 1)], -1)
        pattern = softmax_of(whole)
        return {stem: pattern[..., :-1], "null": pattern[..., -1:]}, whole.logsumexp(-1)
    return dict(zip(names, softmax_of(whole).split(own.shape[-1], -1), strict=True)), whole.logsumexp(-1)


@pytest.mark.fast(9)
@pytest.mark.parametrize("how", ["streamed", "eager"])
def test_statistics_are_those_of_the_pattern(any_attention, tiny, how):
    """Streamed beside the fused attention, or taken from patterns that were formed: what a naive attention has.

    Of several key sets a position receives what it receives in all together, and the row's entropy is over all keys.
    """
    model = tiny(any_attention, config=grouped(any_attention), dtype=WIDE)
    with torch.set_grad_enabled(any_attention == "transformer"):
        _, cache = model.run_with_cache(tokens(9), names_filter=list(model.hook_dict) if how == "eager" else None)
    for layer in range(3):
        logits = model.shortcuts[0].logits[layer].detach() if any_attention == "sink_logit" else None
        parts, lse = attention_by_hand(any_attention, cache, layer, logits)
        null = parts.pop("null", torch.zeros(1, dtype=WIDE))
        if logits is not None:
            torch.testing.assert_close(cache["null", layer, "attn"], null[..., 0], atol=1e-12, rtol=1e-9)
        for part, pattern in parts.items():
            torch.testing.assert_close(cache[f"{part}.hook_pattern"], pattern, atol=1e-12, rtol=1e-9)
        whole, weight = torch.stack(list(parts.values()), -2), 1.0
        if lse is None:
            whole, weight = whole.mean(-2, keepdim=True), 0.5
            assert f"blocks.{layer}.attn.hook_lse" not in cache
            torch.testing.assert_close(cache["pattern", layer], weight * sum(parts.values()), atol=1e-12, rtol=1e-9)
        keys = whole.sum(-2)  # of all layers, by position
        expected = {
            "received": whole.sum((-3, -2)),
            "row_entropy": -torch.xlogy(keys, keys).sum(-1) - torch.xlogy(null, null).sum(-1),
            "row_max": keys.amax(-1),
            "sink": whole[..., 0].sum(-1),
            "lse": lse,
        }
        assert expected.keys() == set(STATISTICS)
        for name, true in expected.items():
            if true is not None:
                torch.testing.assert_close(cache[name, layer, "attn"], true, atol=1e-12, rtol=1e-9)
        if len(parts) == 1:
            read = (cache[name, layer] for name in ("rot_q", "rot_k", "v"))
            reference = attention_reference(*read, null=logits)[2]
            torch.testing.assert_close(reference.received, expected["received"], atol=1e-12, rtol=1e-9)


def test_what_a_mixture_of_patterns_lacks_is_refused_with_the_reason(tiny):
    """Mixed before the softmax (`logit`) it is one softmax again, and has both."""
    model = tiny("residual_attention")
    for point, told in (("lse", "no log-sum-exp"), ("attn_scores", "not the softmax of any scores")):
        name = f"blocks.1.attn.hook_{point}"
        with pytest.raises(WorkbenchError, match=f"{name} does not exist: .*{told}.*source.0 and own hook_attn_scores"):
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


def test_a_probe_counts_the_documents_of_its_error(tiny):
    """Of 80 documents, 64 are drawn and two of eight are held out, in three splits and in one; the estimate holds out 16."""
    ids = torch.randint(0, 12, (80, 8), generator=torch.Generator().manual_seed(0))
    names = ["token_probe", "token_probe_streamed", "head_rank"]
    rows = measure(tiny("mqa"), names, ids, sites=dict.fromkeys(names, ("v",)))
    rows = rows.assign(control=rows["control"].fillna(""))
    counts = {key: set(part) for key, part in rows.groupby(["metric", "control"])["n"]}
    once = {("token_probe", name): {16} for name in ("shifted", "random_labels")}
    streamed = {("token_probe_streamed", name): {16} for name in ("", "shifted")}
    assert counts == {("token_probe", ""): {48}, ("head_rank", ""): {80}, **once, **streamed}
