"""What a claim on the final loss needs before it is decided: budget, a flat end, warm-up, controls, tuning, whole studies."""

import itertools
import math
import zlib
from types import SimpleNamespace

import pytest
from planted import LAST, evidence, from_losses, judged, losses, options, per_layer, row, run, runs, with_losses

from workbench.claims import CLAIMS
from workbench.claims.collect_evidence import run_facts
from workbench.studies.study_file import find_study, read_study
from workbench.studies.study_runs import StudyRun, sizes

CLEAR = "the comparisons have the claimed sign"
LEVELS = {"transformer": 2.73, "values_scaled": 2.73, "resformer": 2.70}


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({"tokens": 3.6e5}, "gated", f"not tested: {CLEAR} after 0.9 training tokens per parameter, but 10 are needed"),
        ({"warmup": 30}, "gated", f"not tested: {CLEAR} after 20.0 training tokens per parameter, but there are 30 warm-up steps, "
         "100 are needed"),
        ({"tokens": 4.8e6}, "supported", "supported at this one learning rate at 12.0 tokens per parameter"),
        ({}, "supported", "supported at this one learning rate"),
    ],
)  # fmt: skip
def test_losses_are_tested_from_ten_tokens_per_parameter_and_a_long_warm_up_on(facts, status, words):
    found = from_losses("lower_loss", LEVELS, **facts)
    assert (found.status, found.words) == (status, words)
    assert "-0.03 [" in found.sentence, "the numbers stay"
    assert math.isnan(found.p) == (status == "gated"), "what was not tested is not paid for"
    assert f"{facts.get('tokens', 8e6) / 4e5:.1f} tokens per parameter" in found.setting


def test_a_short_budget_says_what_the_needed_one_costs():
    """400,000 parameters need 4 million tokens for each of 6 runs: at 1,000 tokens a second 24,000 s."""
    made, told = with_losses(LEVELS, seeds=3, tokens=3.6e5)
    pace = [r | {"metric": "tokens_per_second", "value": 1e3, "unit": "tokens/s"} for r in told if r["step"] == 200]
    words = judged("lower_loss", made, (), [*told, *pace]).words
    assert words.endswith("10 are needed: 6 runs of 4 million tokens, about 6.7 hours of one core")
    made, told = with_losses(LEVELS, seeds=3, tokens=3.6e5, device="cuda")
    pace = [r | {"metric": "tokens_per_second", "value": 1e3, "unit": "tokens/s"} for r in told if r["step"] == 200]
    assert judged("lower_loss", made, (), [*told, *pace]).words.endswith("10 are needed"), (
        "the pace of a GPU is no core's"
    )


def test_a_loss_that_still_falls_is_not_tested():
    made, told = with_losses(LEVELS)
    steep = [r | {"value": r["value"] + 0.3 * (r["step"] == 200)} for r in told]
    found = judged("lower_loss", made, (), steep)
    assert found.status == "gated"
    assert (
        "per parameter, but training has not converged (over the last tenth of the steps the loss still falls by 0.108 nats, the median"
        in found.words
    )
    assert found.sentence.startswith("These numbers are preliminary. ")


@pytest.mark.parametrize(
    ("scaled", "status"), [(2.73, "supported"), (2.70, "unresolved"), (2.68, "unresolved"), (None, "unresolved")]
)
def test_a_gain_that_halved_values_explain_is_not_supported(scaled, status):
    levels = {name: level for name, level in (LEVELS | {"values_scaled": scaled}).items() if level is not None}
    found = from_losses("lower_loss", levels)
    assert found.status == status
    assert ("halved values, was not trained" in found.sentence) == (scaled is None)


def test_rates_chosen_on_one_seed_are_reported_on_the_others():
    """Seed 4 tries three rates; the others have each model's best one, and the choosing seed, far lower, is not counted."""
    made, told = [], []
    for model, level in LEVELS.items():
        of = [run(model, 4, lr=rate) for rate in (1e-3, 2e-3, 4e-3)] + [run(model, seed, lr=2e-3) for seed in range(3)]
        told += losses(
            of, lambda o, at=level: at + 0.1 * (o["lr"] != 2e-3) - (o["model"] == "resformer") * (o["seed"] == 4)
        )
        made += of
    found = judged("lower_loss", made, (), told)
    assert found.table.set_index("comparison").loc["all domains", "value"] == pytest.approx(-0.03)
    assert found.table["n"].iloc[0] == 3
    assert "each at its best of 3 learning rates, chosen on seed 4, which is not reported" in found.sentence


