"""Intervals, pairings, equal loss, critical points and savings against numbers worked by hand or published."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from workbench.errors import BadData, WorkbenchError
from workbench.runs.records import records
from workbench.statistics import parameter_and_token_savings
from workbench.statistics.censored import (
    censored,
    compare_steps,
    formed_in,
    log_rank_scores,
    median_in_words,
    median_step,
)
from workbench.statistics.copying_and_sink_steps import formation_steps
from workbench.statistics.intervals import (
    Interval,
    over_documents,
    over_seeds,
    paired_documents,
    paired_seeds,
    seed_band,
)
from workbench.statistics.loss_curves import (
    at_equal_loss,
    common_loss,
    critical_point,
    cumulative_rate,
    relative_loss,
    step_at_loss,
)
from workbench.statistics.multiple_testing import holm
from workbench.statistics.parameter_and_token_savings import _around, saved_share, savings, savings_intervals

# average validation loss by millions of parameters, Zhou et al. 2024, their first table
VANILLA = pd.Series({81.90: 2.7389, 179.87: 2.5015, 467.92: 2.2806})
RESFORMER = pd.Series({81.90: 2.7117, 179.87: 2.4692, 467.92: 2.2537})


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_interval_over_seeds_is_students_t():
    found = over_seeds([-0.03, -0.02, -0.04])
    assert found.value == pytest.approx(-0.03)
    assert found.high - found.value == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)
    assert found.sign == -1
    assert found.p == pytest.approx(stats.ttest_1samp([-0.03, -0.02, -0.04], 0).pvalue)


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


def test_two_documents_have_students_interval_and_one_has_none():
    found = over_documents([1.0, 3.0])  # a bootstrapped interval, 1 to 3, would cover one mean in two
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 1, loc=2, scale=1))
    assert math.isnan(over_documents([1.0]).low)


def test_equal_documents_have_an_interval_of_no_width():
    found = over_documents([2.0, 2.0, 2.0])
    assert (found.low, found.high, found.sign) == (2.0, 2.0, 1)


def test_interval_says_what_it_is():
    assert str(Interval(-0.03, -0.04, -0.02, 3)) == "-0.03 [-0.04, -0.02]"
    assert "no interval" in str(over_seeds([0.5]))


# ---- pairing ---------------------------------------------------------------------------------------------------------


def test_pairing_by_seed_removes_what_seeds_share():
    luck = pd.Series({0: 3.0, 1: 5.0, 2: 1.0})
    found = paired_seeds(luck - 0.1 + pd.Series({0: 0.01, 1: -0.01, 2: 0.0}), luck)
    assert found.sign == -1
    assert found.value == pytest.approx(-0.1)
    assert over_seeds(luck - 0.1).low < over_seeds(luck).value, "unpaired, the seeds hide it"


def test_pairing_by_seed_leaves_out_seeds_of_one_side():
    assert paired_seeds(pd.Series({0: 1.0, 7: 9.0}), pd.Series({0: 0.5, 1: 0.2})).n == 1


def test_rounding_is_no_spread_over_seeds():
    base = pd.Series({0: 0.1, 1: 0.2, 2: 0.7})
    assert len(set(base + 0.1 - base)) > 1, "differences of 0.1 that differ in their last digits"
    shifted = paired_seeds(base + 0.1, base)
    assert (shifted.low, shifted.high) == (shifted.value, shifted.value) == pytest.approx((0.1, 0.1))
    equal = paired_seeds(pd.Series([0.1 + 0.2, 0.3, 0.3]), pd.Series([0.3, 0.3, 0.3]))
    assert (equal.value, equal.p) == (0, 1)


def test_a_seed_without_a_value_leaves_equal_differences_without_an_interval():
    found = paired_seeds(pd.Series([1.0, 2.0, math.nan]), pd.Series([2.0, 3.0, 4.0]))
    assert math.isnan(found.value)
    assert math.isnan(found.p)


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


@pytest.mark.parametrize("change", [[2.0], [0.0, 0.0, 0.0], [1.0, math.nan, 2.0]], ids=["one", "nothing", "broken"])
def test_documents_that_cannot_tell_have_no_p(change):
    assert math.isnan(paired_documents(documents(np.array(change)), documents(np.zeros(len(change)))).p)


def test_documents_read_by_one_side_alone_are_refused():
    with pytest.raises(BadData, match="same data"):
        paired_documents(documents([1.0]), documents([1.0], start=5))


def test_band_over_seeds_averages_runs_of_one_seed_first():
    frame = pd.DataFrame({"architecture": "a", "seed": [0, 0, 1], "value": [1.0, 3.0, 5.0]})
    assert seed_band(frame, ["architecture"]).iloc[0].tolist() == ["a", 3.5, 2.0, 5.0, 2]
    missing = pd.concat([frame, frame.head(1).assign(seed=9, value=np.nan)])
    assert seed_band(missing, ["architecture"]).iloc[0].tolist() == ["a", 3.5, 2.0, 5.0, 2], "a seed without a value"
    nowhere = seed_band(frame.assign(layer=np.nan), ["layer"])  # a group that an axis says nothing of is one
    assert nowhere[["mean", "size"]].to_numpy().tolist() == [[3.5, 2]]


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


def test_the_cumulative_rate_sums_every_step_between_those_written_down():
    rates = pd.Series([1.0, 3.0, 3.0], index=[0, 4, 8])
    assert cumulative_rate(rates, 6) == 1 + 1.5 + 2 + 2.5 + 3 + 3 + 3
    assert cumulative_rate(rates, 0) == 1
    assert np.isnan([cumulative_rate(rates, np.nan), cumulative_rate(rates[:0], 3), cumulative_rate(rates, -1)]).all()


# ---- savings ---------------------------------------------------------------------------------------------------------


def test_savings_of_the_published_table_depend_on_the_form():
    found = savings(RESFORMER, VANILLA)
    assert {k: round(100 * v, 1) for k, v in found.items() if k != "power law above a floor"} == {
        "between two sizes": 11.7, "linear in ln N": 11.2, "power law": 11.1,
    }  # fmt: skip
    assert math.isnan(found["power law above a floor"]), "three sizes do not test a curve of three parameters"


def test_curve_with_an_offset_meets_the_published_table(monkeypatch):
    monkeypatch.setattr(parameter_and_token_savings, "MIN_SIZES", 3)
    assert savings(RESFORMER, VANILLA)["power law above a floor"] == pytest.approx(0.130, abs=5e-4)


@pytest.mark.parametrize("form", ["power law", "between two sizes", "power law above a floor"])
def test_savings_recover_a_planted_one_from_four_sizes(form):
    sizes = np.array([1.0, 2.0, 4.0, 16.0])
    floor = 1.5 if form == "power law above a floor" else 0.0
    base = pd.Series(floor + 3.0 * sizes**-0.3, index=sizes)
    method = pd.Series(floor + 3.0 * (sizes / 0.85) ** -0.3, index=sizes)
    assert savings(method, base)[form] == pytest.approx(0.15, abs=1e-3)


@pytest.mark.parametrize("floor", [-2.0, 0.0, 2.0])
def test_equal_curves_save_nothing_whatever_their_shape(floor):
    """Three of the forms do not fit these losses; they err alike for both curves."""
    curve = pd.Series(floor + 3.0 * np.array([1.0, 2.0, 4.0, 16.0]) ** -0.1 + 2.5, index=[1.0, 2.0, 4.0, 16.0])
    assert savings(curve, curve) == pytest.approx(dict.fromkeys(parameter_and_token_savings.FORMS, 0.0), abs=1e-9)


def planted(shift, spread):
    rows = [
        {
            "size": size,
            "seed": seed,
            "loss": 3 * (size * shift) ** -0.2 + spread * math.sin(9 * seed + 99 * size * shift),
        }
        for size in (1.0, 2.0, 4.0, 8.0)
        for seed in range(4)
    ]
    return pd.DataFrame(rows)


def test_savings_intervals_are_students_t_over_seeds():
    clear = savings_intervals(planted(1.2, 0.002), planted(1.0, 0.002))["power law"]
    assert (clear.sign, clear.n) == (1, 4)
    assert clear.low < 1 - 1 / 1.2 < clear.high
    assert savings_intervals(planted(1.01, 0.1), planted(1.0, 0.1))["power law"].sign == 0
    single = savings_intervals(planted(1.2, 0).query("seed == 0"), planted(1.0, 0))
    assert math.isnan(single["power law"].low)
    assert single["power law"].n == 1, "the seeds that both have"


def test_shares_saved_are_symmetric_in_their_logarithms():
    """Twice and half as many steps: in the mean nothing is saved, and the interval's ends are each other's reciprocal ratios."""
    found = saved_share([2.0, 0.5])
    assert found.value == pytest.approx(0, abs=1e-12)
    assert (1 - found.low) * (1 - found.high) == pytest.approx(1)
    assert saved_share([0.5, 0.5, 0.5]).value == pytest.approx(0.5)
    assert math.isnan(saved_share([0.5, math.nan, 0.4]).p)


@pytest.mark.parametrize(
    ("p", "expected"), [([], []), ([0.03], [0.03]), ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([0.9, 0.001, 0.8], [1.0, 0.003, 1.0])]
)  # fmt: skip
def test_holm_by_hand(p, expected):
    assert holm(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "pair"), [(4.5, [0, 1]), (4.0, [0, 1]), (3.5, [0, 1]), (3.0, [0, 1]), (2.5, [1, 2]), (0.5, [2, 3])]
)
def test_a_target_is_read_between_the_sizes_around_it(target, pair):
    """Losses 4, 3, 2, 1; what lies beyond the ends is read off the two sizes nearest to it."""
    assert np.arange(4)[_around(np.array([4.0, 3.0, 2.0, 1.0]), target)].tolist() == pair


def test_two_sizes_are_enough_for_a_line():
    base, method = (pd.Series({s: 3.0 * (s / k) ** -0.3 for s in (1.0, 4.0)}) for k in (1.0, 0.85))
    found = savings(method, base)
    assert (found["between two sizes"], found["power law"]) == pytest.approx((0.15, 0.15))
    assert math.isnan(found["power law above a floor"])


def test_one_size_saves_nothing_that_can_be_said():
    one = pd.Series({80.0: 2.7})
    assert all(math.isnan(value) for value in savings(one, one).values())


# ---- learning to copy ------------------------------------------------------------------------------------------------


def copy_losses(curves):
    """Telemetry of {(architecture, seed): [copy loss at step 0, 1, ...]}."""
    return records(
        {"run": f"{a}-{s}", "architecture": a, "seed": s, "step": i, "metric": "copy_loss", "value": v}
        for (a, s), curve in curves.items() for i, v in enumerate(curve)
    )  # fmt: skip


def test_formation_is_the_first_step_below_half_of_the_start():
    steps = formation_steps(
        copy_losses({("transformer", 0): [4.0, 3.9, 3.8, 2.0], ("svformer", 0): [4.0, 2.0, 1.99, 3.0]})
    )
    assert list(steps["architecture"]) == ["svformer", "transformer"], "the earliest first"
    assert list(steps["formed"]) == ["step 2", "not formed"]
    assert steps["formation_step"].isna().tolist() == [False, True]
    assert steps["last_step"].tolist() == [3, 3]
    unknown = formation_steps(copy_losses({("transformer", 0): [4.0, 1.0]}).assign(seed=None))
    assert list(unknown["formed"]) == ["step 1"], "a run whose seed nothing says"
    gaps = formation_steps(copy_losses({("transformer", 0): [math.nan, 4.0, 1.0, math.nan]}))
    assert list(gaps["formed"]) == ["step 2"], "a batch without copied tokens has no copy loss"


def test_formation_without_a_copy_loss_is_refused():
    with pytest.raises(WorkbenchError, match="copy_loss"):
        formation_steps(records([]))


def test_steps_that_a_run_never_reaches_are_compared_by_their_order():
    """With all reached it is the paired t test; where one arm never gets there its p is the permutation's, without an interval."""
    table = lambda at, last=100.0: pd.DataFrame({"at": np.minimum(at, last), "formed": np.array(at) < last})  # noqa: E731
    fast, slow, never = table([10, 12, 14, 11, 13]), table([20, 23, 24, 22, 21]), table([np.inf] * 5)
    reached = compare_steps(slow, fast)
    assert reached == paired_seeds(slow["at"], fast["at"])
    later = compare_steps(never, fast)
    assert later.value == pytest.approx(88.0)
    assert (math.isnan(later.low), later.n) == (True, 5)
    assert later.p == pytest.approx(2 / math.comb(10, 5)), "5 of 5 before 0 of 5: one order of 252 either way"
    assert compare_steps(never, never).p == 1.0
    ten, none = table(np.arange(10.0)), table([np.inf] * 10)
    assert compare_steps(none, ten).p == pytest.approx(2 / math.comb(20, 10)), "all 184,756 relabellings are counted"
    assert compare_steps(table([np.inf] * 11), table(np.arange(11.0))).p == 2 / 10_000, "of more, 9,999 random ones"
    assert compare_steps(table([10, 12, 14, 11, np.inf]), fast).p > 0.05, "one run of five decides nothing"


