"""Claims of concentration, sinks and smoothing: verdicts on planted tables whose right answer is known."""

import math

import numpy as np
import pytest
from planted import ABOVE_THE_END, LAST, evidence, formed, judged, losses, per_layer, row, run, runs, sinks, with_sinks

from workbench.claims.sinks import AT_ZERO, EVEN, UNEVEN, head_kinds

# ---- concentration and sinks -----------------------------------------------------------------------------------------


def deficits(made, trained, start=0.0):
    rows = per_layer(made, "importance_entropy", trained, variant="deficit")
    return rows + per_layer(made, "importance_entropy", lambda of, n: start, variant="deficit", step=0)


@pytest.mark.parametrize(
    ("trained", "start", "status"),
    [(0.2, 0.01, "supported"), (0.2, 0.2, "refuted"), (-0.2, 0.01, "refuted"), (None, 0.01, "unresolved")],
)
def test_concentration_is_learned(trained, start, status):
    made = runs("transformer")
    rows = deficits(made, lambda of, n: (of["seed"] - 1) * 0.2 if trained is None else trained, start)
    assert judged("concentration_is_learned", made, rows).status == status


def test_the_tolerance_at_init_is_asked_of_every_model():
    made = runs("transformer", "resformer")
    rows = deficits(made, lambda of, n: 0.2, 0.01)
    assert "over 2 models" in judged("concentration_is_learned", made, rows).sentence


def test_one_seed_does_not_decide_what_training_does():
    found = judged(
        "concentration_is_learned", made := runs("transformer", seeds=1), deficits(made, lambda of, n: -0.5, 0.0)
    )
    assert found.status == "unresolved"
    assert "1 of the 3 seeds" in found.sentence


SINK_CLAIMS = (
    "less_concentration_in_deep_layers", "sinks_drains_and_peaks_vanish_together", "smoothing_and_concentration_are_linked",
)  # fmt: skip


@pytest.mark.parametrize("name", SINK_CLAIMS)
@pytest.mark.parametrize(("strongest", "seeds", "why"), [(0.1, 5, "No sink formed"), (0.5, 3, "5 seeds are needed")])
def test_sink_claims_are_gated(name, strongest, seeds, why):
    made, rows = with_sinks(seeds=seeds, strongest=strongest)
    found = judged(name, made, rows)
    assert found.status == "gated"
    assert why in found.sentence


def test_a_gated_claim_shows_its_numbers_at_equal_step_and_at_equal_loss():
    made, rows = with_sinks(strongest=0.1)
    more, told = over_training(made, lambda of, n: 0.5 if of["model"] == "transformer" else 0.1, 0.0)
    found = judged("less_concentration_in_deep_layers", made, rows + more, told)
    assert found.status == "gated"
    assert "decide nothing: resformer, deep layers, equal step -0.4 [" in found.sentence
    # all seeds end at one loss, at which each run is at its own last step: the same distance
    assert found.table.set_index("comparison").loc["ResFormer, deep layers, equal loss", "value"] == pytest.approx(-0.4)


def over_training(made, end, head_start):
    """Deficit and loss at four checkpoints; `end(run)` is the deficit's end, which grows with the loss's fall."""
    rows = []
    for of in made:
        for step, share in ((0, 0.0), (100, 0.5), (200, 0.8), (LAST, 1.0)):
            for n in range(4):
                rows.append(
                    row(
                        of,
                        "importance_entropy",
                        end(of, n) * share + 0.01 * (of["seed"] % 2),
                        layer=n,
                        variant="deficit",
                        step=step,
                    )
                )
    return rows, losses(made, lambda of: 2.73 - head_start * (of["model"] != "transformer"))


@pytest.mark.parametrize(
    ("resformer", "head_start", "status"), [(0.1, 0.0, "supported"), (0.9, 0.0, "refuted"), (0.5, 0.0, "unresolved")]
)
def test_less_concentration_in_deep_layers(resformer, head_start, status):
    made, rows = with_sinks()
    luck = [0.0, 0.001, -0.004, 0.009, -0.016]
    ends = {"transformer": [0.5] * 5, "resformer": [resformer + x for x in luck]}
    more, told = over_training(made, lambda of, n: ends[of["model"]][of["seed"]], head_start)
    found = judged("less_concentration_in_deep_layers", made, rows + more, told)
    assert found.status == status
    assert "equal loss" in found.sentence


