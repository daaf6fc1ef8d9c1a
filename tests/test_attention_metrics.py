"""What attention writes: importance weighted by norms through W_O, kinds of sinks; by hand and against naive versions."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.data.data_sources import Sample
from workbench.interventions import INTERVENTIONS
from workbench.metrics import METRICS
from workbench.metrics.attention_patterns import (
    norm_weighted_importance,
    sink_contribution,
    sink_power,
    uniform_importance,
    value_weighted_importance,
)
from workbench.metrics.values import value_bias
from workbench.statistics.sink_thresholds import sink_kind


@pytest.fixture
def randomly():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def ids(randomly):
    return torch.randint(61, (3, 20), generator=randomly)


# ---- norms through W_O -----------------------------------------------------------------------------------------------


def test_norm_weighted_importance_by_hand():
    """Two positions, values (3, 4) and (1, 0); W_O of head 0 keeps the first channel doubled, of head 1 both as they are."""
    v = torch.tensor([[[[3.0, 4.0]], [[1.0, 0.0]]]])
    w_o = torch.tensor([[[2.0, 0, 0], [0, 0, 0]], [[1.0, 0, 0], [0, 0, 1]]])
    received = torch.tensor([[[1.5, 0.5], [1.0, 1.0]]])
    # norms: head 0: 6, 2; head 1: 5, 1
    heads = [[9.0, 1.0], [5.0, 1.0]]
    expected = [14 / 16, 2 / 16]
    assert norm_weighted_importance(received, v, w_o)[0].tolist() == pytest.approx(expected)
    each = norm_weighted_importance(received, v, w_o, per_head=True)
    assert each[0].T.flatten().tolist() == pytest.approx([0.9, 0.1, 5 / 6, 1 / 6])
    assert each[0].T.flatten().tolist() == pytest.approx([x / sum(h) for h in heads for x in h])
    # even attention gives 1.5 and 0.5 of the two queries to every head
    even = norm_weighted_importance(received, v, w_o, even=True)
    assert even[0].tolist() == pytest.approx([1.5 * 11 / 18, 0.5 * 3 / 18])


def test_norm_weighted_importance_of_uniform_attention_and_equal_norms_is_the_control(randomly):
    T = 12
    c = (T * uniform_importance(T)).expand(1, 2, T)
    v = torch.nn.functional.normalize(torch.randn(1, T, 2, 4, generator=randomly, dtype=torch.double), dim=-1)
    w_o = torch.eye(4, 8, dtype=torch.double).expand(2, 4, 8)  # keeps every length
    control = METRICS["norm_weighted_importance"].controls["uniform_causal"](T)
    torch.testing.assert_close(norm_weighted_importance(c, v, w_o)[0], control)
    torch.testing.assert_close(norm_weighted_importance(torch.rand(1, 2, T), v, w_o, even=True)[0], control)


def test_a_value_that_the_output_matrix_drops_counts_only_before_it():
    v = torch.tensor([[[[0.0, 5.0]], [[1.0, 0.0]]]])
    w_o = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    received = torch.tensor([[[1.0, 1.0]]])
    assert norm_weighted_importance(received, v, w_o)[0].tolist() == [0.0, 1.0]
    assert value_weighted_importance(received, v)[0, 0] > 0.8


# ---- the first token's part, the own value's -------------------------------------------------------------------------


def test_power_and_contribution_of_a_sink_by_hand():
    """Values (2, 0) and (0, 1), twice; queries attend 3/4 and 1/4: z = (1.5, 0.25), of which the first supplies 36 of 37; one is closed."""
    sink = torch.tensor([[[1.0, 0.75, 0.75]]])
    v = torch.tensor([[[[2.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]]])
    z = torch.tensor([[[[2.0, 0.0]], [[1.5, 0.25]], [[0.0, 0.0]]]])
    assert sink_power(sink).item() == 1 + 2 * 0.5625
    assert sink_contribution(sink, v, z).item() == pytest.approx(36 / 37)
    assert sink_contribution(sink, v * torch.tensor([1.0, -1.0]), -z).item() == pytest.approx(-36 / 37), "against it"
    assert sink_contribution(sink, torch.zeros_like(v), z).item() == 0, "a drained value supplies nothing"
    assert sink_contribution(sink, v, torch.zeros_like(z)).item() == 0, "nor is anything supplied to nothing"


def test_value_bias_by_hand():
    """Two heads on one key-value head; outputs at 0, 90 and 45 degrees to the token's own value and to the other's."""
    v = torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]], [[3.0, 0.0]]]])
    z = torch.tensor([[[[1.0, 0.0], [5.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]], [[1.0, 1.0], [-2.0, 0.0]]]])
    half = math.sqrt(0.5)
    assert value_bias(z, v)[0].tolist() == pytest.approx([(1 + half) / 2, -0.5])
    assert value_bias(z, v, first=True)[0].tolist() == [1.0, 1.0]
    assert value_bias(z, v, other=True)[0].tolist() == pytest.approx([half / 2, 0.5])
    shortest = METRICS[
        "value_bias"
    ].min_length  # with one position after the first, the other token would be the token itself
    z, v = (torch.randn(2, shortest, 1, 4, generator=torch.Generator().manual_seed(n)) for n in range(2))
    assert not torch.allclose(value_bias(z, v), value_bias(z, v, other=True))


# ---- kinds of sinks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mass", "ratio", "spread", "kind"),
    [
        (0.3, 0.9, 0.1, "none"), (math.nan, 0.9, 0.1, "none"), (0.9, 0.2, 0.9, "no-op"), (0.9, 0.0, 0.0, "no-op"),
        (0.9, 0.5, 0.5, "broadcast"), (0.9, 1.0, 0.6, "mixed"), (0.9, 0.3, 0.1, "mixed"), (0.9, math.nan, 0.1, "mixed"),
    ],
)  # fmt: skip
def test_kinds_of_sinks_by_their_thresholds(mass, ratio, spread, kind):
    assert sink_kind(mass, ratio, spread) == kind


def sinks(model, ids):
    rows = INTERVENTIONS["sink_output"].function(model, Sample(ids, list(range(len(ids))), "x"), None, 2)
    return {(r["layer"], r["head"], r["variant"]): r for r in rows}


def test_sink_output_by_hand(tiny, ids):
    """Half of every later query's attention on position 0, the rest on itself; all values alike but the first."""
    model = tiny(dtype=torch.float64)
    T = ids.shape[1]
    half = torch.full((T, T), -torch.inf, dtype=torch.float64)
    half[:, 0] = half.diagonal()[:] = 0.0

    def values(first):
        def put(v, hook):
            v = torch.ones_like(v)
            v[:, 0] *= first
            return v

        return put

    def run(first):
        with model.hooks(
            [
                ("blocks.1.attn.hook_attn_scores", lambda s, hook: half.expand_as(s)),
                ("blocks.1.attn.hook_v", values(first)),
            ]
        ):
            return sinks(model, ids)

    # with u = (1, ..., 1) W_O position 0 writes first * u / 2 of (first + 1) * u / 2
    for first, ratio, kind in ((3.0, 3 / 4, "broadcast"), (0.0, 0.0, "no_op"), (0.5, 1 / 3, None)):
        found = run(first)
        assert found[1, 0, "mass"]["value"] == pytest.approx(0.5)
        assert found[1, 0, None]["value"] == pytest.approx(ratio)
        assert found[1, 0, "spread"]["value"] == pytest.approx(0, abs=1e-9)
        for name in ("no_op", "broadcast"):
            assert found[1, 0, name]["value"] == float(name == kind)
            assert found[1, 0, name]["unit"] == "share of documents"
            assert found[1, 0, name]["n"] == len(ids)


def test_an_untrained_head_is_no_sink(tiny, ids):
    found = sinks(tiny(dtype=torch.float64), ids)
    assert all(r["value"] == 0 for (_, _, variant), r in found.items() if variant in ("no_op", "broadcast"))
