"""Numbers between records and verdicts worked by hand: which layers, sites, steps and halves count."""

import math
from types import SimpleNamespace

import pytest
from planted import LAST, evidence, judged, losses, per_layer, row, run, runs, with_sinks
from scipy import stats

from workbench.claims import collect_evidence
from workbench.claims.depth import late_norms
from workbench.claims.evidence import model_mean
from workbench.claims.sharing import races_by_seed
from workbench.claims.sinks import need_sinks
from workbench.claims.verdict import InsufficientEvidence
from workbench.runs.records import provenance, records


def compared(found):
    """The verdict's numbers by what they compare."""
    return found.table.set_index("comparison")["value"]


@pytest.mark.parametrize(("lower", "status"), [(2, "unresolved"), (3, "supported")])
def test_a_loss_must_be_lower_in_more_than_half_of_the_domains(lower, status):
    """0.1 nats lower in some domains and 0.01 higher in the others: lower on average either way."""
    made = runs("transformer", "values_scaled", "resformer")
    told = []
    for number, domain in enumerate("abcd"):
        change = -0.1 if number < lower else 0.01
        told += losses(made, lambda of, c=change: 2.7 + c * (of["model"] == "resformer"), (domain,))
    found = judged("lower_loss", made, (), told)
    assert found.status == status
    assert f"lower in {lower} of 4 domains" in found.sentence


@pytest.mark.parametrize(("richer", "status"), [(2, "unresolved"), (3, "supported")])
def test_values_must_be_richer_in_more_than_half_of_the_layers_after_the_first(richer, status):
    """Of four layers after the first; 10 directions more in some, 1 fewer in the others. What the first has does not count."""
    made = runs("transformer", "values_scaled", "resformer", n_layers=5)

    def rank(of, layer):
        if of["model"] != "resformer":
            return 20.0
        return 90.0 if layer == 0 else 30.0 if layer <= richer else 19.0

    rows = per_layer(made, "effective_rank", rank, range(5), site="own_v")
    rows += per_layer(made, "effective_rank", lambda of, n: 20.0, range(5), site="own_v", step=0)
    rows += per_layer(made, "effective_rank", rank, range(5), site="own_v", step=200)
    for variant in (None, "trace"):
        rows += per_layer(made, "effective_rank", lambda of, n: 40.0, range(5), site="v", variant=variant)
    found = judged("richer_values", made, rows, losses(made, lambda of: 2.73))
    assert compared(found)["own values, all layers"] == pytest.approx((10 * richer - (4 - richer)) / 4)
    assert "layer 0" not in compared(found)
    assert f"more in {richer} of 4 layers" in found.sentence
    assert found.status == status


def drained(model, site):
    """Runs with sinks, drained values and hidden peaks; what the first layer has is not compared."""
    made, rows = with_sinks(("transformer", model))
    vanilla = {0: 0.001, 1: 0.25, 2: 0.5, 3: 2.0}
    other = {0: 0.001, 1: 1.0, 2: 0.2, 3: 0.5}
    level = lambda of: vanilla if of["model"] == "transformer" else other  # noqa: E731
    rows += [row(of, "value_drain", level(of)[n], layer=n, site=site) for of in made for n in range(4)]
    rows += [
        row(of, "hidden_peak", 8.0 / (1 + (of["model"] == model)), layer=n, site="stream")
        for of in made
        for n in range(4)
    ]
    return made, rows


@pytest.mark.parametrize(
    ("model", "site", "words"),
    [("resformer", "own_v", "own values"), ("svformer", "v", "its shared values, flat over layers")],
)
def test_a_drain_is_compared_over_all_layers_after_the_first_at_the_values_the_model_has(model, site, words):
    """Logarithms of vanilla add up to ln 0.25, of the model to ln 0.1; the peak's to ln 4 - ln 8; one head's mass falls by 0.4."""
    made, rows = drained(model, site)
    found = judged("sinks_drains_and_peaks_vanish_together", made, rows)
    assert compared(found)["its value over others'"] == pytest.approx(math.log(0.1 / 0.25) / 3)
    assert compared(found)["its state over others'"] == pytest.approx(-math.log(2))
    assert compared(found)["attention to the first token"] == pytest.approx((0.1 - 0.5) / 2 / 3, abs=1e-3)
    assert words in found.sentence
    assert ("own values" in found.sentence) == (site == "own_v")