@pytest.mark.parametrize(
    ("drain", "peak", "status"), [(0.9, 1.5, "supported"), (0.1, 1.5, "refuted"), (None, 1.5, "unresolved")]
)
def test_sinks_drains_and_peaks(drain, peak, status):
    """Dissociation, the drain deeper while sink and peak vanish, refutes it."""
    made, rows = with_sinks()
    method = lambda of, own, base: base if of["model"] == "transformer" else own  # noqa: E731
    noisy = [0.1, 0.9, 0.3, 0.2, 0.35]
    rows += per_layer(
        made, "value_drain", lambda of, n: method(of, noisy[of["seed"]] if drain is None else drain, 0.3), site="own_v"
    )
    rows += per_layer(made, "hidden_peak", lambda of, n: method(of, peak, 8.0), site="stream")
    assert judged("sinks_drains_and_peaks_vanish_together", made, rows).status == status


@pytest.mark.parametrize("metric", ["sink_mass", "value_drain", "hidden_peak"])
def test_what_is_measured_of_one_model_alone_decides_nothing(metric):
    made, rows = with_sinks()
    axes = {"sink_mass": {}, "value_drain": {"site": "own_v"}, "hidden_peak": {"site": "stream"}}
    for name, more in axes.items():
        if name != "sink_mass":
            rows += per_layer(made, name, lambda of, n: 0.5, **more)
    theirs = {of["run"] for of in made if of["model"] == "transformer"}
    rows = [row for row in rows if row["metric"] != metric or row["run"] not in theirs]
    found = judged("sinks_drains_and_peaks_vanish_together", made, rows)
    assert found.status in ("not_checkable", "gated")
    assert "transformer" in found.sentence


@pytest.mark.parametrize(
    ("sink", "copied", "status", "said"),
    [
        (200, 60, "supported", "SVFormer 195 (passed in 5 of 5 seeds)"),
        (200, 170, "unresolved", "learning to copy: -10"),  # no later once it copies: its learning is what is late
        (40, 20, "refuted", "SVFormer 35 (passed in 5 of 5"),
        (9_999, 60, "unresolved", "SVFormer none by step 300 (passed in 0 of 5 seeds)"),  # prevention is another claim
    ],
)
def test_sharing_values_delays_the_sink(sink, copied, status, said):
    luck = [0, 20, 10, -10, -20]
    made = runs("transformer", "svformer", "gated_attention", seeds=5, task="backcopy")
    shared = lambda of: of["model"] == "svformer"  # noqa: E731
    rows, told = formed(
        made,
        lambda of: (sink if shared(of) else 100) + luck[of["seed"]] * (1 + shared(of)),
        lambda of: copied if shared(of) else 60,
    )
    found = judged("sharing_values_delays_the_sink", made, rows, told)
    assert found.status == status, found.sentence
    assert said in found.sentence
    censored = sink > 300
    units = {True: "restricted mean steps", False: "steps"}
    assert found.table["unit"].tolist() == [units[c] for c in (censored, censored, False)], "gated attention reaches it"
    assert ("difference of restricted mean steps: " in found.sentence) == censored
    assert ("a log-rank test decides" in found.sentence) == censored
    assert len(found.table) == 3, "what others do is shown beside it"
    assert set(found.runs) == {of["run"] for of in made}, "their runs are listed too"


def test_a_sink_that_is_gone_at_the_end_is_counted_and_few_seeds_decide_nothing():
    made = runs("transformer", "svformer", "gated_attention", seeds=3, task="backcopy")
    rows, told = formed(made, lambda of: 9_999 if of["model"] == "gated_attention" else 100, lambda of: 60)
    one = {of["run"] for of in made if (of["model"], of["seed"]) == ("gated_attention", 1)}
    rows = [r | {"value": 0.9} if r["run"] in one and r["step"] == 200 else r for r in rows]
    found = judged("sharing_values_delays_the_sink", made, rows, told)
    assert (
        "gated attention no median by step 300 (passed in 1 of 3 seeds, 1 below it again at the end)" in found.sentence
    )
    assert "3 seeds: a verdict needs 5, and this p decides nothing." in found.sentence
    assert math.isnan(found.p)


@pytest.mark.parametrize(
    ("gated", "vanilla", "status"), [(9_999, 100, "supported"), (100, 100, "unresolved"), (9_999, 9_999, "gated")]
)
def test_a_gate_prevents_the_sink(gated, vanilla, status):
    made = runs("transformer", "gated_attention", seeds=5, task="backcopy")
    luck = [0.0, 0.02, -0.02, 0.01, -0.01]
    rows, told = formed(made, lambda of: gated if of["model"] == "gated_attention" else vanilla, lambda of: 60)
    rows = [
        row | {"value": row["value"] + luck[row["seed"]] * (row["architecture"] == "gated_attention")} for row in rows
    ]
    found = judged("a_gate_prevents_the_sink", made, rows, told)
    assert found.status == status, found.sentence
    assert "5 seeds" in found.sentence


