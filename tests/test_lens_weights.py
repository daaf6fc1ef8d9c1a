"""Weights under TransformerLens' names and layouts, planted heads and singular vectors."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from lensed import WIDE, close, tokens
from seams import TOGETHER
from transformer_lens.head_detector import detect_head, get_previous_token_head_detection_pattern
from transformer_lens.SVDInterpreter import SVDInterpreter

from workbench.errors import WorkbenchError


@pytest.fixture
def awake(awake):
    """Those of all tests, in float64."""
    return functools.partial(awake, dtype=WIDE)


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


STRONG = [name for name in TOGETHER if "post_norm" not in name]  # normed queries have one strength


@pytest.mark.fast(5)
@pytest.mark.parametrize("architecture", [*STRONG, "resformer+cross_layer"])
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
