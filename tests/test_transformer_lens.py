"""TransformerLens' own tools on every architecture, each against our exact parts, a hand-made run, or its definition."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from transformer_lens import ActivationCache, patching
from transformer_lens.head_detector import detect_head, get_previous_token_head_detection_pattern
from transformer_lens.hook_points import HookPoint
from transformer_lens.SVDInterpreter import SVDInterpreter
from transformer_lens.tools.analysis import attribution_patch, direct_logit_attribution, logit_lens
from transformer_lens.utilities import get_act_name

from workbench.decomposition import decompose
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.models import ARCHITECTURES
from workbench.names import is_statistic, stream_hook
from workbench.tokenizer import train_tokenizer

WIDE = torch.float64
COMBINED = ["resformer+cross_layer", "denseformer+cut_skip", "resformer+neutreno+gated_attention"]
AVERAGED = ["denseformer", "residual_hidden", "cut_skip", "resformer+denseformer", "denseformer+cut_skip"]
SMALL = {"d_model": 16, "n_heads": 2, "d_mlp": 20, "d_vocab": 11}


def small(architecture):
    """Sizes and options for sweeps of many runs."""
    return {"config": SMALL} | ({"query_group": 2} if architecture == "svformer+gqa" else {})


def tokens(length=6, *, batch=2, seed=0, vocabulary=61):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def awake(awake):
    """Those of all tests, in float64."""
    return functools.partial(awake, dtype=WIDE)


def close(found, expected, tight=1e-10):
    torch.testing.assert_close(found, expected, atol=tight, rtol=0)


# ---- decompositions of the stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_their_decompositions_sum_to_the_stream_and_equal_ours(awake, architecture):
    model, ids = awake(architecture), tokens()
    _, cache = model.run_with_cache(ids)
    for layer in (1, 2, None):
        stream = cache[stream_hook(3 if layer is None else layer, 3)]
        parts, labels = cache.decompose_resid(layer, return_labels=True)
        ours = decompose(model, cache, layer)
        assert labels == ours.labels
        close(parts, ours.parts)
        close(parts.sum(0), stream)
        heads, labels = cache.stack_head_results(
            -1 if layer is None else layer, return_labels=True, incl_remainder=True
        )
        by_head = decompose(model, cache, layer, "head")
        for label, part in zip(labels[:-1], heads, strict=False):
            close(part, by_head[label])
        close(heads.sum(0), stream)
        neurons, labels = cache.stack_neuron_results(layer, return_labels=True, incl_remainder=True)
        assert labels[-2:] == [f"L{2 if layer is None else layer - 1}N47", "remainder"]
        for n in range(3 if layer is None else layer):
            close(neurons[48 * n : 48 * (n + 1)].sum(0), ours[f"{n}_mlp_out"])
        close(neurons.sum(0), stream)
        for options in ({}, {"expand_neurons": False}):
            close(cache.get_full_resid_decomposition(layer, **options).sum(0), stream)
    middle = cache.decompose_resid(1, mlp_input=True)
    close(middle.sum(0), cache["resid_mid", 1])
    close(cache.get_full_resid_decomposition(1, mlp_input=True).sum(0), cache["resid_mid", 1])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_accumulated_streams_are_what_the_blocks_read(awake, architecture):
    model, ids = awake(architecture), tokens()
    logits, cache = model.run_with_cache(ids)
    streams, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    for n in range(3):
        close(streams[2 * n], decompose(model, cache, n).parts.sum(0))
        close(streams[2 * n + 1], cache["resid_mid", n])
    close(streams[-1], decompose(model, cache).parts.sum(0))
    normalised = cache.accumulated_resid(apply_ln=True)[-1]
    close(normalised @ model.W_U + model.b_U, logits)


@pytest.mark.parametrize("architecture", AVERAGED)
def test_a_plain_sum_of_outputs_misses_an_averaged_stream_and_ours_does_not(awake, architecture):
    """TransformerLens' own cache adds outputs as they leave their blocks: off by more than a tenth of the stream."""
    model, ids = awake(architecture), tokens()
    logits, cache = model.run_with_cache(ids)
    theirs, stream = ActivationCache(dict(cache.cache_dict), model), cache["resid_post", 2]
    for parts in (theirs.decompose_resid(), theirs.get_full_resid_decomposition(expand_neurons=False)):
        assert (parts.sum(0) - stream).norm() > 0.1 * stream.norm()
    assert (
        theirs.logit_attrs(theirs.decompose_resid(), ids).sum(0) - logits.gather(-1, ids[..., None])[..., 0]
    ).norm() > 0.1
    assert decompose(model, cache).error < 1e-10
    close(cache.decompose_resid().sum(0), stream)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in AVERAGED])