@pytest.mark.parametrize(
    ("mass", "zero", "status"),
    [(-0.4, 50, "supported"), (-0.4, 110, "unresolved"), (0.0, 50, "unresolved"), (0.05, 200, "refuted")],
)
def test_the_sink_waits_for_the_drain(mass, zero, status):
    made = runs("transformer", AT_ZERO, EVEN, UNEVEN, seeds=5, task="backcopy")
    luck = [0.0, 0.02, -0.02, 0.01, -0.01]
    starts = {"transformer": 110, AT_ZERO: zero, EVEN: 110, UNEVEN: 110}
    names = {of["run"]: of["model"] for of in made}
    rows, told = formed(
        made, lambda of: starts[of["model"]] + 500 * luck[of["seed"]] * (of["model"] == AT_ZERO), lambda of: 60
    )
    held = [mass + luck[r["seed"]] if names[r["run"]] == EVEN and r["value"] > 0.5 else 0 for r in rows]
    drains = [
        row(of, "value_drain", (of["seed"] + 1) * (layer + 1) if of["model"] == UNEVEN else 1, site="own_v", layer=layer)
        for of in made for layer in range(2)
    ]  # fmt: skip
    found = judged(
        "the_sink_waits_for_the_drain",
        made,
        [*(r | {"value": r["value"] + h} for r, h in zip(rows, held, strict=True)), *drains],
        told,
    )
    assert found.status == status, found.sentence
    assert "Over runs and layers the start's value ends at 1 of the others' norm, and at 1 to 10 if" in found.sentence
    assert "copying learned by 60" in found.sentence
    assert set(found.table["unit"]) == {"share", "steps"}


def test_where_vanilla_forms_no_sink_there_is_no_delay():
    made = runs("transformer", "svformer", seeds=5, task="backcopy")
    found = judged("sharing_values_delays_the_sink", made, *formed(made, lambda of: 9_999, lambda of: 60))
    assert found.status == "gated"
    assert "in 0 of 5 seeds" in found.sentence


def written(made, of_head, step=LAST):
    """What each head's sink writes: `of_head(run, layer, head)` is (mass, ratio, spread)."""
    return [
        row(of, "sink_output", value, layer=layer, head=head, variant=variant, step=step)
        for of in made for layer in range(2) for head in range(2)
        for variant, value in zip(("mass", None, "spread"), of_head(of, layer, head), strict=True)
    ]  # fmt: skip


def test_sinks_are_counted_by_what_they_write():
    """Of four heads of the vanilla model one rests, one broadcasts (in four of five seeds; else it is mixed), two are no sinks."""
    made, rows = with_sinks()
    rows += per_layer(made, "value_drain", lambda of, n: 0.9 if of["model"] == "resformer" else 0.3, site="own_v")
    rows += per_layer(made, "hidden_peak", lambda of, n: 1.5 if of["model"] == "resformer" else 8.0, site="stream")

    def of_head(of, layer, head):
        if of["model"] == "resformer" or head == 1:
            return 0.1, 0.9, 0.1
        return (0.6, 0.1, 0.9) if layer == 0 else (0.6, 0.8, 0.7 if of["seed"] == 4 else 0.2)

    found = judged("sinks_drains_and_peaks_vanish_together", made, rows + written(made, of_head))
    assert found.status == "supported"
    assert found.sentence.endswith(
        "Sinks by their output: Transformer 1 no-op, 0.8 broadcast, 0.2 mixed of 4 heads (mean of 5 seeds); ResFormer none of "
        "4 heads (mean of 5 seeds)."
    )
    table = found.table.set_index("comparison")
    assert table.loc["Transformer, broadcast heads", ["value", "n", "unit"]].tolist() == [0.8, 5, "heads"]
    assert table.loc["ResFormer, no-op heads", "value"] == 0


def test_a_gated_sink_claim_still_says_what_heads_write():
    made, rows = with_sinks(strongest=0.1)
    found = judged("sinks_drains_and_peaks_vanish_together", made, rows + written(made, lambda *_: (0.1, 0.1, 0.1)))
    assert found.status == "gated"
    assert "Transformer none of 4 heads" in found.sentence


def test_kinds_of_heads_are_read_from_their_own_step():
    made, _ = with_sinks(models=("transformer",), seeds=1)
    told = evidence(
        made, written(made, lambda *_: (0.6, 0.1, 0.1)) + written(made, lambda *_: (0.02, 9.0, 0.1), step=0)
    )
    assert head_kinds(told, "transformer")["kind"].tolist() == ["no-op"] * 4
    assert head_kinds(told, "transformer", "first")["kind"].tolist() == ["none"] * 4


