"""The registry of claims: what each must state, what is missing is explained, which runs are compared."""

import dataclasses
import json
import math

import pytest
from planted import LAST, evidence, judged, per_layer, row, run, runs, with_losses, with_sinks

from workbench.claims import CLAIMS, Evidence
from workbench.claims.collect_evidence import BOOKKEEPING
from workbench.claims.evidence import SETTING
from workbench.claims.verdict import InsufficientEvidence, Verdict, corrected, decide, expected_by_chance, of_settings
from workbench.config import ModelConfig, TrainConfig
from workbench.models import ARCHITECTURES
from workbench.statistics.intervals import Interval, over_seeds

# ---- the registry ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unmeasured():
    """Runs of every architecture without a number."""
    everyone = [m for m in ARCHITECTURES if "+" not in m]
    return evidence([of for task in ("text", "repeated") for of in runs(*everyone, seeds=1, task=task)])


@pytest.mark.fast(15)
@pytest.mark.parametrize("name", CLAIMS)
def test_no_runs_and_runs_without_a_number_are_explained(name, unmeasured):
    tried = [(judged(name, []), "Needs")]
    tried += [(CLAIMS[name].judge(unmeasured), "")] if name in list(CLAIMS)[::3] else []
    for found, begin in tried:
        assert found.status == "not_checkable"
        assert found.sentence.startswith(begin)
        assert found.sentence.endswith(".")


def test_unequal_conditions_are_named():
    made = runs("transformer") + runs("resformer", T=256, data="other")
    found = judged("lower_loss", made)
    assert found.status == "not_checkable"
    assert "differ in data and T" in found.sentence
    for setting in ("query_group", "rope_theta", "rms_norm_eps", "init_std", "validation_sequences", "precision"):
        made = runs("transformer", **{setting: 4}) + runs("resformer", **{setting: 2})
        assert f"differ in {setting}." in judged("lower_loss", made).sentence


def test_a_broken_model_is_named_and_stops_nothing_else():
    made = runs("transformer", "resformer")
    rows = per_layer(made, "cache_bytes", lambda of, n: math.nan if of["seed"] == 1 else 4.0)
    found = judged("same_cost", made, rows)
    assert found.status == "not_checkable"
    assert "resformer-s1" in found.sentence


@pytest.mark.slow
def test_the_setting_with_most_seeds_is_compared():
    small, told = with_losses({"transformer": 3.0, "values_scaled": 3.0, "resformer": 2.9}, parameters=1e5, d_model=32)
    large, more = with_losses({"transformer": 2.0, "resformer": 2.1}, seeds=2)
    assert judged("lower_loss", small + large, (), told + more).status == "supported"


def test_records_of_other_runs_do_not_count():
    made, told = with_losses({"transformer": 2.73, "values_scaled": 2.73, "resformer": 2.70})
    whole = evidence(made, (), told)
    assert isinstance(whole, Evidence)
    assert set(whole.of_models(["resformer"]).telemetry("validation_loss")["run"]) == {
        of["run"] for of in made if of["model"] == "resformer"
    }
    assert run("resformer")["run"] == "resformer-s0"


def test_a_race_with_more_seeds_does_not_hide_what_was_measured_on_text():
    made, rows = with_sinks()
    race = runs("transformer", "resformer", seeds=5, task="repeated", data="r", parameters=9e9)
    found = judged("sinks_drains_and_peaks_vanish_together", made + race, rows)
    assert "hidden_peak" in found.sentence, "the sinks were found, and what is missing is named"


def test_a_verdict_names_the_runs_it_compared():
    made, told = with_losses({"transformer": 2.73, "resformer": 2.70, "denseformer": 2.6})
    found = judged("lower_loss", made, (), told)
    assert set(found.runs) == {of["run"] for of in made if of["model"] != "denseformer"}
    assert (
        found.setting
        == "3 seeds of 2 models, 4 layers, width 64, 400,000 parameters, 128 tokens, batch 8, 300 steps, rate 0.004, "
        "20.0 tokens per parameter"
    )
    assert judged("lower_loss", []).setting == ""