def test_a_step_that_most_runs_never_reach_has_no_median():
    steps = censored(pd.Series([10, 30, np.nan, 20, np.nan], range(5)), pd.Series(100, range(5)))
    assert (median_step(steps), formed_in(steps), median_in_words(steps)) == (30, "3 of 5", "30")
    assert steps["at"].tolist() == [10, 30, 100, 20, 100]
    few = steps[steps.index > 1]
    assert (median_step(few), median_in_words(few)) == (math.inf, "no median by step 100"), "one of three reached it"
    assert median_in_words(steps[~steps["formed"]]) == "none by step 100"


def test_log_rank_scores_are_those_of_the_textbook():
    """Two groups of three, one censored: observed minus expected events by hand."""
    at, formed = [1.0, 2.0, 4.0, 3.0, 4.0, 5.0], [True, True, True, True, False, True]
    scores = log_rank_scores(pd.DataFrame({"at": at, "formed": formed}))
    hazards = {1: 1 / 6, 2: 1 / 5, 3: 1 / 4, 4: 1 / 3, 5: 1 / 1}
    expected = [sum(h for t, h in hazards.items() if t <= x) for x in at]
    assert scores == pytest.approx([e - x for e, x in zip(formed, expected, strict=True)])
    assert scores.sum() == pytest.approx(0.0)
