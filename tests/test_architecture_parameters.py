"""Architectures have the parameters of their formulas, and every one of them learns from the start."""

from __future__ import annotations

import math

import equations
import pytest
import torch
from inputs import SMALL, tokens

from workbench.config import PRESETS
from workbench.models import ARCHITECTURES, compose

WRITTEN = list(filter(equations.written, ARCHITECTURES))


def expected_parameters(name, c):
    """2 vocab d + L (2 d^2 + 2 d D + 3 d f) + (2 L + 1) d, and what each architecture adds or saves."""
    L, d, parts = c.n_layers, c.d_model, name.split("+")
    D = d // {"gqa": 4 if "svformer" in parts else 2, "mqa": c.n_heads}.get(parts[-1], 1)
    pairs, bank, tables = L - math.ceil(L / 2), L // 3, 3 if L >= 6 else L // 2
    extra = {
        "resformer_learnable": 2 * (L - 1),
        "resformer_learnable_plus": 2 * (L - 1) + 1,
        "resformer_dense": L * (L + 1) // 2 - 1,
        "svformer": -(L - 1) * d * D,
        "denseformer": L * (L + 3) // 2,
        "attention_residuals": 4 * L * d,
        "hyper_connections": 2 * L * (4 * 4 + 2 * 4 + 6 * d + 2),
        "mhc": 2 * L * ((4 * d + 1) * (4 * 4 + 2 * 4) + 3),
        "cla": -pairs * d * D * (1 if "svformer" in parts else 2),
        "share_q": -pairs * d * d,
        "share_k": -pairs * d * D,
        "share_v": -pairs * d * D,
        "value_embedding": tables * c.d_vocab * D + L + 2 * tables,
        "bank_of_values": bank * ((c.d_vocab - d) * D + 1),
        "gated_value_embedding": math.ceil(L / 2) * (c.d_vocab * D + c.n_heads * D // d * 12),
        "satformer": (L - 1) * d * c.n_heads,
        "skip_v1": -(L - 1) * d * (c.n_heads // 2) * c.d_head,
        "value_scale": L * c.n_heads,
        "value_gate": L * c.n_heads * D,
        "value_gate_query": L * c.n_heads * D,
        "gated_attention": L * d * d,
        "sandwich_norm": 2 * L * d,
        "post_norm": L * (d + D),
        "dyt": 2 * L * (d + 1),
        "sink_logit": L * c.n_heads,
    }
    whole = 2 * c.d_vocab * d + L * (2 * d * d + 2 * d * D + 3 * d * c.d_mlp) + (2 * L + 1) * d
    return whole + sum(extra.get(part, 0) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parameters", "saved", "architectures"),
    [
        ("2m", 1_623_856, 768, WRITTEN),
        ("82m", 81_901_056, 1_835_008, ("svformer", "transformer")),
        ("180m", 179_874_048, 6_488_064, ("svformer", "transformer")),
        ("468m", 467_921_920, 24_117_248, WRITTEN),
    ],
)
def test_published_sizes_have_the_published_parameters(size, parameters, saved, architectures):
    config = PRESETS[size].model
    assert expected_parameters("transformer", config) == parameters
    assert expected_parameters("svformer", config) == parameters - saved
    for name in architectures:
        if name == "svformer+gqa" and config.n_heads % 4:
            continue  # four query heads for each key-value head need four
        with torch.device("meta"):
            count = sum(p.numel() for p in compose(name, config).parameters())
        assert count == expected_parameters(name, config), name


def test_parameters_of_anchors_groups_and_grouped_heads():
    def count(name, **options):
        with torch.device("meta"):
            return sum(p.numel() for p in compose(name, SMALL, **options).parameters())

    vanilla, matrix = count("transformer"), 96 * 96
    assert count("svformer", anchors=[0, 3]) == vanilla - 2 * matrix
    assert count("cla", group=3) == vanilla - 2 * 2 * matrix
    assert count("cla", group="all") == vanilla - 3 * 2 * matrix
    assert count("gqa", query_group=4) == vanilla - 4 * 2 * matrix * 3 // 4
    assert count("svformer+cla", group=4, anchors=[0, 2]) == vanilla - 3 * matrix - 2 * matrix
    assert count("value_embedding", value_tables=1) == vanilla + 1024 * 96 + 4 + 2
    assert count("attention_residuals", depth_blocks=3, depth_heads=8) == vanilla + 16 * 96
    assert count("attention_residuals", depth_form="delta") == vanilla + 2 * 7 * 96
    assert count("hyper_connections", dynamic=False, streams=3) == vanilla + 8 * 15
    assert count("mhc", mixing="permutations", streams=3) == vanilla + 8 * ((3 * 96 + 1) * (6 + 6) + 3)
    assert count("post_norm+share_q") == count("share_q") + (2 + 4) * 96  # of queries and keys; as many norms as before
    assert count("bank_of_values", bank_layers=[1, 2, 3]) == vanilla + 3 * (1024 * 96 - matrix + 1)
    assert count("bank_of_values", bank="first", bank_layers=[1, 2, 3]) == vanilla + 3 * (1 - matrix)
    assert count("svformer", shared_layers="last_third") == vanilla - matrix
    assert count("skip_v1", skip_heads=1) == vanilla - 3 * matrix // 4
    assert count("satformer", layers=[3]) == vanilla + 96 * 4
    assert count("sink_logit", logit="zero") == vanilla


@pytest.mark.parametrize(
    ("dilation", "period", "weights"), [(1, 1, 14), (2, 1, 2 + 2 + 3 + 1), (1, 2, 3 + 5), (4, 4, 2)]
)
def test_denseformer_weights_by_hand(dilation, period, weights):
    """4 blocks: after block i (from 0) floor((i + 1) / dilation) + 1 weights where (i + 1) mod period = 0."""
    model = compose("denseformer", SMALL, dilation=dilation, period=period)
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith("dwa.")) == weights
    table = model.shortcuts[0].coefficients()
    own = [table[f"alpha_{i + 1}"][i] for i in range(4)]
    assert [value for value in own if not math.isnan(value)] == [1.0] * (4 // period)


# ---- gradients -------------------------------------------------------------------------------------------------------


SECOND = (
    "attention_residuals.gains.",
    "hyper_connections.scales.",
)  # they multiply what starts at 0, and learn once that has moved


@pytest.mark.parametrize("layers", [3, 4])
def test_every_parameter_and_every_coefficient_learns_from_the_start(any_architecture, tiny, layers):
    model = tiny(any_architecture, config={"n_layers": layers})
    model(tokens(model, 8), return_type="loss").backward()
    own = tuple(f"{s.prefix}." for s in model.shortcuts)
    if any(name.startswith(SECOND) for name, _ in model.named_parameters()):
        assert not any(p.grad.any() for name, p in model.named_parameters() if name.startswith(SECOND))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(tokens(model, 8), return_type="loss").backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
        if name.startswith(own) and (p.ndim < 2 or min(p.shape) == 1):
            assert (p.grad != 0).all(), name
