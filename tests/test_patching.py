"""TransformerLens' patching sweeps equal runs patched by hand; attribution patching equals its definition."""

from __future__ import annotations

import functools

import pytest
import torch
from lensed import SMALL, WIDE, small, tokens
from transformer_lens import patching
from transformer_lens.tools.analysis import attribution_patch
from transformer_lens.utilities import get_act_name


@pytest.fixture
def awake(awake):
    """Those of all tests, in float64."""
    return functools.partial(awake, dtype=WIDE)


# ---- activation patching ---------------------------------------------------------------------------------------------

SWEEPS = {
    "resid_pre": ("resid_pre", "pos"), "resid_mid": ("resid_mid", "pos"), "attn_out": ("attn_out", "pos"),
    "mlp_out": ("mlp_out", "pos"), "attn_head_out_by_pos": ("z", "pos head"), "attn_head_q_by_pos": ("q", "pos head"),
    "attn_head_k_by_pos": ("k", "pos head"), "attn_head_v_by_pos": ("v", "pos head"),
    "attn_head_pattern_by_pos": ("pattern", "head dest"), "attn_head_pattern_dest_src_pos": ("pattern", "head dest src"),
    "attn_head_out_all_pos": ("z", "head"), "attn_head_q_all_pos": ("q", "head"), "attn_head_k_all_pos": ("k", "head"),
    "attn_head_v_all_pos": ("v", "head"), "attn_head_pattern_all_pos": ("pattern", "head"),
}  # fmt: skip
"""What each sweep patches, and over which axes beside the layer."""
ENDS = ("resid_pre", "attn_head_q_by_pos", "attn_head_v_by_pos", "attn_head_pattern_all_pos")
"""Sweeps of what architectures do differently; the others are of what all share, and run on a few."""
EVERY_SWEEP = ("transformer", "gqa", "cross_layer_all")


def metric(logits):
    return logits[:, -1, 3].sum() - logits[:, -1, 4].sum()


def patched_by_hand(model, corrupted, clean_cache, name, axes, cell):
    """Metric of a run in which one piece of one activation is the clean run's."""
    layer, *index = cell
    where = (slice(None), *index) if axes[0] == "pos" or name == "pattern" else (slice(None), slice(None), *index)

    def patch(x, hook):
        mine = x.clone()
        mine[where] = clean_cache[name, layer][where]
        return mine

    return metric(model.run_with_hooks(corrupted, fwd_hooks=[(get_act_name(name, layer), patch)]))


@pytest.mark.slow
def test_patching_sweeps_equal_runs_patched_by_hand(awake, some_architecture):
    model = awake(some_architecture, **small(some_architecture))
    clean, corrupted = (tokens(3, batch=1, seed=seed, vocabulary=11) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        untouched = metric(model(corrupted)).item()
        for sweep in SWEEPS if some_architecture in EVERY_SWEEP else ENDS:
            name, axes = SWEEPS[sweep]
            found = getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, cache, metric)
            axes, heads = axes.split(), model.cfg.n_key_value_heads if name in ("k", "v") else 2
            # pattern sweeps take the query heads, also where keys and values have fewer
            assert found.shape == (3, *({"head": heads}.get(axis, 3) for axis in axes))
            for _ in range(3):
                cell = [int(torch.randint(size, (), generator=generator)) for size in found.shape]
                expected = patched_by_hand(model, corrupted, cache, name, axes, cell)
                assert found[tuple(cell)].item() == pytest.approx(expected.item(), abs=1e-5), (sweep, cell)
            assert (found - untouched).abs().max() > 1e-4, sweep
        everything = [("blocks.0.hook_resid_pre", lambda x, hook: cache["resid_pre", 0])]
        restored = metric(model.run_with_hooks(corrupted, fwd_hooks=everything))
    if model.residual.is_plain and not any(
        "table" in name for name in model.hook_dict
    ):  # these read the tokens elsewhere too
        assert restored.item() == pytest.approx(metric(model(clean)).item(), abs=1e-10)


def test_patching_keeps_examples_apart_and_knows_its_baseline(awake):
    model = awake("resformer", config=SMALL)
    clean, corrupted = (tokens(3, seed=seed, vocabulary=11) for seed in (1, 2))
    each = lambda logits: logits[:, -1, 3] - logits[:, -1, 4]  # noqa: E731
    with torch.no_grad():
        logits, cache = model.run_with_cache(clean)
        found = patching.get_act_patch_resid_pre(model, corrupted, cache, each, reduce="none", baseline=True)
        torch.testing.assert_close(found.baseline.double(), each(model(corrupted)), atol=1e-6, rtol=0)
        last = patching.get_act_patch_resid_pre(model, corrupted[:, -1:], cache, each, reduce="none", baseline=True)
    assert found.values.shape == (3, 3, 2)
    assert last.normalized(each(logits)).shape == (3, 1, 2)


# ---- attribution patching --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_node_attributions_equal_their_definition_and_finite_differences(awake, some_architecture):
    """Effect of a node: (clean - corrupted) . dmetric/dnode on the corrupted run, the slope along that direction."""
    model = awake(some_architecture, **small(some_architecture))
    clean, corrupted = (tokens(4, batch=1, seed=seed, vocabulary=11) for seed in (1, 2))
    found = attribution_patch(model, clean, corrupted, metric).node_scores
    assert len(found) == 4 + 3 * 4 * (2 + 1)
    names = {node.hook_name for node in found}
    _, values, grads = model.run_with_grads(corrupted, sorted(names), lambda logits, ids: metric(logits))
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
    assert all(p.grad is None for p in model.parameters())
    step = 1e-6
    for number, (node, score) in enumerate(found.items()):
        where = (0, node.position) if node.head is None else (0, node.position, node.head)
        toward = cache[node.hook_name] - values[node.hook_name]
        assert score == pytest.approx((toward * grads[node.hook_name])[where].sum().item(), abs=1e-10)
        if number % 5:
            continue
        direction = torch.zeros_like(toward)
        direction[where] = toward[where]
        ends = []
        for sign in (1, -1):
            move = [(node.hook_name, lambda x, hook, by=sign * step * direction: x + by)]
            with torch.no_grad():
                ends.append(metric(model.run_with_hooks(corrupted, fwd_hooks=move)).item())
        assert score == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6, rel=1e-5)
    assert max(abs(score) for score in found.values()) > 1e-3