def test_a_best_rate_at_the_end_of_the_grid_leaves_the_claim_open():
    made, told = [], []
    for rate, worse in ((1e-3, 0.2), (2e-3, 0.1), (4e-3, 0.0)):
        more = with_losses({name: level + worse for name, level in LEVELS.items()}, lr=rate)
        made, told = made + more[0], told + more[1]
    found = judged("lower_loss", made, (), told)
    assert found.status == "unresolved"
    assert "is the smallest or the largest tried" in found.sentence


WEIGHT = "resformer[lambda_own=1.0,lambda_v1={}]"
AT_BEST = {  # models by claim, with their options
    "value_path_is_the_place": ("transformer", "resformer", "values_scaled", "residual_q", "residual_hidden"),
    "first_layer_is_the_source": (
        ("resformer", {"source_layer": 0, "layers": [1, 2, 3]}),
        ("resformer[layers=[2, 3]]", {"source_layer": 0, "layers": [2, 3]}),
        ("resformer[source_layer=1]", {"source_layer": 1, "layers": [2, 3]}),
    ),
    "late_layers_profit": (
        ("resformer_sparse", {"layers": [2, 3]}), ("resformer_sparse[layers=[0, 1]]", {"layers": [0, 1]})
    ),
    "robust_to_its_weight": (
        "transformer", *((WEIGHT.format(w), {"lambda_own": 1.0, "lambda_v1": w}) for w in (0.2, 1.0, 2.0, 5.0))
    ),
    "exclusive_heads_lower_the_loss": ("transformer", "exclusive_attention"),
    "half_the_cache_for_a_small_penalty": ("transformer", "svformer", "gqa", "cla"),
    "sharing_values_hurts_least": ("share_v", "share_k", "share_q"),
    "half_of_the_heads_can_share_the_first_values": ("skip_v1", "transformer"),
    "reuse_by_token_beats_constant_reuse": ("satformer", "resformer"),
    "deep_values_can_be_looked_up": ("bank_of_values", "transformer"),
    "denseformer_weights_have_structure": ("transformer", "denseformer"),
    "attention_residuals_lower_the_loss": ("attention_residuals", "transformer"),
    "averages_by_content_beat_fixed_ones": ("attention_residuals", "denseformer"),
    "ahead_of_relatives": ("resformer", "neutreno", "denseformer"),
    "lower_loss": ("transformer", "values_scaled", "resformer"),
}  # fmt: skip


@pytest.mark.parametrize("claim", AT_BEST)
def test_models_are_compared_at_their_best_rates(claim):
    """Seed 4 tries four rates, and three seeds have two of them. Between models of one rate the difference would be 0.1 larger."""
    made, told = [], []
    for i, named in enumerate(AT_BEST[claim]):
        name, chosen = (named, {}) if isinstance(named, str) else named
        best = 4e-3 if i else 2e-3
        facts = [(4, lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)] + [(seed, lr) for lr in (2e-3, 4e-3) for seed in range(3)]
        of_model = [run(name, seed, lr=lr, options=options(**chosen)) for seed, lr in facts]
        told += losses(of_model, lambda of, at=2.7 + 0.01 * i, best=best: at + 0.1 * (of["lr"] != best), ("a",))
        made += of_model
    rows = [row(of, "cache_bytes", 1000.0 * (0.625 if of["model"] == "svformer" else 1), step=LAST) for of in made]
    alpha = [(f"alpha_{j}", n) for n in range(4) for j in range(n + 2)]
    dense = [of for of in made if of["model"] == "denseformer"]
    told += [row(of, "coefficient", 0.1, layer=n, part=part) for of in dense for part, n in alpha]
    found = judged(claim, made, rows, told)
    assert "each at its best of 4 learning rates, chosen on seed 4, which is not reported" in found.sentence
    in_nats = found.table[found.table["unit"] == "nats"]
    assert in_nats["value"].abs().max() <= 0.041
    assert set(in_nats["n"]) == {3}