def test_a_lead_at_first_is_that_of_the_first_third_to_its_last_step():
    """Of 30 steps averaged over windows of 3, those that end at steps 2 to 10: -1 each, but -4 on the last."""
    made = runs("transformer", "svformer", seeds=1, steps=30)
    change = [-1.0] * 8 + [-1.0, -1.0, -10.0] + [20.0] * 19
    told = [
        row(of, "train_loss", 5.0 + (change[step] if of["model"] == "svformer" else 0.0), step=step)
        for of in made for step in range(30)
    ]  # fmt: skip
    races = races_by_seed(evidence(made, (), told))
    assert races.loc[0, "lead"] == pytest.approx((8 * -1.0 + -4.0) / 9)
    assert races.loc[0, "crossing"] == 11, "the window that ends there: (-1 - 10 + 20) / 3"
    sparse = [one | {"step": 10 * one["step"]} for one in told]  # of 300 steps, windows of 30
    races = races_by_seed(evidence([of | {"steps": 300} for of in made], (), sparse))
    assert races.loc[0].tolist()[:2] == pytest.approx([(8 * -1.0 + -4.0) / 9, 110])
    gaps = [one for one in sparse if one["step"] % 20 == 0 or one["step"] == 290]
    races = races_by_seed(evidence([of | {"steps": 300} for of in made], (), gaps))
    assert races["crossing"].isna().all(), "two losses in a window are noise"
    assert races["apart"].tolist() == [20]


def test_a_course_is_measured_at_ten_checkpoints_spread_evenly_with_both_ends():
    def steps(have, which, matched=()):
        of = SimpleNamespace(info={"data": {"kind": "text"}}, steps=have, architecture="transformer")
        return list(
            collect_evidence.metrics_needed(of, [SimpleNamespace(models=(), metrics=("loss",), steps=which)], matched)
        )

    have = list(range(0, 1000, 10))
    assert steps(have, "series") == [0, 110, 220, 330, 440, 550, 660, 770, 880, 990]
    assert steps(have, "series", [20, 30]) == sorted({*steps(have, "series"), 20, 30})
    assert steps([0, 7], "series") == steps([0, 7], "ends", [3]) == [0, 7]
    assert steps([0, 7], "last", [3]) == [7]
    assert steps([0, 3, 7], "matched", [3]) == [0, 3, 7]
    assert steps([], "series") == []


def test_a_late_layers_norm_is_held_against_the_middle_ones():
    """Of eight layers the last over the fifth: 2 / 8 against 1 / 1."""
    made = runs("transformer", "resformer", seeds=1)
    norm = {4: 8.0, 7: 2.0}
    rows = [
        row(of, "value_norm", norm.get(n, 5.0) if of["model"] == "resformer" else 1.0, layer=n, site="own_v")
        for of in made for n in range(8)
    ]  # fmt: skip
    assert late_norms(evidence(made, rows), "resformer", 8).value == pytest.approx(math.log(2 / 8))


def test_first_layer_gradients_are_told_as_ratios_where_both_models_have_them():
    made = runs("transformer", "resformer")
    level = {"transformer": {"W_V": 2.0, "W_O": 4.0}, "resformer": {"W_V": 5.0, "W_O": 3.0}}
    rows = [
        row(of, "gradient_norm", level[of["model"]][part] * (1 + n), layer=n, part=part)
        for of in made for part in ("W_V", "W_O") for n in (0, 1)
    ]  # fmt: skip
    told = "; gradient norms of the first layer are 2.50 times for W_V and 0.75 times for W_O (the first close to a tautology)"

    def said(rows):
        return judged("not_merely_easier_optimisation", made, rows, losses(made, lambda of: 2.7)).sentence

    assert told in said(rows)
    for key, value in (("architecture", "transformer"), ("architecture", "resformer"), ("part", "W_V")):
        assert "gradient norms" not in said([r for r in rows if r[key] == value])


