"""Sentences about the demo are derived from its numbers: planted tables with known answers."""

import pytest

from workbench.findings import formation_steps, race_verdict, unresolved, values_verdict
from workbench.results import records


def copying(curves):
    """Copy-loss telemetry of {(architecture, seed): [loss at step 0, 1, ...]}."""
    return records(
        {"run": f"race-{a}-s{s}", "architecture": a, "seed": s, "step": i, "metric": "copy_loss", "value": v}
        for (a, s), curve in curves.items()
        for i, v in enumerate(curve)
    )


def falling(step, length=12):
    """Loss 4 until `step`, then 1."""
    return [4.0 if i < step else 1.0 for i in range(length)]


def race(steps):
    return formation_steps(copying({(a, s): falling(at) for a, found in steps.items() for s, at in enumerate(found)}))


def test_formation_is_the_first_step_below_half_of_the_start():
    found = race({"svformer": [3, 4, 5]})
    assert found["formation_step"].tolist() == [3, 4, 5]


def test_a_run_that_never_copies_has_no_formation_step():
    found = race({"transformer": [99]})
    assert found["formation_step"].isna().all()


def test_disjoint_seeds_give_an_order():
    said = race_verdict(race({"svformer": [2, 3, 3], "resformer": [5, 6, 6], "transformer": [8, 8, 9]}))
    assert said == "SVFormer before ResFormer before Transformer: seeds disjoint."


def test_overlapping_seeds_are_unresolved():
    assert "unresolved" in race_verdict(race({"svformer": [2, 3, 6], "resformer": [5, 6, 7]}))


def test_fewer_than_three_seeds_establish_nothing():
    assert "not established" in race_verdict(race({"svformer": [2, 2], "resformer": [6, 6]}))


@pytest.mark.parametrize(
    ("rate", "said"), [(0.0, "No attention sink formed"), (0.6, "Some heads count as attention sinks")]
)
def test_sinks_are_gated_on_their_rate(rate, said):
    common = {"step": 100, "layer": 1, "architecture": "transformer", "run": "text-x", "seed": 0}
    mass = common | {"metric": "sink_mass", "value": 0.04, "head": 0}
    frame = records(
        [mass, mass | {"value": 0.035, "control": "uniform_causal"}, common | {"metric": "sink_rate", "value": rate}]
    )
    assert any(line.startswith(said) for line in unresolved(frame))


def test_values_verdict_waits_for_the_models():
    assert values_verdict(records([])).startswith("Not decided yet")


def test_values_verdict_prints_the_numbers_that_decide():
    share = {"metric": "token_identity_share", "site": "own_v", "architecture": "transformer", "seed": 0, "layer": 1}
    ablation = {"metric": "value_ablation", "site": "own_v", "architecture": "transformer", "seed": 0, "step": 9}
    frame = records(
        [
            share | {"step": 0, "value": 0.4},
            share | {"step": 9, "value": 0.9},
            ablation | {"variant": "token_mean", "value": 0.002},
            ablation | {"variant": "zero", "value": 0.2},
        ]
    )
    said = values_verdict(frame)
    assert "90%" in said
    assert "+0.002" in said
    assert "+0.200" in said