def test_among_equal_settings_the_baselines_best_rate_is_compared():
    worse, told = with_losses({"transformer": 2.9, "resformer": 2.7}, lr=1e-3)
    better, more = with_losses({"transformer": 2.6, "resformer": 2.59}, lr=2e-3)
    found = judged("lower_loss", worse + better, (), told + more)
    assert found.table.set_index("comparison").loc["all domains", "value"] == pytest.approx(-0.01)


def test_a_training_that_broke_is_named():
    made, told = with_losses({"transformer": 2.73, "values_scaled": 2.73, "resformer": 2.70})
    broken = [r | {"value": math.inf} if r["run"] == made[0]["run"] and r["step"] == LAST else r for r in told]
    found = judged("lower_loss", made, (), broken)
    assert found.status == "not_checkable"
    assert made[0]["run"] in found.sentence


def test_a_model_that_lacks_a_measure_is_named():
    made = runs("transformer", "resformer")
    vanilla = [of for of in made if of["model"] == "transformer"]
    rows = [r for s in (0, LAST) for r in per_layer(vanilla, "effective_rank", lambda of, n: 3.0, site="v", step=s)]
    rows += [r | {"variant": "trace"} for r in rows] + [r | {"site": "own_v"} for r in rows]
    found = judged("richer_values", made, rows)
    assert found.status == "not_checkable"
    assert "effective_rank is not measured for resformer" in found.sentence


def test_a_run_that_was_measured_at_an_earlier_step_is_not_compared_with_trained_ones():
    made = runs("transformer", "resformer")
    rows = [r for of in made for r in per_layer([of], "cache_bytes", lambda *_: 4.0, step=LAST if of["seed"] else 100)]
    last = evidence(made, rows).rows("cache_bytes")
    assert set(last["seed"]) == {1, 2}
    assert set(last["step"]) == {LAST}
    losses = [row(of, "loss", 3.0, step=LAST if of["model"] == "resformer" else 100) for of in made]
    assert judged("lower_loss", made, losses).sentence.startswith("The last loss is unknown for transformer-s0")


def test_measures_of_other_documents_are_not_compared():
    made = runs("transformer", "resformer")
    rows = [
        row(of, "cache_bytes", 4.0, provenance=json.dumps({"data": "64" if of["model"] == "resformer" else "32"}))
        for of in made
    ]
    pair = evidence(made, rows)
    with pytest.raises(InsufficientEvidence, match="on other documents for resformer and transformer"):
        pair.difference(pair.rows("cache_bytes"), "resformer")
    same = evidence(made, [each | {"provenance": json.dumps({"data": "64"})} for each in rows])
    assert same.difference(same.rows("cache_bytes"), "resformer").n == 3


def test_a_page_of_claims_is_corrected_over_all_that_were_tested():
    """p of 0.03 decides one claim alone, not one of three; what was not tested does not count."""
    made = [Verdict("supported", "a", p=0.03), Verdict("unresolved", "b", p=0.6), Verdict("refuted", "c", p=0.001)]
    found = corrected([*made, Verdict("not_checkable", "d")])
    assert [v.status for v in found] == ["unresolved", "unresolved", "refuted", "not_checkable"]
    assert [v.alone for v in found] == ["supported", "unresolved", "refuted", None]
    assert found[0].words == "unresolved among all claims here; by itself supported"
    said = expected_by_chance(found)
    assert said.startswith("3 claims were tested.")
    assert "up to 5 % of true null claims" in said
    assert "up to 0.15 here" in said
    assert "Without correction 2 are decided. Holm's correction over all 3 leaves 1" in said