def test_where_nothing_is_averaged_their_numbers_are_untouched(awake, architecture):
    model = awake(architecture)
    _, cache = model.run_with_cache(tokens())
    theirs = ActivationCache(dict(cache.cache_dict), model)
    assert set(model.stream_paths(3).values()) == {1.0}
    assert torch.equal(cache.decompose_resid(apply_ln=True), theirs.decompose_resid(apply_ln=True))
    assert torch.equal(cache.stack_head_results(incl_remainder=True), theirs.stack_head_results(incl_remainder=True))
    assert torch.equal(cache.get_full_resid_decomposition(), theirs.get_full_resid_decomposition())


@pytest.mark.parametrize("architecture", ["transformer", *AVERAGED])
def test_decompositions_scale_project_and_slice_as_theirs(awake, architecture):
    """The final norm's scale, a projection and a position commute with the weights on the way."""
    model = awake(architecture)
    logits, cache = model.run_with_cache(tokens())
    direction = model.tokens_to_residual_directions(torch.tensor([3, 8])).T
    for options in ({}, {"expand_neurons": False}):
        full = cache.get_full_resid_decomposition(apply_ln=True, project_output_onto=direction, pos_slice=-1, **options)
        close(full.sum(0), logits[:, -1, [3, 8]])
    neurons = cache.stack_neuron_results(
        3, apply_ln=True, project_output_onto=direction[:, 0], incl_remainder=True, pos_slice=[2, 5]
    )
    close(neurons.sum(0), logits[:, [2, 5], 3])
    parts = cache.decompose_resid(apply_ln=True, pos_slice=-1, mode="mlp", incl_embeds=False)
    ours = decompose(model, cache, "final", pos=-1)
    close(parts, torch.stack([ours[f"{n}_mlp_out"][:, 0] for n in range(3)]))
    single = model.run_with_cache(tokens(batch=1), remove_batch_dim=True)[1]
    close(single.decompose_resid().sum(0), single["resid_post", 2])


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_logit_attributions_with_an_unfolded_gain_equal_ours_and_sum_to_the_logit(awake, architecture):
    """The final gain is away from 1 and part of the token's direction, so that nothing needs folding."""
    model, ids = awake(architecture), tokens()
    answer, other, rows = torch.tensor([3, 9]), torch.tensor([4, 4]), torch.arange(2)
    logits, cache = model.run_with_cache(ids)
    wanted = logits[rows, -1, answer] - logits[rows, -1, other]
    by_layer, by_head = (
        decompose(model, cache, "logits", by, tokens=answer, against=other, pos=-1) for by in ("layer", "head")
    )
    found = direct_logit_attribution(model, ids, answer, other)
    assert found.labels == by_layer.labels
    close(found.attribution, by_layer.parts[..., 0])
    close(found.attribution.sum(0), wanted)
    found = direct_logit_attribution(model, cache=cache, answer_tokens=answer, incorrect_tokens=other, unit="head")
    for label, part in zip(found.labels[:-1], found.attribution, strict=False):
        close(part, by_head[label][:, 0])
    close(found.attribution.sum(0), wanted)
    found = direct_logit_attribution(model, ids, answer, other, unit="layer")
    assert found.labels[-1] == "final_post"
    close(found.attribution[-1], wanted)
    every = cache.logit_attrs(cache.decompose_resid(), ids)
    close(every, decompose(model, cache, "logits", tokens=ids).parts)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_the_logit_lens_reads_each_stream_through_the_final_norm(awake, architecture):
    model, ids = awake(architecture), tokens()
    logits, cache = model.run_with_cache(ids)
    for found in (logit_lens(model, ids, positions=None), cache.logit_lens(positions=None)):
        assert found.labels == ["0_pre", "1_pre", "2_pre", "final_post"]
        for index, read in enumerate(found.readout.values):
            stream = decompose(model, cache, index).parts.sum(0)
            scale = (stream.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
            close(read, stream / scale * model.ln_final.weight @ model.unembed.weight.T)
        close(found.readout.values[-1], logits)


def test_tokens_may_be_texts(awake):
    tokenizer = train_tokenizer(["the cat sat on the mat"], vocab_size=260)
    model = awake("resformer", config={"d_vocab": tokenizer.vocab_size})
    model.tokenizer = tokenizer
    text = "the cat"
    ids = model.to_tokens(text)
    letters = [model.to_single_str_token(i) for i in ids[0].tolist()]
    assert letters == model.to_str_tokens(text)
    assert model.to_string(ids[0]) == text
    answer = model.to_single_token("a")
    by_text = direct_logit_attribution(model, text, "a").attribution
    close(by_text, direct_logit_attribution(model, ids, answer).attribution)
    close(decompose(model, text, "logits", tokens="a", pos=-1).parts.sum(0)[:, 0], model(text)[:, -1, answer])
    assert logit_lens(model, text, targets="a").target_names == ["a"]
    with pytest.raises(BadData, match="tokens, not one"):
        model.tokens_to_residual_directions("zzz")


# ---- activation patching ---------------------------------------------------------------------------------------------

SWEEPS = {
    "resid_pre": ("resid_pre", "pos"),
    "resid_mid": ("resid_mid", "pos"),
    "attn_out": ("attn_out", "pos"),
    "mlp_out": ("mlp_out", "pos"),
    "attn_head_out_by_pos": ("z", "pos head"),
    "attn_head_q_by_pos": ("q", "pos head"),
    "attn_head_k_by_pos": ("k", "pos head"),
    "attn_head_v_by_pos": ("v", "pos head"),
    "attn_head_pattern_by_pos": ("pattern", "head dest"),
    "attn_head_pattern_dest_src_pos": ("pattern", "head dest src"),
    "attn_head_out_all_pos": ("z", "head"),
    "attn_head_q_all_pos": ("q", "head"),
    "attn_head_k_all_pos": ("k", "head"),
    "attn_head_v_all_pos": ("v", "head"),
    "attn_head_pattern_all_pos": ("pattern", "head"),
}
"""What each sweep patches, and over which axes beside the layer."""


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


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "resformer+cross_layer"])
def test_patching_sweeps_equal_runs_patched_by_hand(awake, architecture):
    model = awake(architecture, **small(architecture))
    clean, corrupted = (tokens(3, batch=1, seed=seed, vocabulary=11) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        untouched = metric(model(corrupted)).item()
        for sweep, (name, axes) in SWEEPS.items():
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
    if not model.averagers and not any(
        "table" in name for name in model.hook_dict
    ):  # these read the tokens elsewhere too
        assert restored.item() == pytest.approx(metric(model(clean)).item(), abs=1e-10)


@pytest.mark.parametrize("architecture", ["svformer+gqa", "denseformer", "cross_layer"])
def test_sweeps_over_all_activations_are_those_of_each(awake, architecture):
    model = awake(architecture, config=SMALL | {"n_heads": 4})
    clean, corrupted = (tokens(3, batch=1, seed=seed, vocabulary=11) for seed in (1, 2))
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        run = lambda sweep: getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, cache, metric)  # noqa: E731
        blocks = run("block_every")
        assert torch.equal(blocks, torch.stack([run(x) for x in ("resid_pre", "attn_out", "mlp_out")]))
        heads = run("attn_head_all_pos_every")
        for index, kind in enumerate(("out", "q", "k", "v", "pattern")):
            alone = run(f"attn_head_{kind}_all_pos")
            assert torch.equal(heads[index, :, : alone.shape[1]], alone)
        assert run("attn_head_by_pos_every").shape == (5, 3, 3, 4)


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


