"""Metrics of the attention pattern: each a number worked by hand, an extreme, the invariances it promises."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import seeded

from workbench import plots
from workbench.kernels.attention_and_its_statistics import attention_statistics
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.metrics.attention_patterns import (
    ConcentrationParts,
    importance_entropy,
    induction_score,
    received_ratio,
    row_entropy,
    sink_mass,
    sink_rate,
    token_importance,
    top_importance,
    uniform_entropy,
    uniform_importance,
    value_weighted_importance,
)


def uniform_pattern(T):
    """Every query attends to all it may see alike."""
    return torch.ones(T, T, dtype=torch.double).tril() / torch.arange(1, T + 1)[:, None]


def received(pattern):
    return pattern.sum(-2)[None, None]


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "entropy"), [(20, 2.6233), (64, 3.7539), (128, 4.4386), (256, 5.1273), (2048, 7.2025)])
def test_entropy_of_uniform_causal_attention(T, entropy):
    assert uniform_entropy(T) == pytest.approx(entropy, abs=5e-5)
    assert float(uniform_importance(T)[0]) == pytest.approx(math.fsum(1 / i for i in range(1, T + 1)) / T, rel=1e-12)
    if T <= 256:
        flat = received(uniform_pattern(T))
        torch.testing.assert_close(token_importance(flat)[0], uniform_importance(T))
        assert float(importance_entropy(flat)) == pytest.approx(entropy, abs=5e-5)
        assert abs(float(importance_entropy(flat, deficit=True))) < 1e-12


def test_token_importance_by_hand():
    pattern = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    torch.testing.assert_close(token_importance(received(pattern))[0], torch.tensor([1.75, 0.75, 0.5]) / 3)


def test_importance_entropy_of_its_extremes_and_of_heads():
    first, itself = torch.zeros(4), torch.ones(4)
    first[0] = 4.0
    both = torch.stack([first, itself])[None]
    assert float(importance_entropy(first[None, None])) == 0.0
    assert float(importance_entropy(itself[None, None])) == pytest.approx(math.log(4))
    torch.testing.assert_close(
        importance_entropy(both, per_head=True)[0], torch.tensor([0.0, math.log(4)], dtype=torch.double)
    )
    mean = torch.tensor([2.5, 0.5, 0.5, 0.5]) / 4
    assert float(importance_entropy(both)) == pytest.approx(float(torch.special.entr(mean).sum()), rel=1e-6)
    shuffled = both[:, :, torch.tensor([2, 0, 3, 1])]
    torch.testing.assert_close(importance_entropy(shuffled), importance_entropy(both))


def test_row_entropy_by_hand():
    T = 64
    rows = torch.arange(1, T + 1).double().log()[None, None]
    assert float(row_entropy(rows)) == pytest.approx(3.2058, abs=5e-5)
    assert METRICS["row_entropy"].controls["uniform_causal"](T) == pytest.approx(float(row_entropy(rows)))
    assert float(row_entropy(rows, normalised=True)) == pytest.approx(1.0)
    assert float(row_entropy(torch.zeros(1, 1, 5), normalised=True)) == 0.0


def test_sinks_by_hand():
    uniform = (1 / torch.arange(1, 65).double())[None, None]
    assert float(uniform.mean()) == pytest.approx(0.0741, abs=5e-5)
    full = torch.ones_like(uniform)
    assert sink_rate(torch.cat([uniform, full, full, uniform], 1)).tolist() == [0.5]
    assert float(sink_mass(full)) == 1.0
    assert float(sink_mass(uniform)) == pytest.approx(math.fsum(1 / i for i in range(2, 65)) / 63)
    assert METRICS["sink_mass"].controls["uniform_causal"](64) == pytest.approx(float(sink_mass(uniform)))
    later = torch.cat([full, torch.zeros(1, 1, 200)], -1)
    assert float(sink_rate(later)) == 1.0, "only the first 64 positions count"
    assert METRICS["sink_rate"].min_length == 64


def test_a_head_without_numbers_is_not_a_head_without_a_sink():
    assert sink_rate(torch.full((1, 2, 64), math.nan)).isnan().all()


def test_induction_of_a_perfect_copier_and_of_uniform_attention():
    T, width = 16, 32
    q, k = torch.zeros(1, T, 1, width), torch.zeros(1, T, 1, width)
    for t in range(T):
        k[0, t, 0, t] = 1.0
        if t >= 8:
            q[0, t, 0, t - 7] = 500.0
    lse = attention_statistics(q, k, k)[1].lse
    tokens = torch.zeros(1, T, dtype=torch.long)
    assert float(induction_score(q, k, lse, tokens)) == pytest.approx(1.0, abs=1e-4)
    assert float(induction_score(q, k, lse, tokens, previous=True)) == pytest.approx(0.0, abs=1e-6)
    flat = attention_statistics(q * 0, k, k)[1].lse
    expected = METRICS["induction_score"].controls["uniform_causal"](T)
    assert float(induction_score(q * 0, k, flat, tokens)) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(sum(1 / t for t in range(9, 17)) / 8)


# ---- concentration in three parts ------------------------------------------------------------------------------------


def parts_of(*importances):
    """Parts for sequences with these importances (each sums to 1)."""
    accumulator = ConcentrationParts()
    for p in importances:
        accumulator.update((torch.tensor(p, dtype=torch.double) * len(p))[None, None])
    return accumulator.result()


def test_uniform_causal_attention_has_no_concentration():
    assert parts_of(uniform_importance(7).tolist()) == pytest.approx(
        {"": 0, "first_position": 0, "profile": 0, "content": 0}, abs=1e-12
    )


def test_concentration_parts_by_hand():
    """T = 2: u = (3/4, 1/4). Sequences (1/2, 1/2) and (1, 0): mean m = u, so only the content part is left."""
    found = parts_of([0.5, 0.5], [1.0, 0.0])
    content = (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25) + math.log(1 / 0.75)) / 2
    assert found == pytest.approx({"": content, "first_position": 0, "profile": 0, "content": content}, abs=1e-12)


def test_a_sink_is_all_first_position_and_local_attention_all_profile():
    u = uniform_importance(4)
    rest = u[1:] / u[1:].sum()
    sink = parts_of([0.9, *(0.1 * rest).tolist()])
    assert sink["first_position"] == pytest.approx(sink[""], abs=1e-12)
    assert sink["first_position"] == pytest.approx(
        0.9 * math.log(0.9 / float(u[0])) + 0.1 * math.log(0.1 / (1 - float(u[0]))), abs=1e-12
    )
    local = parts_of([float(u[0]), *((1 - u[0]) * torch.tensor([0.05, 0.05, 0.9], dtype=torch.double)).tolist()])
    assert local["profile"] == pytest.approx(local[""], abs=1e-12)
    assert local[""] > 0.05


def test_concentration_parts_add_up_and_do_not_depend_on_the_batches():
    sums = seeded(6, 3, 9, seed=4).double().exp()
    sums = sums / sums.sum(-1, keepdim=True) * 9
    whole, halves, other = ConcentrationParts(), ConcentrationParts(), ConcentrationParts()
    whole.update(sums)
    halves.update(sums[:2])
    other.update(sums[2:])
    halves.merge(other)
    found = whole.result()
    assert found[""] == pytest.approx(found["first_position"] + found["profile"] + found["content"], abs=1e-12)
    assert halves.result() == pytest.approx(found, abs=1e-12)
    p = (sums / 9).mean(1)
    assert found[""] == pytest.approx(float((p * (p / uniform_importance(9)).log()).sum(-1).mean()), abs=1e-12)


# ---- effective keys, ranks, what is received -------------------------------------------------------------------------


def test_top_importance_is_ranked_and_its_cumulative_form_adds_up():
    pattern = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.1, 0.1, 0.8]], dtype=torch.double)
    p = [1.6 / 3, 0.8 / 3, 0.6 / 3]
    assert top_importance(received(pattern))[0].tolist() == pytest.approx(p)
    assert top_importance(received(pattern), cumulative=True)[0].tolist() == pytest.approx([p[0], p[0] + p[1], 1])
    assert top_importance(torch.ones(2, 3, 50)).shape == (2, 10)


def test_received_ratio_is_one_for_uniform_attention_and_2_for_twice_as_much():
    uniform = received(uniform_pattern(5))
    assert received_ratio(uniform)[0].tolist() == pytest.approx([1] * 5)
    assert received_ratio(2 * uniform)[0].tolist() == pytest.approx([2] * 5)


def test_value_weighted_importance_ignores_positions_without_value():
    v = torch.tensor([[[[0.0, 0]], [[3.0, -1]], [[1.0, 1]]]])  # 1-norms 0, 4, 2
    sums = torch.tensor([[[2.0, 0.5, 0.5], [2.5, 0.25, 0.25]]])
    expected = [0, 0.75 * 4 / (0.75 * 6), 0.75 * 2 / (0.75 * 6)]
    assert value_weighted_importance(sums, v)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("copies", "told"), [(1, True), (2, False)])
def test_figures_say_first_that_text_without_repetition_tells_nothing_of_copying(tiny, copies, told):
    half = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))
    rows = measure(tiny(), "induction_score", half.repeat(1, copies))
    said = plots.plot(rows).layout.title.subtitle.text
    assert said.startswith("the second half of these documents does not repeat") == told
