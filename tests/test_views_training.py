"""What the training page draws: losses and their differences, gradients, coefficients, recorded quantities, and only new parts."""

from __future__ import annotations

import shutil

import dashboard
import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.plots.training_and_gradient_figures import (
    at_step,
    curve_difference,
    curves,
    matrices,
    on_tokens,
    thinned,
)
from workbench.runs.records import records, write_parquet
from workbench.views import Link, Source, training

A, B = "text-resformer-s0", "text-transformer-s0"


@pytest.fixture(scope="module")
def ask(populated):
    return Source(populated)


def drawn(ask, view, **options):
    return view(ask, Link("training", {"a": A} | {k: str(v) for k, v in options.items()}))


def trace(figure, name):
    return next(t for t in figure.data if t.name == name and t.hoverinfo != "skip")


# ---- losses ----


def test_the_loss_is_the_mean_over_domains_with_the_error_of_that_mean(ask):
    drawing = drawn(ask, training.validation_loss)
    row = drawing.table[(drawing.table["run"] == A) & (drawing.table["step"] == 10)].iloc[0]
    assert row["value"] == pytest.approx(4.0 - 1.0 - 0.05 * 8)
    assert row["se"] == pytest.approx(np.sqrt(2 * 0.05**2) / 2)
    assert row["n"] == 8
    assert row["data"] == "mean of prose, python"
    assert trace(drawing.figure, "ResFormer").y[-1] == pytest.approx(2.6 + 0.01 * 0.5 - 0.05 * 0.5)


def test_the_table_of_losses_over_a_budget_has_the_published_curves_that_are_drawn(ask):
    drawing = drawn(ask, training.by_budget)
    published = drawing.table[drawing.table["run"] == "published"]
    for model, rows in published.groupby("architecture"):
        curve = next(t for t in drawing.figure.data if t.name == f"{plots.label(model)}, {rows['source'].iloc[0]}")
        assert rows["value"].tolist() == list(curve.y)
        assert rows["tokens_per_parameter"].tolist() == list(curve.x)
    names = {t.name for t in drawing.figure.data if t.name and "modded" in t.name}
    assert published["architecture"].nunique() == len(names) > 0


def test_losses_on_two_texts_are_not_subtracted(populated, tmp_path):
    """Both texts have domains of the same names."""
    for name in (A, B):
        shutil.copytree(populated / name, tmp_path / name)
    info = read_json(tmp_path / A / "run.json")
    write_json(tmp_path / A / "run.json", info | {"data": info["data"] | {"hash": "another"}})
    drawing = drawn(Source(tmp_path), training.validation_loss, compare=1, b=B)
    assert drawing.sentence == "No A − B: nothing of one step, text and length was logged by both."
    assert {t.name for t in drawing.figure.data if t.name} == {"A: ResFormer · s0", "B: Transformer · s0"}


def test_a_step_without_every_domain_of_its_run_has_no_mean():
    """`a` is evaluated at 0, 10 and 20 and `b` at 0 and 20, so step 10 would be the loss of `a` alone; another run has `a` only."""
    losses = {"both": {"a": {0: 4.0, 10: 3.0, 20: 2.0}, "b": {0: 6.0, 20: 4.0}}, "one": {"a": {10: 3.5}}}
    rows = [
        {"run": run, "metric": "validation_loss", "data": data, "step": step, "value": value}
        for run, domains in losses.items()
        for data, values in domains.items()
        for step, value in values.items()
    ]
    means = training.mean_of_domains(records(rows))
    assert means[["run", "step", "value"]].to_numpy().tolist() == [
        ["both", 0, 5.0],
        ["both", 20, 3.0],
        ["one", 10, 3.5],
    ]
    assert means["data"].tolist() == ["mean of a, b", "mean of a, b", "a"], "a run of one domain is in no mean of two"
    broken = records([{**row, "se": None if row["data"] == "b" else 0.1} for row in rows])
    assert training.mean_of_domains(broken)["se"].isna().tolist() == [True, True, False]
    lost = records([{**row, "value": float("nan")} if (row["data"], row["step"]) == ("b", 20) else row for row in rows])
    assert training.mean_of_domains(lost)["step"].tolist() == [0, 10], "a loss that is NaN is no loss"
    with pytest.raises(WorkbenchError, match="no step has a loss of every domain"):
        training.mean_of_domains(records([{**rows[0], "step": 5}, rows[4]]))


