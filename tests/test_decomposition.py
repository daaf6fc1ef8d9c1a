"""The parts of a stream and of logits sum to it in every architecture, and each part is what it says."""

from __future__ import annotations

import functools

import pytest
import torch
from seams import TOGETHER

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.hook_names import path_name, stream_hook
from workbench.models.decomposition import TOLERANCE, decompose

WIDE = torch.float64


def tokens(length=6, *, batch=2, seed=0):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def awake(awake):
    """Those of all tests, in float64."""
    return functools.partial(awake, dtype=WIDE)


# ---- completeness ----------------------------------------------------------------------------------------------------


def test_parts_sum_to_every_stream_and_to_the_logits(awake, any_architecture):
    model, ids = awake(any_architecture), tokens()
    logits, cache = model.run_with_cache(ids)
    for by in ("layer", "head", "value_path"):
        for layer in range(4):
            found = decompose(model, cache, layer, by)
            true = cache[stream_hook(layer, 3)]
            torch.testing.assert_close(found.parts.sum(0), true, atol=1e-10, rtol=0)
            assert torch.equal(found.whole, true)
            assert found.error < 1e-10
        found = decompose(model, ids, "logits", by)
        torch.testing.assert_close(found.parts.sum(0), logits, atol=1e-10, rtol=0)
        found = decompose(model, cache, "final", by)
        normalised = cache["unembed.hook_in"] / model.ln_final.weight
        torch.testing.assert_close(found.parts.sum(0), normalised, atol=1e-10, rtol=0)


def test_finer_parts_sum_to_coarser_ones(awake, any_architecture):
    model, ids = awake(any_architecture), tokens()
    layers, heads, paths = (decompose(model, ids, by=by) for by in ("layer", "head", "value_path"))
    assert layers.labels == ["embed", *(f"{n}_{kind}_out" for n in range(3) for kind in ("attn", "mlp"))]
    for n in range(3):
        together = sum(heads[f"L{n}H{h}"] for h in range(4))
        torch.testing.assert_close(together, layers[f"{n}_attn_out"], atol=1e-12, rtol=0)
        for h in range(4):
            mine = [
                part for label, part in zip(paths.labels, paths.parts, strict=True) if label.startswith(f"L{n}H{h}.")
            ]
            torch.testing.assert_close(sum(mine), heads[f"L{n}H{h}"], atol=1e-12, rtol=0)
        torch.testing.assert_close(paths[f"{n}_mlp_out"], layers[f"{n}_mlp_out"], atol=1e-12, rtol=0)


# ---- each part is what it says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options", "weights"),
    [
        ("resformer", {}, [1, 1, 1, 1, 1, 1, 1]),
        # x1 = h1 + E, x2 = h2 + E: the embedding arrives three times
        ("residual_hidden", {}, [3, 1, 1, 1, 1, 1, 1]),
        ("residual_hidden", {"lambda_h1": 2.0, "once": True}, [3, 1, 1, 1, 1, 1, 1]),  # x1 = h1 + 2 E
        # x1 = 2 h1 + E / 2, x2 = 2 h2 + E / 2 with h2 = x1 + ...: 2 * 2.5 + 0.5 for the embedding
        ("residual_hidden", {"lambda_h1": 0.5, "lambda_h_own": 2.0}, [5.5, 4, 4, 2, 2, 1, 1]),
        ("cut_skip", {"cut": "attn"}, [0, 1, 1, 1, 1, 1, 1]),
        ("cut_skip", {"cut": "mlp"}, [0, 0, 1, 1, 1, 1, 1]),
        ("cut_skip", {"cut": "both"}, [0, 0, 1, 1, 1, 1, 1]),
        # rows (1, 2), (0, 3, 1), (1, 0, 0, 2): h1 = E + o0, x1 = E + 2 h1 = 3 E + 2 o0, h2 = x1 + o1,
        # x2 = 3 h1 + h2 = 6 E + 5 o0 + o1, h3 = x2 + o2, x3 = E + 2 h3 = 13 E + 10 o0 + 2 o1 + 2 o2
        ("denseformer", {}, [13, 10, 10, 2, 2, 2, 2]),
        ("denseformer", {"period": 2}, [4, 4, 4, 1, 1, 1, 1]),  # x2 = 3 h1 + h2 = 4 E + 4 o0 + o1, then as it is
    ],
)
def test_weights_on_the_way_by_hand(tiny, architecture, options, weights):
    model = tiny(architecture, dtype=WIDE, **options)
    rows = {0: [1.0, 2.0], 1: [0.0, 3.0, 1.0], 2: [1.0, 0.0, 0.0, 2.0]}
    for layer, alpha in model.dwa.alphas.items() if architecture == "denseformer" else ():
        alpha.weight.data = torch.tensor([rows[int(layer)]], dtype=WIDE)
    found = decompose(model, tokens())
    assert list(model.stream_paths(3).values()) == weights
    _, cache = model.run_with_cache(tokens())
    torch.testing.assert_close(found["embed"], weights[0] * cache["embed"])
    torch.testing.assert_close(found["1_mlp_out"], weights[4] * cache["mlp_out", 1])