def test_short_sequences_have_no_sink_rate_and_their_sinks_are_known_by_mass_alone():
    made, rows = with_sinks()
    mass = [r for r in rows if r["metric"] == "sink_mass"]
    said = need_sinks(evidence(made, mass))
    assert (
        said
        == need_sinks(evidence(made, rows))
        == "vanilla has sinks in 5 of 5 seeds (strongest head 50%, median over seeds)"
    )
    spread = [r | {"value": 0.05} if r["metric"] == "sink_rate" else r for r in rows]
    with pytest.raises(InsufficientEvidence, match=r"No sink formed.* at most 50\.0% of"):
        need_sinks(evidence(made, spread))


def test_a_measure_that_one_model_lacks_is_named_however_few_rows_the_other_has():
    made = runs("transformer", "resformer", seeds=1)
    told = evidence(made, [row(made[0], "sink_mass", 0.5, layer=0, head=0)])
    with pytest.raises(InsufficientEvidence, match="sink_mass is not measured for resformer"):
        told.known(told.rows("sink_mass"), "resformer")


def test_errors_over_documents_are_those_of_eight_groups():
    """Two layers of one seed, each 0.1 off in one standard error: Student's t on 7 degrees, 2.3646, times 0.1 sqrt(2) / 2."""
    rows = evidence(
        [run("transformer")], [row(run("transformer"), "x", v, layer=n, se=0.1) for n, v in enumerate((1.0, 3.0))]
    ).records("x")
    found = model_mean(rows)
    half = stats.t.ppf(0.975, 7) * 0.1 * math.sqrt(2) / 2
    assert (found.value, found.n) == (2.0, 64)
    assert (found.low, found.high) == pytest.approx((2.0 - half, 2.0 + half), abs=1e-4)


def test_without_position_0_is_another_correlation_than_with_it():
    """With it entropy rises as similarity falls; without it both rise, but for two layers of either model: four ranks of eight, 2 off."""
    made, rows = with_sinks(seeds=5)
    order = lambda of, n: n + 0.1 * len(of["model"])  # noqa: E731
    for variant, sign in ((None, -1), ("excl0", 1)):
        rows += per_layer(
            made, "token_similarity", lambda of, n, s=sign: s * order(of, n), site="stream", variant=variant
        )
    rows += per_layer(made, "importance_entropy", order)
    for part in ("profile", "content"):  # entropy without position 0 is minus their sum, up to a constant
        rows += per_layer(made, "concentration_parts", lambda of, n: -order(of, (0, 2, 1, 3)[n]) / 2, variant=part)
    rows += per_layer(made, "concentration_parts", lambda of, n: 9.0 * n, variant="first_position")
    found = compared(judged("smoothing_and_concentration_are_linked", made, rows, losses(made, lambda of: 2.7)))
    assert found["all positions, equal step"] == pytest.approx(-1.0)
    assert found["without position 0, equal step"] == pytest.approx(1 - 6 * 4 * 2**2 / (8 * 63))


def test_copies_are_known_by_their_weights_where_no_losses_were_written():
    """Imported runs have no telemetry: the same weights under another name and seed are the same training."""
    made = [run("transformer", seed) | {"run": name} for seed, name in enumerate(("a", "b", "copy"))]
    rows = [
        row(of, "loss", 2.7, step=step, provenance=provenance(weights=f"{kind}{step}"))
        for of, kind in zip(made, "xyx", strict=True) for step in (0, LAST)
    ]  # fmt: skip
    shown = evidence(made, rows)
    marks = collect_evidence.told_apart(records([]), shown.everything())
    assert collect_evidence.seeds_of(shown.runs, marks) == {"a": 0, "b": 1, "copy": 0}