def test_the_relative_loss_subtracts_the_vanilla_model_of_the_same_seed(ask):
    drawing = drawn(ask, training.relative)
    found = drawing.table.groupby("architecture")["value"].agg(["min", "max"])
    assert set(found.index) == {"resformer", "svformer", "denseformer"}
    assert found.loc["resformer"].tolist() == pytest.approx([0.2, 0.2])
    assert found.loc["svformer"].tolist() == pytest.approx([0.35, 0.35])
    assert "Below 0" in drawing.sentence
    hidden = drawn(ask, training.relative, models="resformer")  # the baseline need not be drawn itself
    assert set(hidden.table["architecture"]) == {"resformer"}


def test_without_a_vanilla_model_it_subtracts_model_b(ask, tmp_path):
    folder = dashboard.copied(ask.folder, tmp_path / "runs")
    for path in folder.glob("text-transformer-*"):
        shutil.rmtree(path)
    bare = Source(folder)
    with pytest.raises(WorkbenchError, match="select a model B"):
        drawn(bare, training.relative)
    drawing = drawn(bare, training.relative, b="text-svformer-s1")
    assert drawing.table.loc[drawing.table["architecture"] == "resformer", "value"].tolist() == pytest.approx(
        [-0.15] * 4
    )
    assert "SVFormer" in drawing.figure.layout.title.text


def test_a_difference_that_is_not_drawn_is_not_described(ask, monkeypatch):
    link = Link.parse("training?compare=1&a=text-resformer-s0&b=text-transformer-s0")
    assert "its band" not in training.train_loss(ask, link).sentence, "losses of batches have no error"
    there = ask.telemetry

    def longer(entries, metrics=None):
        frame = there(entries, metrics)
        return frame.assign(T=frame["T"].mask(frame["architecture"] == "resformer", 32))

    monkeypatch.setattr(ask, "telemetry", longer)
    drawing = training.validation_loss(ask, link)
    assert plots.MINUS not in {t.name for t in drawing.figure.data}
    assert drawing.sentence == f"No {plots.MINUS}: nothing of one step, text and length was logged by both."


def test_a_and_b_share_a_panel_and_their_difference_has_its_own(ask):
    drawing = drawn(ask, training.validation_loss, compare=1, b=B)
    a, b, minus = (trace(drawing.figure, n) for n in ("A: ResFormer · s0", "B: Transformer · s0", "A − B"))
    assert minus.y == pytest.approx([0.2, 0.2])
    assert np.subtract(a.y, b.y) == pytest.approx(minus.y)
    assert a.yaxis == b.yaxis != minus.yaxis
    assert a.line.color == plots.colour("resformer")
    assert drawing.sentence == "A − B at step 10: 0.2 nats, mean over 2 paired seeds."
    assert "unpaired" in drawn(ask, training.validation_loss, compare=1, b="text-transformer-s1").sentence
    with pytest.raises(WorkbenchError, match="beside the losses"):
        drawn(ask, training.relative, compare=1, b=B)


def test_losses_stand_over_tokens(ask):
    figure = drawn(ask, training.validation_loss, x="tokens").figure
    assert list(trace(figure, "ResFormer").x) == [0, 10 * 2 * 16]  # a batch of 2 sequences of 16 tokens
    assert figure.layout.xaxis.title.text == "tokens read in training"
    assert "tokens" in trace(figure, "ResFormer").hovertemplate
    table = pd.DataFrame(
        {
            "step": range(0, 700 * 32, 32),
            "value": 1.0,
            "run": "a",
            "architecture": "transformer",
            "metric": "train_loss",
        }
    )
    figure = curves([records(table.to_dict("records"))], title="", smooth=3)
    under = on_tokens(figure).layout.title.subtitle.text
    assert "running mean over 114 tokens (3 records)" in under, "(700 - 1) * 32 tokens are 600 points of 38"
    assert "each point the mean of all records within 38 tokens" in under
    drawing = drawn(ask, training.validation_loss, x="tokens", compare=1, b=B)
    minus = drawing.table[drawing.table["run"].str.startswith("A − B")]
    assert minus.groupby("seed")["tokens"].agg(list).to_dict() == {0: [0, 320], 1: [0, 320]}, "of every pair of seeds"
    assert (drawing.table["tokens"] == 32 * drawing.table["step"]).all(), "the numbers have both"
    assert drawing.sentence == "A − B at 320 tokens: 0.2 nats, mean over 2 paired seeds."