@pytest.mark.parametrize(
    "architecture", ["transformer", "denseformer", "residual_hidden", "cut_skip", "denseformer+cut_skip"]
)
def test_a_part_is_how_far_the_stream_moves_with_its_output_alone(awake, architecture):
    """All other outputs held at what they were, a change of one moves stream and logit lens by just its part."""
    model, ids = awake(architecture), tokens()
    _, cache = model.run_with_cache(ids)
    outputs = {"embed": "hook_embed"} | {
        f"{n}_{k}": f"blocks.{n}.hook_{k}" for n in range(3) for k in ("attn_out", "mlp_out")
    }
    found = decompose(model, cache)
    for label in found.labels:
        held = {hook: cache[hook] * (0.0 if name == label else 1.0) for name, hook in outputs.items()}
        hooks = [(hook, lambda x, hook, held=held: held[hook.name]) for hook in held]
        with model.hooks(hooks):
            without = model.run_with_cache(ids, names_filter="blocks.2.hook_resid_post")[1]["resid_post", 2]
        torch.testing.assert_close(found.whole - without, found[label], atol=1e-12, rtol=0)


def test_a_value_path_is_what_a_head_loses_when_that_branch_is_silenced(awake, any_architecture):
    model, ids = awake(any_architecture), tokens()
    _, cache = model.run_with_cache(ids)
    found = decompose(model, cache, by="value_path")
    scale = model.stream_paths(3, cache=cache)
    for n in range(3):
        stem = f"blocks.{n}.attn."
        branches = {label.split(".", 1)[1] for label in found.labels if label.startswith(f"L{n}H0.")}
        points = {name for name in model.hook_dict if name.startswith(stem) and name.endswith(".hook_v")} - {
            f"{stem}hook_v"
        }
        assert branches == {path_name(name) for name in points}
        for branch in branches:
            with model.hooks([(f"{stem}{branch}.hook_v", lambda v, hook: torch.zeros_like(v))]):
                z = model.run_with_cache(ids, names_filter=f"{stem}hook_z")[1][f"{stem}hook_z"]
            lost = torch.einsum("bphd,hdm->hbpm", cache["z", n] - z, model.blocks[n].attn.W_O)
            if (norm := model.blocks[n].ln1_post) is not None:  # at the size it had
                lost = lost * norm.weight / cache[f"blocks.{n}.ln1_post.hook_scale"]
            for h in range(4):
                part = found[f"L{n}H{h}.{branch}"]
                torch.testing.assert_close(part, scale[f"{n}_attn_out"] * lost[h], atol=1e-12, rtol=0)


def test_a_layer_without_values_of_its_own_has_no_own_path(awake):
    labels = decompose(awake("svformer"), tokens(), by="value_path").labels
    assert [label for label in labels if label.startswith("L2H1")] == ["L2H1.first"]
    assert [label for label in labels if label.startswith("L0H1")] == ["L0H1.own"]


# ---- logits, positions, precisions -----------------------------------------------------------------------------------


def test_logits_of_tokens_and_their_differences(awake):
    model, ids = awake("resformer+denseformer"), tokens()
    logits = model(ids)
    rows, answer, other = torch.arange(2), torch.tensor([3, 9]), torch.tensor([4, 4])
    one = decompose(model, ids, "logits", "head", tokens=7)
    assert one.parts.shape == (1 + 3 * 5, 2, 6)
    torch.testing.assert_close(one.parts.sum(0), logits[..., 7])
    pair = decompose(model, ids, "logits", "head", tokens=answer, against=other)
    torch.testing.assert_close(pair.parts.sum(0)[:, -1], logits[rows, -1, answer] - logits[rows, -1, other])
    following = decompose(model, ids, "logits", tokens=ids)
    torch.testing.assert_close(following.parts.sum(0), logits.gather(-1, ids[..., None])[..., 0])
    every = decompose(model, ids, "logits")
    torch.testing.assert_close(every.parts[..., 7], decompose(model, ids, "logits", tokens=7).parts)