def test_direct_path_patching_says_that_it_does_not_apply(awake):
    model = awake("resformer", config=SMALL)
    _, cache = model.run_with_cache(tokens(3, vocabulary=11))
    with pytest.raises(AttributeError, match="set_use_split_qkv_input"):
        patching.get_act_patch_direct_path(model, tokens(3, vocabulary=11), cache, cache, metric, 0, 0)


# ---- attribution patching --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_node_attributions_equal_their_definition_and_finite_differences(awake, architecture):
    """Effect of a node: (clean - corrupted) . dmetric/dnode on the corrupted run, the slope along that direction."""
    model = awake(architecture, **small(architecture))
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


# ---- heads -----------------------------------------------------------------------------------------------------------


def plant_previous_token_head(model, layer, head):
    """One head whose rotated query at i points along the rotated key at i - 1: u = (a, 0, ..) and u turned by one step."""
    attn, c = model.blocks[layer].attn, model.config
    half, strength = c.d_head // 2, 60.0
    with torch.no_grad():
        model.embed.weight[:, 0] = 5.0  # something that all tokens share; the norm leaves it near a constant
        rows = slice(head * c.d_head, (head + 1) * c.d_head)
        group = head * c.n_key_value_heads // c.n_heads
        keys = slice(group * c.d_head, (group + 1) * c.d_head)
        attn.q_proj.weight[rows] = 0
        attn.k_proj.weight[keys] = 0
        attn.q_proj.weight[head * c.d_head, 0] = strength
        one = torch.tensor(1.0, dtype=WIDE)  # the fastest pair of dimensions turns by one radian a position
        attn.k_proj.weight[group * c.d_head, 0] = one.cos()
        attn.k_proj.weight[group * c.d_head + half, 0] = one.sin()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "resformer+cross_layer"])