@pytest.mark.parametrize(("kept", "status"), [(0.5, "supported"), (0.02, "refuted"), (None, "unresolved")])
def test_a_start_token_decides_by_how_much_more_the_model_changes_with_it_than_without(kept, status):
    made = runs("transformer", "resformer", seeds=5, bos=True) + runs("transformer", "resformer", seeds=5, bos=False)
    noisy = [0.0, 0.2, 0.1, 0.15, 0.05]

    def strongest(of):
        if of["model"] == "transformer":
            return 0.5 if of["bos"] else 0.4
        return (noisy[of["seed"]] if kept is None else kept) if of["bos"] else 0.0

    assert judged("start_token_decides_the_sinks", made, sinks(made, strongest)).status == status


def test_start_token_needs_both_arms():
    made, rows = with_sinks()
    assert judged("start_token_decides_the_sinks", made, rows).status == "not_checkable"
    other = runs("transformer", "resformer", bos=True, task="backcopy")
    rows = sinks(made + other, lambda of: 0.6)
    assert judged("start_token_decides_the_sinks", made + other, rows).status == "not_checkable", (
        "an arm of another task"
    )


@pytest.mark.parametrize(
    ("other", "facts", "word"),
    [
        ("svformer", {}, "no value-residual model in common"),
        ("resformer", {"n_layers": 8, "steps": 900}, "steps and n_layers"),
    ],
)
def test_arms_of_other_models_or_settings_are_no_interaction(other, facts, word):
    made = runs("transformer", "resformer", seeds=5, bos=True) + runs("transformer", other, seeds=5, bos=False, **facts)
    found = judged("start_token_decides_the_sinks", made, sinks(made, lambda of: 0.9 if of["bos"] else 0.6))
    assert found.status == "not_checkable"
    assert word in found.sentence


@pytest.mark.parametrize(("slope", "status"), [(-1, "supported"), (0, "unresolved")])
def test_smoothing_and_concentration(slope, status):
    made, rows = with_sinks(seeds=5)
    random = np.random.default_rng(0)

    def similarity(of, n):
        return slope * (n + 0.1 * len(of["model"])) if slope else float(random.normal())

    for step in (100, 200, LAST):
        rows += per_layer(made, "importance_entropy", lambda of, n: n + 0.1 * len(of["model"]), step=step)
        for part in ("profile", "content"):
            rest = lambda of, n: -(n + 0.1 * len(of["model"]))  # noqa: E731
            rows += per_layer(made, "concentration_parts", rest, variant=part, step=step)
        for variant in (None, "excl0"):
            rows += per_layer(made, "token_similarity", similarity, site="stream", variant=variant, step=step)
    found = judged("smoothing_and_concentration_are_linked", made, rows, losses(made, lambda of: 2.7))
    assert found.status == status
    assert found.sentence.count("equal step") == found.sentence.count("equal loss") == 2


def test_values_at_a_common_loss_by_hand():
    """The slow run ends at 3.0; the fast one, 0.5 lower, passed that half way between steps 200 (3.2) and 300 (2.5 + wiggle)."""
    made = [run("transformer"), run("resformer")]
    told = [row(made[0], "validation_loss", v, step=s) for s, v in ((0, 6.0), (100, 4.0), (200, 3.5), (LAST, 3.0))]
    told += [row(made[1], "validation_loss", v, step=s) for s, v in ((0, 6.0), (100, 3.6), (200, 3.2), (LAST, 2.8))]
    rows = [row(of, "token_similarity", s / 100, step=s, layer=1) for of in made for s in (0, 100, 200, LAST)]
    shown = evidence(made, rows, told)
    found = shown.at_common_loss(shown.records("token_similarity")).set_index("run")["value"]
    assert found[made[0]["run"]] == pytest.approx(3.0)
    assert found[made[1]["run"]] == pytest.approx(2.5)


def test_less_similarity_that_slower_progress_explains_is_not_supported():
    """Both rise alike as their loss falls; the vanilla model has only come further, so it is not the architecture's doing."""
    made = runs("transformer", "neutreno")
    above = ABOVE_THE_END
    end = {"transformer": 2.6, "neutreno": 2.7}
    rows = [
        row(of, "token_similarity", 0.0 if step == 0 else 6.0 - end[of["model"]] - above[step], layer=n, site="stream", step=step)
        for of in made for step in above for n in range(4)
    ]  # fmt: skip
    found = judged("neutreno_smooths_less", made, rows, losses(made, lambda of: end[of["model"]]))
    table = found.table.set_index("comparison")
    assert table.loc["trained", "high"] < 0
    assert table.loc["at equal loss", "value"] == pytest.approx(0, abs=2e-3)
    assert found.status == "unresolved"