@pytest.mark.fast(7)
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, torch.bfloat16) for name in [*TOGETHER, "value_gate_query"]), ("denseformer", torch.float32)],
)
def test_other_precisions_sum_within_their_rounding(architecture, awake, dtype):
    model = awake(architecture, dtype=dtype)
    for by in ("layer", "head", "value_path"):
        found = decompose(model, tokens(), "logits", by)
        assert found.parts.dtype == torch.float32
        assert found.error <= TOLERANCE[dtype] * found.parts.abs().sum(0).max()


def test_mixed_precision_runs_are_decomposed(some_architecture, awake):
    model = awake(some_architecture, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = model.run_with_cache(tokens())
    found = decompose(model, cache, by="value_path")
    assert found.parts.dtype == torch.float32
    assert found.error < 0.05 * found.parts.abs().sum(0).max()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_massive_activation_hides_no_changed_stream(awake, dtype):
    """An error of 1 in ordinary channels of about 1 is less than 2 % of a channel of 300."""
    model, ids = awake("resformer").to(dtype), tokens()
    with torch.no_grad():
        model.embed.weight[:, 3] += 300
    for by in ("layer", "head", "value_path"):
        decompose(model, ids, by=by)
    with (
        model.hooks([("blocks.2.hook_resid_pre", lambda x, hook: x + (x.abs() < 100))]),
        pytest.raises(WorkbenchError, match="parts by layer miss the stream by"),
    ):
        decompose(model, ids)


def test_parts_that_do_not_sum_are_refused(awake):
    """Outputs changed by hooks are decomposed as they were used; a changed stream or head cannot be, and says so."""
    model, ids = awake("resformer"), tokens()
    with model.hooks(
        [("blocks.1.attn.hook_z", lambda z, hook: z * 0), ("blocks.2.hook_mlp_out", lambda x, hook: 2 * x)]
    ):
        _, cache = model.run_with_cache(ids)
    assert decompose(model, cache, by="head")["L1H0"].abs().max() == 0
    with pytest.raises(WorkbenchError, match="parts by value_path miss the stream by"):
        decompose(model, cache, by="value_path")
    with model.hooks([("blocks.1.hook_resid_mid", lambda x, hook: x + 1)]):
        _, cache = model.run_with_cache(ids)
    decompose(model, cache, 1)
    for to, told in ((2, "stream 2"), (None, "the stream"), ("logits", "logits")):
        with pytest.raises(WorkbenchError, match=f"parts by layer miss {told} by .*changed on its way"):
            decompose(model, cache, to)
    _, cache = model.run_with_cache(ids)
    cache.cache_dict["blocks.0.hook_mlp_out"] = cache["mlp_out", 0] * (1 + 1e-6)
    with pytest.raises(WorkbenchError, match="parts by layer miss"):
        decompose(model, cache)


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda m, c: decompose(m, c, 4), UnknownName, "unknown stream 4"),
        (lambda m, c: decompose(m, c, True), UnknownName, "unknown stream True"),
        (lambda m, c: decompose(m, c, "logit"), UnknownName, "did you mean logits"),
        (lambda m, c: decompose(m, c, by="heads"), UnknownName, "did you mean head"),
        (lambda m, c: decompose(m, c)["3_mlp_out"], UnknownName, "did you mean .*2_mlp_out"),
        (lambda m, c: decompose(m, c, "logits", against=3), BadData, "needs the `tokens`"),
        (lambda m, c: decompose(m, c, "logits", tokens=61), BadData, r"61\.\.61 leave the vocabulary 0\.\.60"),
        (lambda m, c: decompose(m, c, "logits", tokens=torch.zeros(3).long()), BadData, r"shape \(3, 1\) do not fit"),
        (lambda m, c: decompose(torch.nn.Linear(2, 2), c), BadData, "a Linear has no known paths"),
    ],
)
def test_what_cannot_be_decomposed_is_refused_in_words(awake, ask, error, told):
    model = awake("resformer")
    with pytest.raises(error, match=told):
        ask(model, model.run_with_cache(tokens())[1])


def test_caches_that_lack_something_or_are_another_models_are_refused(awake):
    model, other = awake("resformer"), awake("resformer")
    _, cache = model.run_with_cache(tokens(), names_filter=["hook_embed", "blocks.2.hook_resid_post"])
    with pytest.raises(BadData, match=r"the cache lacks blocks\.0\.hook_mlp_out, blocks\.0\.hook_attn_out"):
        decompose(model, cache)
    _, cache = model.run_with_cache(tokens())
    with pytest.raises(BadData, match="another model"):
        decompose(other, cache)
    cache.model = None
    assert decompose(model, cache).error < 1e-10