def test_every_setting_of_a_claim_counts_and_contradictory_ones_leave_it_unresolved():
    """Three settings have a third of their claim's share: p of 0.007 becomes 0.007 x 3 x 2 claims, 0.042."""
    of = {"A": ("unresolved", 0.6), "B": ("refuted", 0.007), "C": ("supported", 0.02)}
    several = of_settings([(name, Verdict(status, name.lower(), p=p)) for name, (status, p) in of.items()])
    assert (several.status, several.sentence, several.factor) == ("unresolved", "a", 1.0)
    assert [s.status for s in several.settings] == ["unresolved", "refuted", "supported"]
    assert several.contradictory
    assert (
        "Verdicts by setting: A: unresolved; B: refuted; C: supported. They contradict each other." in several.details
    )
    found, other = corrected([several, Verdict("supported", "d", p=0.04)])
    assert [s.status for s in found.settings] == ["unresolved", "refuted", "unresolved"]
    assert (found.status, found.alone, other.status) == ("unresolved", "unresolved", "unresolved")
    assert expected_by_chance([found, other]).startswith(
        "2 claims were tested in 4 settings. Without correction up to 5 % of true null tests"
    )
    assert "Without correction 3 are decided. Holm's correction over all 4 leaves 1" in expected_by_chance(
        [found, other]
    )
    twice = of_settings([(name, Verdict("supported", name, p=0.001)) for name in "AB"])
    assert "leaves 2, of 1 claim; the" in expected_by_chance(corrected([twice]))
    assert expected_by_chance([Verdict("unresolved", "a")]).startswith("No claim is tested here")


def differing(*values):
    return over_seeds(list(values))


@pytest.mark.parametrize(
    ("parts", "status"),
    [([(-1, -1.1, -0.9)], "supported"), ([(-1, -1.1)], "unresolved"), ([(1, 1.1, 0.9)], "refuted"),
     ([(-1, -1.1, -0.9), (1, 1.2, 0.3)], "unresolved"), ([(1, 1.2, 0.5)], "refuted"), ([(1, 1.2, 0.5)] * 3, "unresolved"),
     ([(1, 1.1, 0.9)] * 3, "refuted"), ([(-1, -1.1, -0.9), (-1, -1.1)], "unresolved")],
)  # fmt: skip
def test_every_part_supports_and_the_clearest_refutes_once_paid_for(parts, status):
    """t of (1, 1.2, 0.5) is 4.3, p .048: enough for one part, not for the clearest of three. Two seeds decide nothing."""
    assert decide(dict(enumerate(differing(*p) for p in parts)), -1)[0] == status


@pytest.mark.slow
def test_all_comparable_settings_are_judged_and_contradictions_told():
    worse, told = with_losses({"transformer": 2.9, "values_scaled": 2.9, "resformer": 2.7}, lr=1e-3)
    better, more = with_losses({"transformer": 2.6, "values_scaled": 2.6, "resformer": 2.8}, lr=2e-3, seeds=4)
    found = judged("lower_loss", worse + better, (), told + more)
    assert found.status == "unresolved"
    by_setting = "rate 0.002, 20.0 tokens per parameter: refuted; rate 0.001, 20.0 tokens per parameter: supported"
    assert f"Verdicts by setting: {by_setting}. They contradict each other." in found.details


def test_the_chance_of_a_decision_by_hand():
    """p of .04 and .02, two-sided: both must have the sign, so the larger one counts; for a refutation the smaller one, twice."""
    parts = {name: Interval(0.5, 0.1, 0.9, 5, p) for name, p in (("a", 0.04), ("b", 0.02))}
    for expected, status in ((1, "supported"), (-1, "refuted")):
        assert decide(parts, expected) == (status, pytest.approx(0.04))
    assert decide({"a": parts["a"]}, -1) == ("refuted", pytest.approx(0.04))
    assert decide(parts, [1, -1]) == ("refuted", pytest.approx(0.04))
    assert decide(parts, 1, also={"c": Interval(0.5, -0.1, 1.1, 5, 0.2)}) == ("unresolved", pytest.approx(0.2))


def test_every_setting_of_a_run_must_agree_or_is_named_as_bookkeeping():
    """A new one is added to the settings that runs must share to be compared, or to those that change no loss."""
    elsewhere = {"beta1", "beta2", "eps", "clip", "bf16"}  # all in `optimiser`
    elsewhere |= {"lr_factors", "n_key_value_heads"}  # in the model's name, in `query_group`
    settings = {field.name for config in (ModelConfig, TrainConfig) for field in dataclasses.fields(config)}
    assert settings - set(SETTING) - set(BOOKKEEPING) - elsewhere == {"n_ctx"}
