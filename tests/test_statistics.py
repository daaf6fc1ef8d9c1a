"""Intervals, pairings, equal loss, critical points and savings against numbers worked by hand or published."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from workbench import statistics
from workbench.errors import BadData
from workbench.statistics import (
    Interval,
    at_equal_loss,
    common_loss,
    critical_point,
    cumulative_rate,
    extrapolated_critical_point,
    over_documents,
    over_seeds,
    paired_documents,
    paired_seeds,
    relative_loss,
    savings,
    savings_intervals,
    seed_band,
    step_at_loss,
)

# average validation loss by millions of parameters, Zhou et al. 2024, their first table
VANILLA = pd.Series({81.90: 2.7389, 179.87: 2.5015, 467.92: 2.2806})
RESFORMER = pd.Series({81.90: 2.7117, 179.87: 2.4692, 467.92: 2.2537})


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_interval_over_seeds_is_students_t():
    found = over_seeds([-0.03, -0.02, -0.04])
    assert found.value == pytest.approx(-0.03)
    assert found.high - found.value == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)
    assert found.sign == -1


def test_three_seeds_that_barely_agree_are_unresolved():
    assert over_seeds([-0.001, -0.02, -0.04]).sign == 0


@pytest.mark.parametrize("values", [[], [0.3], [0.3, math.nan, 0.2]])
def test_too_few_or_broken_numbers_resolve_nothing(values):
    assert over_seeds(values).sign == over_documents(values).sign == 0
    assert math.isnan(over_seeds(values).low)


def test_bootstrap_over_documents_agrees_with_the_normal_interval_where_that_holds():
    values = np.random.default_rng(0).normal(1.0, 2.0, 400)
    found, se = over_documents(values), values.std(ddof=1) / 20
    assert found.low == pytest.approx(values.mean() - 1.96 * se, abs=0.25 * se)
    assert found.high == pytest.approx(values.mean() + 1.96 * se, abs=0.25 * se)


def test_equal_documents_have_an_interval_of_no_width():
    found = over_documents([2.0, 2.0, 2.0])
    assert (found.low, found.high, found.sign) == (2.0, 2.0, 1)


def test_interval_says_what_it_is():
    assert str(Interval(-0.03, -0.04, -0.02, 3)) == "-0.03 [-0.04, -0.02]"
    assert "no interval" in str(over_seeds([0.5]))
    assert Interval(0.0, -0.1, 0.05, 9).within(0.1)
    assert not Interval(0.0, -0.1, 0.2, 9).within(0.1)


# ---- pairing ---------------------------------------------------------------------------------------------------------


def test_pairing_by_seed_removes_what_seeds_share():
    luck = pd.Series({0: 3.0, 1: 5.0, 2: 1.0})
    found = paired_seeds(luck - 0.1 + pd.Series({0: 0.01, 1: -0.01, 2: 0.0}), luck)
    assert found.sign == -1
    assert found.value == pytest.approx(-0.1)
    assert over_seeds(luck - 0.1).low < over_seeds(luck).value, "unpaired, the seeds hide it"


def test_pairing_by_seed_leaves_out_seeds_of_one_side():
    assert paired_seeds(pd.Series({0: 1.0, 7: 9.0}), pd.Series({0: 0.5, 1: 0.2})).n == 1


def documents(values, start=0):
    return pd.DataFrame({"document": range(start, start + len(values)), "value": values})


def test_pairing_by_document_finds_a_small_shift_under_large_differences():
    base = np.random.default_rng(1).normal(0, 10, 60)
    found = paired_documents(documents(base - 0.05 + np.linspace(-0.02, 0.02, 60)), documents(base))
    assert found.sign == -1
    assert found.value == pytest.approx(-0.05)
    assert found.p < 0.01


def test_permutation_test_is_exact_for_few_documents():
    change = np.array([1.0, 2.0, 3.0])
    found = paired_documents(documents(change), documents(np.zeros(3)))
    signs = np.array(list(itertools.product((-1, 1), repeat=3)))
    extreme = np.abs((signs * change).mean(1)) >= change.mean()
    assert found.p == pytest.approx(extreme.mean())


def test_documents_that_nobody_shares_are_refused():
    with pytest.raises(BadData, match="same data"):
        paired_documents(documents([1.0]), documents([1.0], start=5))


def test_band_over_seeds_averages_runs_of_one_seed_first():
    frame = pd.DataFrame({"architecture": "a", "seed": [0, 0, 1], "value": [1.0, 3.0, 5.0]})
    assert seed_band(frame, ["architecture"]).iloc[0].tolist() == ["a", 3.5, 2.0, 5.0, 2]


# ---- equal loss ------------------------------------------------------------------------------------------------------

CURVE = pd.Series({0: 4.0, 10: 3.0, 20: 3.5, 30: 2.0})


@pytest.mark.parametrize(("loss", "step"), [(4.0, 0.0), (3.5, 5.0), (3.0, 10.0), (2.75, 25.0), (1.9, math.nan)])
def test_step_at_a_loss_is_the_first_crossing(loss, step):
    assert step_at_loss(CURVE, loss) == pytest.approx(step, nan_ok=True)


def test_quantity_at_equal_loss_is_read_between_its_checkpoints():
    assert at_equal_loss(pd.Series({0: 0.0, 20: 1.0, 30: 2.0}), CURVE, 2.75) == pytest.approx(1.5)
    assert math.isnan(at_equal_loss(pd.Series({0: 0.0, 20: 1.0}), CURVE, 2.0)), "beyond the last checkpoint"


def test_matching_loss_is_the_lowest_that_all_have_reached():
    assert common_loss([CURVE, pd.Series({0: 4.0, 10: 2.5})]) == 2.5


# ---- relative loss ---------------------------------------------------------------------------------------------------


def test_relative_loss_averages_whole_windows_labelled_by_the_last_step():
    method, base = pd.Series([1.0, 2.0, 3.0, 9.0]), pd.Series([0.0, 0.0, 0.0, 0.0])
    found = relative_loss(method, base, window=3)
    assert found.to_dict() == pytest.approx({2: 2.0, 3: 14 / 3})


def test_critical_point_lasts_and_lies_after_the_minimum():
    flat = [0.1] * 5 + [-1.0] * 5 + [0.1] * 3 + [-0.1] + [0.0] * 6
    assert critical_point(pd.Series(flat), hold=4) == 14
    assert critical_point(pd.Series(flat), hold=7) is None
    assert critical_point(pd.Series([-1.0] * 50), hold=4) is None
    assert critical_point(pd.Series(dtype=float)) is None


def test_extrapolated_crossing_follows_the_last_points():
    rising = pd.Series(np.arange(10) * 0.1 - 2.0)
    assert extrapolated_critical_point(rising, tail=5) == pytest.approx(20)
    assert math.isnan(extrapolated_critical_point(-rising - 9))


def test_cumulative_rate_sums_every_step():
    assert cumulative_rate(pd.Series({0: 0.0, 4: 4.0}), 4) == pytest.approx(0 + 1 + 2 + 3)


# ---- savings ---------------------------------------------------------------------------------------------------------


def test_savings_of_the_published_table_depend_on_the_form():
    found = savings(RESFORMER, VANILLA)
    assert {k: round(100 * v, 1) for k, v in found.items() if k != "offset"} == {
        "neighbours": 11.7, "logarithm": 11.2, "power": 13.2,
    }  # fmt: skip
    assert math.isnan(found["offset"]), "three sizes do not test a curve of three parameters"


def test_curve_with_an_offset_meets_the_published_table(monkeypatch):
    monkeypatch.setattr(statistics, "LEAST_SIZES", 3)
    assert savings(RESFORMER, VANILLA)["offset"] == pytest.approx(0.130, abs=5e-4)


@pytest.mark.parametrize("form", ["power", "neighbours", "offset"])
def test_savings_recover_a_planted_one(form):
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    floor = 1.5 if form == "offset" else 0.0
    base = pd.Series(floor + 3.0 * sizes**-0.3, index=sizes)
    method = pd.Series(floor + 3.0 * (sizes / 0.85) ** -0.3, index=sizes)
    assert savings(method, base)[form] == pytest.approx(0.15, abs=1e-3)


def planted(shift, spread):
    rows = [
        {"size": size, "seed": seed, "loss": 3 * (size * shift) ** -0.2 + spread * math.sin(9 * seed + size)}
        for size in (1.0, 2.0, 4.0, 8.0)
        for seed in range(4)
    ]
    return pd.DataFrame(rows)


def test_savings_intervals_come_from_the_seeds():
    clear = savings_intervals(planted(1.2, 0.002), planted(1.0, 0.002))["power"]
    assert clear.sign == 1
    assert clear.low < 1 - 1 / 1.2 < clear.high
    assert savings_intervals(planted(1.01, 0.1), planted(1.0, 0.1))["power"].sign == 0
    single = savings_intervals(planted(1.2, 0).query("seed == 0"), planted(1.0, 0).query("seed == 0"))
    assert math.isnan(single["power"].low)


def test_one_size_saves_nothing_that_can_be_said():
    one = pd.Series({80.0: 2.7})
    assert all(math.isnan(value) for value in savings(one, one).values())