def test_every_claim_on_the_final_loss_is_among_them():
    others = {
        "fewer_parameters", "fewer_tokens", "not_merely_easier_optimisation",  # have tests of their own
        "better_than_grouped_heads_at_length",  # 16,384 tokens
    }  # fmt: skip
    assert {name for name, claim in CLAIMS.items() if claim.final_loss} == {*AT_BEST, *others}


def test_a_rival_at_one_rate_does_not_leave_the_others_untuned():
    made, told = [], []
    for name, best in (("transformer", 2e-3), ("resformer", 4e-3), ("values_scaled", 4e-3), ("residual_q", 4e-3)):
        tried = [run(name, 4, lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)] + [run(name, s, lr=best) for s in range(3)]
        told += losses(tried, lambda of, best=best: 2.7 + 0.1 * (of["lr"] != best), ("a",))
        made += tried
    untuned = runs("residual_hidden", lr=2e-3)
    found = judged("value_path_is_the_place", [*made, *untuned], (), [*told, *losses(untuned, lambda of: 2.5, ("a",))])
    assert "not trained: key residual, attention-pattern residual, hidden residual" in found.sentence
    assert "left out, for too few rates or seeds: hidden residual" in found.sentence
    assert found.table["value"].abs().max() < 0.01


def test_a_comparison_that_cannot_be_made_is_named_with_its_reason():
    """GQA has the seed that chose its rate alone; residuals in the early layers diverged."""
    made, told = [], []
    for name in ("transformer", "svformer", "gqa"):
        tried = [run(name, 4, lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
        tried += [run(name, s, lr=2e-3) for s in range(3)] if name != "gqa" else []
        told += losses(tried, lambda of: 2.7 + 0.1 * (of["lr"] != 2e-3), ("a",))
        made += tried
    caches = [row(of, "cache_bytes", 625.0 if of["model"] == "svformer" else 1000.0, step=LAST) for of in made]
    found = judged("half_the_cache_for_a_small_penalty", made, caches, told).sentence
    assert (
        "not compared with GQA or CLA of the same cache. The best learning rate of each model was chosen on seed"
        in found
    )
    assert "Train GQA2 at 0.002 on 3 other seeds." in found

    places = {"resformer": [0, 1, 2, 3], "resformer[layers=[2, 3]]": [2, 3], "resformer[layers=[0, 1]]": [0, 1]}
    made = [of for name, layers in places.items() for of in runs(name, options=options(layers=layers))]
    told = losses(made, lambda of: float("nan") if of["model"].endswith("=[0, 1]]") else 2.7, ("a",))
    found = judged("late_layers_profit", made, (), told).sentence
    assert "Left out: late - early layers' loss. " in found
    assert "late - all layers' loss +0" in found


def _tuned(best, edge=4e-3):
    """A sweep of seed 4 over 300 steps, and five times as long trainings of three seeds at each model's best rate."""
    made, told = [], []
    for model, level in LEVELS.items():
        sweep = [run(model, 4, lr=rate) for rate in (1e-3, 2e-3, edge, 8e-3)]
        long = [run(model, seed, lr=best[model], steps=1500, tokens=4e7) for seed in range(3)]
        told += losses(sweep, lambda of, at=level, m=model: at + 0.5 + 0.1 * (of["lr"] != best[m]), ("a",))
        told += losses(long, lambda of, at=level: at, ("a",))
        made += [*sweep, *long]
    return made, told


@pytest.mark.slow
def test_longer_trainings_are_compared_at_the_rates_that_a_sweep_of_other_seeds_chose():
    found = judged(
        "lower_loss",
        *((made := _tuned({"transformer": 2e-3, "values_scaled": 2e-3, "resformer": 4e-3}))[0], (), made[1]),
    )
    assert (found.status, found.words) == ("supported", "supported")
    assert found.table["n"].iloc[0] == 3
    assert "each at its best of 4 learning rates, chosen on seed 4, which is not reported" in found.sentence
    assert "mean difference during training" in found.sentence
    assert "100.0 tokens per parameter" in found.setting
    edge = _tuned({"transformer": 2e-3, "values_scaled": 2e-3, "resformer": 8e-3})
    assert judged("lower_loss", edge[0], (), edge[1]).status == "unresolved", "8e-3 is the largest rate of the sweep"
    told, made = made[1], made[0]
    other = [of | {"lr": 1e-3} if of["model"] == "resformer" and of["steps"] == 1500 else of for of in made]
    found = judged("lower_loss", other, (), told)
    assert found.status == "not_checkable", "a rate that no sweep chose"
    assert (
        "chosen on seed 4, which a comparison may not count. Train Transformer at 0.002, ResFormer at 0.004 and"
        in found.sentence
    )


def test_a_seed_that_chose_the_rate_is_not_counted_where_all_models_end_at_one_rate():
    """Seed 4 is lowest at the rate that it chose, by its own luck; with two other seeds alone it stays, and the setting says so."""
    for others, counted in (((0, 1, 2), [0, 1, 2]), ((0, 1), [0, 1, 4])):
        made = [run(m, 4, lr=rate) for m in ("transformer", "svformer") for rate in (1e-3, 2e-3, 4e-3)]
        made += [run(m, seed, lr=2e-3) for m in ("transformer", "svformer") for seed in others]
        found = evidence(made).comparable("transformer", "svformer").runs
        assert sorted(found["seed"].unique()) == counted
        assert set(found["lr"]) == {2e-3}


@pytest.mark.parametrize(("at_one_rate", "status"), [(0.9, "supported"), (0.1, "unresolved")])
def test_measures_are_compared_at_the_rates_that_another_seed_chose(at_one_rate, status):
    """Seed 4 tries four rates of each model; three seeds have the best one, and of the Transformer also NeuTRENO's."""
    best, made, told = {"transformer": 2e-3, "neutreno": 4e-3}, [], []
    for name, lr in best.items():
        tried = [run(name, 4, lr=rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3)] + [run(name, s, lr=lr) for s in range(3)]
        tried += [run(name, s, lr=4e-3) for s in range(3) if name == "transformer"]
        told += losses(tried, lambda of, lr=lr: 2.7 + 0.1 * (of["lr"] != lr), ("a",))
        made += tried
    alike = lambda of, n: at_one_rate if of["lr"] != best[of["model"]] else 0.5 - 0.2 * (of["model"] == "neutreno")  # noqa: E731
    rows = [
        r for step in (0, 100, 200, 300) for r in per_layer(made, "token_similarity", alike, site="stream", step=step)
    ]
    found = judged("neutreno_smooths_less", made, rows, told)
    assert "rate 0.002 to 0.004" in found.setting
    assert found.setting.endswith("each model at its best of 4 rates (chosen on seed 4)")
    trained = found.table.set_index("comparison").loc["trained"]
    assert (trained["value"], trained["n"]) == (pytest.approx(-0.2), 3)
    assert found.status == status
    assert found.words == (
        status if status == "supported" else "unresolved because the sign is opposite at one rate of 0.004"
    )
    turned = "Trained: -0.2 at unequal rates, +0.2 cosine at one rate of 0.004. So the rates may explain it."
    assert (turned in found.sentence) == (status == "unresolved")


def test_models_that_tried_other_rates_have_no_best_rates_in_common():
    tried = {"transformer": (1e-3, 2e-3, 4e-3), "neutreno": (5e-3, 6e-3, 7e-3)}
    made = [run(name, seed, lr=lr) for name, rates in tried.items() for seed, lr in itertools.product(range(2), rates)]
    made += [run(name, 4, lr=2e-3) for name in tried]
    found = evidence(made, (), losses(made, lambda of: 2.7, ("a",))).comparable("transformer", "neutreno").runs
    assert (set(found["lr"]), set(found["seed"])) == ({2e-3}, {0, 1, 4})


def test_a_verdict_without_comparisons_is_not_checked_at_equal_rates():
    """ResFormer's cache is larger, at best rates that seed 4 chose and at one rate; step times are of a busy machine."""
    made, told = [], []
    for name, best in (("transformer", 2e-3), ("resformer", 4e-3)):
        tried = [run(name, 4, lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
        tried += [run(name, seed, lr=lr) for lr in sorted({best, 4e-3}) for seed in range(3)]
        told += losses(tried, lambda of, best=best: 2.7 + 0.1 * (of["lr"] != best), ("a",))
        made += tried
    told += [row(of, "tokens_per_second", 1000.0 * (1 + 4 * (of["seed"] == 0)), step=LAST) for of in made]
    caches = [row(of, "cache_bytes", 1500.0 if of["model"] == "resformer" else 1000.0, step=LAST) for of in made]
    assert judged("same_cost", made, caches, told).status == "refuted"


def test_a_control_with_another_best_rate_is_compared_where_the_two_models_share_theirs():
    """And where a shorter sweep chose other rates, which fit some of the models only, the sweep that fits all counts."""
    made, told = _tuned({"transformer": 2e-3, "values_scaled": 4e-3, "resformer": 2e-3})
    shorter = [of | {"run": f"{of['run']}-short", "seed": 3, "steps": 100} for of in made if of["seed"] == 4]
    best = {"transformer": 2e-3, "values_scaled": 2e-3, "resformer": 4e-3}
    told = [*told, *losses(shorter, lambda of: 4.0 + 0.1 * (of["lr"] != best[of["model"]]), ("a",))]
    found = judged("lower_loss", [*made, *shorter], (), told)
    assert "each at its best of 4 learning rates, chosen on seed 4, which is not reported" in found.sentence
    assert "minus halved values" in " ".join(found.table["comparison"])
    assert found.setting.startswith("3 seeds of 3 models")
    assert "comparable settings" not in found.sentence
    assert (found.table.loc[found.table["comparison"] == "all domains", "n"] == 3).all()
    rates_alone = [of for of in made if of["model"] != "values_scaled" or of["seed"] == 4]
    left = judged("lower_loss", rates_alone, (), told)
    assert "the control, halved values, was not trained" in left.sentence, "of seeds that are reported"
    assert left.table.set_index("comparison").loc["all domains", "value"] == found.table["value"].iloc[0]


@pytest.mark.slow
def test_of_untested_settings_the_longest_training_is_shown_and_not_the_most_seeds():
    short, told = with_losses(LEVELS, seeds=5, tokens=4e5)
    long, more = with_losses({name: level - 1 for name, level in LEVELS.items()}, seeds=2, tokens=2e6, steps=600)
    found = judged("lower_loss", [*short, *long], (), [*told, *more])
    assert (
        found.words
        == "not tested: the comparisons are not all clear after 5.0 training tokens per parameter, but 10 are needed"
    )
    assert found.setting.startswith("2 seeds")


WEAK, STRONG = {"seeds": 5, "tokens": 8e6}, {"tokens": 4e7, "steps": 1500}
EQUAL = {"transformer": 2.73, "values_scaled": 2.73, "resformer": [2.70, 2.76, 2.73]}


@pytest.mark.slow
@pytest.mark.parametrize("decided", ["weak", "strong"])
def test_of_tested_settings_the_longest_training_leads_whatever_its_outcome(decided):
    """Five seeds at 20 tokens per parameter, three at 100: the weaker setting leads in neither case, and both are shown."""
    weak = with_losses(
        LEVELS if decided == "weak" else dict.fromkeys(LEVELS, 2.73) | {"resformer": [2.7, 2.76, 2.73, 2.74, 2.72]},
        **WEAK,
    )
    strong = with_losses(EQUAL if decided == "weak" else LEVELS, **STRONG)
    found = judged("lower_loss", [*weak[0], *strong[0]], (), [*weak[1], *strong[1]])
    assert found.setting.startswith("3 seeds of 3 models")
    assert [s.name for s in found.settings] == [
        "1500 steps, 100.0 tokens per parameter",
        "300 steps, 20.0 tokens per parameter",
    ]
    statuses = ["supported", "unresolved"]
    assert [s.status for s in found.settings] == (statuses if decided == "strong" else statuses[::-1])
    assert found.status == found.settings[0].status
    assert found.factor == pytest.approx(2.0 if decided == "strong" else 1.0)
    assert (
        "the first of 2 that were tested. Verdicts by setting: 1500 steps, 100.0 tokens per parameter: "
        in found.details
    )
    assert found.table["n"].iloc[0] == 3


@pytest.mark.slow
def test_a_setting_without_the_control_never_leads_one_with_it_and_an_untested_one_is_counted():
    weak, strong = (
        with_losses(EQUAL | {"resformer": [2.7, 2.76, 2.73, 2.74, 2.72]}, **WEAK),
        with_losses(LEVELS, **STRONG),
    )
    bare = [of for of in strong[0] if of["model"] != "values_scaled"]
    short = with_losses(LEVELS, tokens=4e5, steps=30)
    found = judged("lower_loss", [*weak[0], *bare, *short[0]], (), [*weak[1], *strong[1], *short[1]])
    assert [s.name.partition(",")[0] for s in found.settings] == ["300 steps", "1500 steps"]
    assert found.untested == 1
    assert found.details.endswith("1 more setting was not tested.")
    early = "Other settings that were not tested: -0.03 nats at 1 tokens per parameter. Below 10, differences are of early training."
    assert early in found.sentence


def test_more_parameters_leave_a_lower_loss_open():
    made, told = with_losses({"transformer": 2.73, "bank_of_values": 2.70})
    larger = [of | {"parameters": of["parameters"] * (1 + 0.18 * (of["model"] == "bank_of_values"))} for of in made]
    assert judged("deep_values_can_be_looked_up", made, (), told).status == "supported"
    found = judged("deep_values_can_be_looked_up", [of | {"tokens": 1e7} for of in larger], (), told)
    assert found.status == "unresolved"
    assert "Bank of Values has 18% more parameters than Transformer" in found.sentence


def test_a_cache_that_costs_less_than_nothing_is_no_small_penalty():
    cache = lambda of, n: 1024 * (0.625 if of["model"] == "svformer" else 1)  # noqa: E731
    for penalty, status in ((0.02, "supported"), (-0.05, "unresolved")):
        made, told = with_losses({"transformer": 2.70, "svformer": 2.70 + penalty, "gqa": 2.80})
        rows = per_layer(made, "cache_bytes", cache, (0,))
        rows = [r | {"value": round(r["value"])} for r in rows]
        assert judged("half_the_cache_for_a_small_penalty", made, rows, told).status == status


def test_a_study_measured_in_part_is_in_no_verdict():
    """Three of its four runs have the metric; runs of a study that has it throughout, and of one's own, are compared."""
    whole, part = (
        [of | {"run": f"{s}-{of['run']}", "study": s} for of in runs("transformer", "neutreno", seeds=2)]
        for s in ("a", "b")
    )
    part = [of | {"seed": of["seed"] + 2} for of in part]
    own = [run("transformer", 4), run("neutreno", 4)]
    made = [*whole, *part, *own]
    rows = per_layer([*whole, *part[:3], *own], "token_similarity", lambda of, n: 0.5, site="stream")
    narrowed, told = evidence(made, rows).measured_on_all(["token_similarity", "loss"], ["transformer", "neutreno"])
    assert set(narrowed.runs["run"]) == {of["run"] for of in [*whole, *own]}
    assert (
        told == " Studies left out because only some of their runs have a measure: b (token_similarity on 3 of 4 runs)."
    )
    found = judged("neutreno_smooths_less", made, rows)
    assert told.strip() in found.sentence


def test_a_metric_that_needs_longer_sequences_is_not_missed_in_short_ones():
    made = [of | {"study": "a"} for T in (32, 64) for of in runs("transformer", T=T)]
    rows = per_layer([of for of in made if of["T"] == 64], "sink_rate", lambda of, n: 0.5)
    narrowed, told = evidence(made, rows).measured_on_all(["sink_rate"])
    assert (len(narrowed.runs), told) == (6, "")


@pytest.mark.parametrize(("drain", "status"), [(0.9, "supported"), (0.3, "unresolved")])
def test_a_wider_spread_of_one_model_moves_no_ratio(drain, status):
    """With equal means a distance from 1 of each seed would be larger in the model that spreads more; the signed mean is not."""
    made = runs("transformer", "resformer", seeds=5)
    spread = {"transformer": 1.0, "resformer": 3.0}
    level = {"transformer": 0.3, "resformer": drain}
    ratio = lambda of, n: level[of["model"]] * math.exp(spread[of["model"]] * (-0.2, -0.1, 0.0, 0.1, 0.2)[of["seed"]])  # noqa: E731
    rows = per_layer(made, "value_drain", ratio, site="own_v")
    rows += per_layer(made, "hidden_peak", lambda of, n: 8.0 if of["model"] == "transformer" else 1.5, site="stream")
    mass = lambda of: 0.5 if of["model"] == "transformer" else 0.1  # noqa: E731
    rows += [r for of in made for r in per_layer([of], "sink_mass", lambda o, n: mass(o), head=0)]
    rows += per_layer(made, "sink_rate", lambda of, n: 0.5)
    found = judged("sinks_drains_and_peaks_vanish_together", made, rows)
    assert found.status == status
    assert found.table.set_index("comparison").loc["its value over others'", "value"] == pytest.approx(
        math.log(drain / 0.3), abs=1e-3
    )


def test_less_alike_tokens_that_halved_values_explain_are_not_supported():
    """The claim on the first layer's values needs the control; NeuTRENO's, which adds a difference to them, does not."""
    for scaled, status in ((0.5, "supported"), (0.3, "unresolved"), (None, "unresolved")):
        level = {"transformer": 0.5, "values_scaled": scaled, "resformer": 0.3}
        made = runs(*(name for name, value in level.items() if value is not None))
        rows = [
            one
            for step in (0, 100, 200, 300)
            for one in per_layer(
                made, "token_similarity", lambda of, n, at=level: at[of["model"]], site="stream", step=step
            )
        ]
        assert judged("value_residuals_smooth_less", made, rows, losses(made, lambda of: 2.7)).status == status


def planned(study):
    """Facts of the runs that a study plans, and a loss of each that has come to rest; rates from a sweep are its middle ones."""
    made = []
    for seed in study.seeds:
        for cell in study.cells:
            one = StudyRun(study, cell, seed, "runs", False, "cpu", {"d_vocab": 1024})
            (model, recipe), settings = sizes(one), cell.settings
            recipe = recipe.replace(lr=2e-3) if study.rates_from else recipe
            data = {"kind": "text", "hash": str(settings["data"]["texts"]), "bos": settings["data"].get("bos")}
            made.append(run_facts(SimpleNamespace(
                logged=False, observed=False, device="cpu", precision="float32", model=model, train=recipe,
                architecture=cell.architecture, seed=seed, name=one.name,
                options=settings.get("options", {}), info={"data": data},
            )))  # fmt: skip
    luck = {of["run"]: zlib.crc32(of["run"].encode()) / 2**32 for of in made}
    ends = {
        of["run"]: 3 - 0.2 * math.log(of["parameters"]) + 0.01 * luck[of["run"]] + (of["lr"] in (1e-3, 4e-3))
        for of in made
    }
    told = [
        row(of, "validation_loss", ends[of["run"]] + above, step=int(of["steps"] * share))
        for of in made for share, above in ((0, 3), (0.5, 0.1), (0.9, 0.001), (1, 0))
    ]  # fmt: skip
    return made, told, [row(of, "cache_bytes", 1000.0, step=of["steps"]) for of in made]


def test_the_studies_for_a_gpu_test_every_claim_on_the_final_loss():
    """All but three: one needs several lengths (shipped), one the weights that training writes, one 32,000 tokens of context."""
    tables = [planned(read_study(find_study(name))) for name in ("gpu_rates", "gpu", "sizes", "gpu_relatives")]
    made, told, cache = (list(itertools.chain(*rows)) for rows in zip(*tables, strict=True))
    trained = evidence(made, cache, told)
    untested = {n for n, claim in CLAIMS.items() if claim.final_loss and math.isnan(claim.judge(trained).p)}
    assert untested == {"fewer_tokens", "denseformer_weights_have_structure", "better_than_grouped_heads_at_length"}
