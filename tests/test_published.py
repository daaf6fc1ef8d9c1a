"""Published figures: the shipped tables against the logs they come from, and our runs on the same axes."""

import math
from pathlib import Path

import pandas as pd
import pytest
from null_rates import DRAWS, OUT, decided, null_rates, repeated
from planted import evidence, losses, runs

from workbench import plots
from workbench.claims import CLAIMS
from workbench.claims.judging import claim_figure
from workbench.claims.published_numbers import beside_published, differences_by_budget, published, published_differences
from workbench.errors import WorkbenchError

LOGS = Path(__file__).parents[2] / "shared" / "strangers" / "published" / "modded_nanogpt_val_loss.parquet"


def test_losses_are_subtracted_by_seed_on_the_axis_of_tokens_per_parameter():
    table = pd.DataFrame(
        [
            (f"{m}{s}", m, s, 8000.0, 100, size)
            for m, size in (("transformer", 10.0), ("resformer", 20.0))
            for s in (0, 1)
        ],
        columns=["run", "model", "seed", "tokens", "steps", "parameters"],
    )
    curves = {
        "transformer0": pd.Series({0: 9.0, 50: 4.0, 100: 3.0}), "resformer0": pd.Series({0: 9.0, 50: 3.5, 100: 2.75}),
        "resformer1": pd.Series({0: 9.0, 50: 1.0, 100: 1.0}),
    }  # fmt: skip
    rows = differences_by_budget(table, curves)
    assert rows[["seed", "tokens_per_parameter", "value"]].to_numpy().tolist() == [[0, 200.0, -0.5], [0, 400.0, -0.25]]
    assert differences_by_budget(table.assign(parameters=math.nan), curves).empty, (
        "an unknown size has no place on the axis"
    )
    with pytest.raises(WorkbenchError, match="shares a seed"):
        plots.budget_figure(rows.head(0), {})


@pytest.mark.slow
def test_the_claim_on_the_loss_draws_published_curves_behind_ours_and_says_how_far_ours_go():
    made = runs("transformer", "resformer", "values_scaled", seeds=3, steps=300)
    planted = evidence(made, [], losses(made, lambda of: 3.0 - 0.1 * (of["model"] == "resformer")))
    verdict = CLAIMS["lower_loss"].judge(planted)
    assert "these runs end at 20;" in verdict.sentence
    assert "-0.012 at the end, 10.3" in verdict.sentence
    figure, rows = claim_figure(CLAIMS["lower_loss"], verdict, planted)
    names = [trace.name for trace in figure.data]
    assert names[0] == "ResFormer, modded-nanogpt 2024-11-06", "published curves are behind"
    assert rows["tokens_per_parameter"].max() == pytest.approx(20.0)
    unknown = evidence([run | {"parameters": math.nan} for run in made], [], losses(made, lambda of: 3.0))
    assert claim_figure(CLAIMS["lower_loss"], verdict, unknown)[1]["metric"].unique().tolist() == ["validation_loss"]


def test_the_published_difference_is_read_between_its_points_and_not_beyond_them():
    assert "-0.063 at 1, where these runs end" in beside_published("resformer", 1.0)
    assert "these runs end at 50" in beside_published("resformer", 50.0)
    assert beside_published("svformer", 1.0) == beside_published("resformer", math.nan) == ""


def test_published_coefficients_are_beside_ours():
    rows = [
        {"run": f"r{s}", "architecture": "resformer_learnable", "seed": s, "step": step, "metric": "coefficient", "part": part,
         "layer": layer, "value": step + layer + s}
        for s in (0, 1) for step in (0, 10) for part in ("lambda_own", "lambda_v1") for layer in (1, 2)
    ]  # fmt: skip
    stopped = [{**row, "run": "r2", "seed": 2, "step": 5, "value": 99.0} for row in rows[:4]]
    figure = plots.coefficients_by_layer(pd.DataFrame(rows + stopped), published("block_coefficients"))
    assert figure.data[0].y.tolist() == [11.5, 12.5], "without the last step of a run that stopped"
    assert "last logged step, 10, mean and range over 2 seeds" in figure.layout.title.subtitle.text.replace("<br>", " ")
    assert [t.name for t in figure.data][2:] == ["published: stream", "published: embedding"]
    assert len(figure.data[2].y) == 11


def test_the_rates_on_repeated_trainings_come_from_the_rule_itself():
    assert decided(pd.Series([1.0, 1.1, 0.9]).to_numpy(), pd.Series([2.0, 2.1, 1.9]).to_numpy()) == "supported"
    assert decided(pd.Series([2.0, 2.1, 2.2]).to_numpy(), pd.Series([1.0, 1.2, 1.1]).to_numpy()) == "refuted"
    shown = pd.read_csv(OUT)
    assert set(shown["seeds"]) == {3, 5}
    assert (shown["draws"] == DRAWS).all()
    assert shown[["supported", "refuted"]].le(3.0).all(axis=None)


@pytest.mark.slow
@pytest.mark.skipif(not LOGS.exists(), reason="needs ../shared/strangers")
def test_the_shipped_numbers_are_those_of_the_logs():
    table = pd.read_parquet(LOGS)
    record = table[table["record"] == "2024-11-06_ShortcutsTweaks"]
    loss = {run[:8]: rows.set_index("step")["val_loss"] for run, rows in record.groupby("run")}
    for model, run in (("resformer", "042f9e87"), ("resformer_learnable", "43f60c4f")):
        shipped = published_differences(model).set_index("step")["value"]
        assert shipped.tolist() == pytest.approx((loss[run] - loss["4a71cc92"]).loc[shipped.index].tolist(), abs=1e-9)
    groups = repeated(table)
    assert len(groups) == 71
    assert null_rates(groups, 200)[["supported", "refuted"]].le(6.0).all(axis=None)