def test_a_running_mean_is_over_the_records_of_each_run():
    """Seed 0 logs 0, 3, 0, 3, ... at 0, 10, 20, ... and seed 1 logs 1 at steps between; three of seed 0's records average 1 or 2."""
    rows = [{"run": "a", "seed": 0, "step": 10 * i, "value": 3.0 * (i % 2)} for i in range(7)]
    rows += [{"run": "b", "seed": 1, "step": 10 * i + 5, "value": 1.0} for i in range(7)]
    same = {"architecture": "transformer", "metric": "train_loss", "unit": "nats"}
    figure = curves([records([same | row for row in rows])], title="", smooth=3)
    curve = trace(figure, "Transformer")
    assert dict(zip(curve.x, curve.y, strict=True)) == pytest.approx(
        {0: 1.5, 10: 1, 20: 2, 30: 1, 40: 2, 50: 1, 60: 1.5} | {10 * i + 5: 1 for i in range(7)}
    )
    assert "running mean over 30 steps (3 records)" in figure.layout.title.subtitle.text
    slow = [{"run": "b", "seed": 1, "step": 50 * i, "value": 1.0} for i in range(3)]
    figure = curves([records([same | row for row in rows[:7] + slow])], title="", smooth=3)
    assert "running mean over 3 records each" in figure.layout.title.subtitle.text.replace("<br>", " ")
    figure = on_tokens(figure.update_layout(title_subtitle_text="mean over 4096<br>steps"))
    assert figure.layout.title.subtitle.text == "mean over 4,096<br>tokens"


# ---- gradients and coefficients ----


def test_gradients_of_two_runs_are_divided(ask):
    for view in (training.gradients, training.gradients_over_time):
        figure = drawn(ask, view, compare=1, b=B).figure
        assert [t.name for t in figure.data] == ["A: ResFormer · s0", "B: Transformer · s0", "A ÷ B"]
        told = np.asarray(figure.data[2].z)
        assert told[np.isfinite(told)] == pytest.approx(0.0)  # the rows between matrices are blank
        assert np.isfinite(told).any(axis=1).sum() in (2, 4)
        assert figure.data[2].coloraxis == "coloraxis2"
        assert figure.layout.coloraxis2.cmin == -figure.layout.coloraxis2.cmax


def test_norms_after_clipping_are_drawn_and_called_that():
    rows = [
        {"run": "x", "architecture": "mine", "step": s, "metric": "gradient_norm", "part": "W_Q", "layer": n, "value": 1.0,
         "variant": v} for s in (0, 1) for n in (0, 1) for v in ("clipped", "output")
    ]  # fmt: skip
    assert len(matrices(records(rows))) == 4
    assert at_step(matrices(records(rows)), 0)["step"].tolist() == [0, 0]


def test_coefficients_are_of_one_series_or_of_a_and_b(ask):
    assert training.learning(ask, Link("training", {"a": A})) == ["denseformer"]
    alone = drawn(ask, training.learned_coefficients)
    assert [t.name for t in alone.figure.data] == ["embedding", "output of block 0"]
    pair = drawn(ask, training.learned_coefficients, a="text-denseformer-s0", b="text-denseformer-s1", compare=1).figure
    assert [a.text for a in pair.layout.annotations] == ["A: DenseFormer · s0", "B: DenseFormer · s1", "A − B"]
    assert [t.y for t in pair.data][-1] == pytest.approx([0, 0])
    assert [t.xaxis for t in pair.data] == ["x", "x", "x2", "x2", "x3", "x3"]