def test_a_planted_previous_token_head_is_found(tiny, architecture):
    """At six positions the largest score is at distance 1 (cosines of i - j - 1 radians); row 0 sees itself alone."""
    model = tiny(architecture, dtype=WIDE)
    plant_previous_token_head(model, 0, 2)
    ids = tokens(6, batch=1)
    scores = detect_head(model, ids, "previous_token_head")
    assert scores.shape == (3, 4)
    assert scores.dtype == WIDE
    assert scores[0, 2] == pytest.approx(5 / 6, abs=1e-3)
    others = [h for h in range(4) if h != 2]
    assert scores[0, others].max() < 0.6
    _, cache = model.run_with_cache(ids)
    wanted = get_previous_token_head_detection_pattern(ids)
    for layer in range(3):
        pattern = cache["pattern", layer][0]
        close(scores[layer], (pattern * wanted).sum((-1, -2)) / pattern.sum((-1, -2)))


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_stand_under_their_names_and_layouts(awake):
    model = awake("resformer", config={"n_key_value_heads": 2})
    shapes = {
        "W_E": (61, 32), "W_U": (32, 61), "W_pos": (128, 32), "W_Q": (3, 4, 32, 8), "W_K": (3, 2, 32, 8),
        "W_V": (3, 2, 32, 8), "W_O": (3, 4, 8, 32), "W_in": (3, 32, 48), "W_gate": (3, 32, 48), "W_out": (3, 48, 32),
        "b_Q": (3, 4, 8), "b_K": (3, 2, 8), "b_V": (3, 2, 8), "b_O": (3, 32), "b_in": (3, 48), "b_out": (3, 32),
        "b_U": (61,),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert getattr(model, name).shape == shape, name
        if name.startswith("b_") or name == "W_pos":
            assert getattr(model, name).abs().sum() == 0
    assert model.accumulated_bias(3).shape == (32,)
    _, cache = model.run_with_cache(tokens())
    for n in range(3):
        x = cache["normalized", n, "ln1"] * model.blocks[n].ln1.weight
        close(torch.einsum("bpd,hde->bphe", x, model.W_Q[n]), cache["q", n])
        close(torch.einsum("bpd,hde->bphe", x, model.W_K[n]), cache["k", n])
        close(torch.einsum("bpd,hde->bphe", x, model.W_V[n]), cache["v", n, "own"])
        close(torch.einsum("bphe,hed->bpd", cache["z", n], model.W_O[n]), cache["attn_out", n])
        y = cache["normalized", n, "ln2"] * model.blocks[n].ln2.weight
        close(y @ model.W_gate[n], cache["pre", n])
        close(y @ model.W_in[n], cache["pre_linear", n])
        close(cache["post", n, "mlp"] @ model.W_out[n], cache["mlp_out", n])
    with pytest.raises(AttributeError, match="W_X"):
        model.W_X  # noqa: B018


@pytest.mark.parametrize(
    ("architecture", "name", "layer", "told"),
    [
        ("svformer", "W_V", 2, r"layer 2 has no W_V of its own; it uses layer 0's: see blocks\.0\.attn"),
        ("cla", "W_K", 1, "layer 1 has no W_K of its own; it uses layer 0's"),
        ("share_q", "W_Q", 1, "layer 1 has no W_Q of its own; it uses layer 0's"),
        ("bank_of_values", "W_V", 2, r"layer 2 has no W_V of its own; it uses the table bank\.2"),
    ],
)
def test_a_projection_that_a_layer_borrows_is_refused_with_whose_it_uses(awake, architecture, name, layer, told):
    model = awake(architecture)
    with pytest.raises(WorkbenchError, match=told):
        getattr(model.blocks[layer].attn, name)
    with pytest.raises(WorkbenchError, match=f"has no {name} of its own"):
        getattr(model, name)
    with pytest.raises(WorkbenchError, match=told):
        model.tl_parameters()[f"blocks.{layer}.attn.{name}"]
    with pytest.raises(KeyError):
        model.tl_parameters()["blocks.9.attn.W_V"]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_singular_vectors_pair_each_query_head_with_its_own_values(awake, kv_heads):
    """Head h reads key-value head floor(h kv / 4): right singular vectors of W_V W_O, through the head."""
    model = awake("resformer", config={"n_key_value_heads": kv_heads})
    for h in range(4):
        found = SVDInterpreter(model).get_singular_vectors("OV", 1, num_vectors=3, head_index=h)
        w_v = model.blocks[1].attn.W_V[h * kv_heads // 4]
        vectors = torch.linalg.svd(w_v @ model.blocks[1].attn.W_O[h])[2][:3]
        expected = (model.W_U.T @ vectors.T)[:, None]
        close(found.abs(), expected.abs(), 1e-8)  # a singular vector's sign is free
    for kind in ("w_in", "w_out"):
        assert SVDInterpreter(model).get_singular_vectors(kind, 2).shape == (61, 1, 10)


def test_the_shape_they_read_follows_the_weights(awake):
    model = awake("gqa")
    assert (model.cfg.device, model.cfg.dtype, model.cfg.n_key_value_heads) == ("cpu", WIDE, 2)
    model.to(torch.bfloat16)
    assert model.cfg.dtype == torch.bfloat16
    assert copy.deepcopy(model).cfg.d_model == 32


# ---- known traps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_an_edit_in_place_is_the_same_as_an_edit_returned(awake, architecture):
    """Patching edits in place; layers that share a tensor, the history of averages and parameters must not hear of it."""
    model, ids = awake(architecture), tokens(5)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name in model.hook_dict:
            if is_statistic(name):
                continue
            returned = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: x * 1.5)])
            in_place = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: x.mul_(1.5))])
            torch.testing.assert_close(in_place, returned, atol=1e-12, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_a_cached_average_is_not_a_view_of_its_parameter(awake):
    model = awake("denseformer")
    _, cache = model.run_with_cache(tokens())
    before = cache["blocks.1.hook_dwa_weights"].clone()
    with torch.no_grad():
        model.dwa.alphas["1"].weight.add_(1)
    assert torch.equal(cache["blocks.1.hook_dwa_weights"], before)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_head_outputs_sum_to_the_attention_output(awake, architecture):
    """What NeuTRENO, identity mapping and gates do comes before `hook_z`, so z is exactly what W_O multiplies."""
    model = awake(architecture)
    _, cache = model.run_with_cache(tokens())
    for n in range(3):
        close(torch.einsum("bphd,hdm->bpm", cache["z", n], model.blocks[n].attn.W_O), cache["attn_out", n])


def test_shorthand_reaches_branches_and_never_another_tensor(awake):
    model = awake("resformer_dense")
    _, cache = model.run_with_cache(tokens())
    assert get_act_name("v", 2, "own") == "blocks.2.attn.hook_v"  # theirs passes over the branch
    assert cache["v", 2, "own"] is cache["blocks.2.attn.own.hook_v"]
    assert cache["v", -1, "source.1"] is cache["blocks.2.attn.source.1.hook_v"]
    assert cache["v", 1, "first"] is cache["blocks.1.attn.first.hook_v"]
    assert cache["v_mix", 2, "attn"] is cache["blocks.2.attn.hook_v_mix"]
    assert cache["v", 2] is cache["v", 2, "attn"]
    for key in (("v", 2, "first"), ("v", 2, "cross"), "own.v"):
        with pytest.raises(KeyError):
            cache[key]


def test_a_misspelt_name_is_refused_with_the_nearest_wherever_names_are_given(awake):
    model = awake("resformer")
    for ask in (
        lambda name: model.run_with_cache(tokens(), names_filter=name),
        lambda name: model.run_with_hooks(tokens(), fwd_hooks=[(name, lambda x, hook: x)]),
        lambda name: model.run_with_grads(tokens(), [name]),
    ):
        with pytest.raises(UnknownName, match=r"did you mean blocks\.1\.attn\.own\.hook_v"):
            ask("blocks.1.attn.own.hook_vv")


def test_gradients_of_activations_leave_parameters_and_caches_alone(awake):
    """`run_with_cache(incl_bwd)` adds to the parameters' gradients on each call and fails without gradients; ours does not."""
    model, ids = awake("svformer"), tokens()
    model.run_with_cache(ids, incl_bwd=True, return_type="loss")
    once = model.embed.weight.grad.clone()
    model.run_with_cache(ids, incl_bwd=True, return_type="loss")
    torch.testing.assert_close(model.embed.weight.grad, 2 * once)
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    with torch.no_grad():
        _, values, grads = model.run_with_grads(ids, "blocks.1.attn.hook_z")
    assert grads["blocks.1.attn.hook_z"].abs().max() > 0
    assert set(values) == {"blocks.1.attn.hook_z"}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("architecture", ["resformer", "cross_layer", "residual_attention"])
def test_a_cache_without_its_model_does_not_keep_it_alive(awake, architecture):
    model = awake(architecture)
    _, cache = model.run_with_cache(tokens())
    pattern, gone = cache["pattern", 1], weakref.ref(model)
    cache.model = None
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(cache["pattern", 1], pattern)  # rebuilt from what the cache holds


def test_every_module_knows_its_own_name(any_architecture, tiny):
    """`setup()` writes `.name` on every submodule, so none may use that attribute for something else."""
    model = tiny(any_architecture)
    for name, module in model.named_modules():
        if name:
            assert module.name == name
    assert all(model.hook_dict[name].name == name for name in model.hook_dict)
    assert {n for n, m in model.named_modules() if isinstance(m, HookPoint)} == set(model.hook_dict)
    assert not any("hook" in name for name in model.state_dict())


def test_their_tools_run_under_mixed_precision(awake):
    """There values are bfloat16 and the stream float32; sums agree to bfloat16's rounding."""
    model = awake("neutreno", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = model.run_with_cache(tokens())
    assert cache["v", 1].dtype == cache["z", 1].dtype == torch.bfloat16
    stream = cache["resid_post", 2]
    assert stream.dtype == cache.decompose_resid().dtype == torch.float32
    heads = cache.stack_head_results().sum(0)
    assert (cache.decompose_resid().sum(0) - stream).norm() < 0.02 * stream.norm()
    assert (heads - sum(cache["attn_out", n].float() for n in range(3))).norm() < 0.02 * heads.norm()