# ---- what a recorder took ----


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    recorded(folder / "mine")
    return Source(folder)


def recorded(path, steps=range(4)):
    info = {"format": 1, "architecture": "TheirNet", "seed": 0, "model": {"n_layers": 3}, "data": {"kind": "recorded"},
            "recorder": {"every": 1}}  # fmt: skip
    write_json(path / "run.json", info)
    write_parquet(rows_of(steps), path / "telemetry" / f"{min(steps):06d}-{max(steps) + 1:06d}.parquet")


def rows_of(steps):
    rows = [
        {"run": "mine", "architecture": "TheirNet", "seed": 0, "step": s, "metric": "update_ratio", "part": part, "layer": n,
         "value": 0.1 * n + s} for s in steps for n in range(3) for part in ("W_Q", "W_V")
    ]  # fmt: skip
    rows += [
        {"run": "mine", "seed": 0, "step": s, "metric": "seconds_per_step", "value": 0.5, "unit": "s"} for s in steps
    ]
    return records(rows)


def test_recorded_quantities_have_a_panel_for_each_layer(recording):
    link = Link("training", {"set": "recorded"})
    assert training.present(training.logged_quantities(recording, link)) == ["inside", "pace"]
    assert training.places(recording, link, "update_ratio") == ["W_Q", "W_V"]
    drawing = training.recorded(recording, link.but(where="W_V"))
    assert [a.text for a in drawing.figure.layout.annotations] == ["layer 0", "layer 1", "layer 2"]
    assert drawing.figure.data[2].y[-1] == pytest.approx(3.2)
    with pytest.raises(UnknownName, match="place"):
        training.recorded(recording, link.but(where="W_K"))


def test_tokens_are_refused_where_nobody_knows_them(recording):
    with pytest.raises(WorkbenchError, match="the tokens per step of mine are unknown"):
        training.seconds(recording, Link("training", {"set": "recorded", "x": "tokens"}))


def test_speeds_of_two_devices_are_not_averaged(populated, tmp_path):
    for seed, device in enumerate(("cpu", "cuda")):
        path = (
            dashboard.copied(populated / f"text-resformer-s{seed}", tmp_path / f"text-resformer-s{seed}") / "run.json"
        )
        write_json(path, read_json(path) | {"machine": {"device": device, "float32_matmul": "highest"}})
    drawing = training.pace(Source(tmp_path), Link("training"))
    assert drawing.figure.data[0].x == ("ResFormer · cpu", "ResFormer · cuda")
    assert drawing.figure.data[0].y == (1000.0, 1001.0)


# ---- thinning and differences ----


def test_long_curves_are_thinned_to_means_of_neighbouring_steps():
    frame = records([{"run": "r", "step": s, "metric": "train_loss", "value": float(s)} for s in range(10)])
    kept, width = thinned(frame, most=5)
    assert width == 2
    assert kept["step"].tolist() == [0, 2, 4, 6, 8]
    assert kept["value"].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert thinned(frame, most=10) == (frame, 1) or thinned(frame, most=10)[1] == 1
    figure = curves([pd.concat([frame.assign(step=frame["step"] + 10 * i) for i in range(100)])], title="t")
    assert "each point the mean of all records within 2 steps" in figure.layout.title.subtitle.text


def test_a_difference_of_curves_keeps_the_steps_both_have():
    one = records(
        [{"run": "a", "step": s, "metric": "loss", "value": 2.0 * s, "se": 0.3, "unit": "nats"} for s in (0, 1, 2)]
    )
    other = records(
        [{"run": "b", "step": s, "metric": "loss", "value": 1.0, "se": 0.4, "unit": "nats"} for s in (1, 2, 3)]
    )
    found = curve_difference(one, other)
    assert found["step"].tolist() == [1, 2]
    assert found["value"].tolist() == [1.0, 3.0]
    assert found["se"].tolist() == pytest.approx([0.5, 0.5])
    assert set(found["unit"]) == {"nats, A − B"}
