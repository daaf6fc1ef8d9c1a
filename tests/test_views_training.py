"""What the training page draws: losses and their differences, gradients, coefficients, recorded quantities, and only new parts."""

from __future__ import annotations

import shutil

import dashboard
import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.files import write_json
from workbench.plots.training import at_step, curve_difference, curves, matrices, thinned
from workbench.runs import table_cache
from workbench.runs.records import records, write_parquet
from workbench.runs.run import Run
from workbench.runs.table_cache import TelemetryCache
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


def test_each_domain_has_a_panel_of_its_own(ask):
    figure = drawn(ask, training.validation_loss, domain="each").figure
    assert [a.text for a in figure.layout.annotations] == ["prose", "python"]


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


def test_a_and_b_share_a_panel_and_their_difference_has_its_own(ask):
    drawing = drawn(ask, training.validation_loss, compare=1, b=B)
    a, b, minus = (trace(drawing.figure, n) for n in ("A: ResFormer · s0", "B: Transformer · s0", "A − B"))
    assert minus.y == pytest.approx([0.2, 0.2])
    assert np.subtract(a.y, b.y) == pytest.approx(minus.y)
    assert a.yaxis == b.yaxis != minus.yaxis
    assert a.line.color == plots.colour("resformer")
    with pytest.raises(WorkbenchError, match="beside the losses"):
        drawn(ask, training.relative, compare=1, b=B)


def test_one_run_at_two_steps_is_one_training(ask):
    figure = drawn(ask, training.validation_loss, compare=1, b=A, step=20, step_b=0).figure
    assert [t.name for t in figure.data if t.hoverinfo != "skip"] == ["A: ResFormer · s0"]


def test_losses_stand_over_tokens(ask):
    figure = drawn(ask, training.validation_loss, x="tokens").figure
    assert list(trace(figure, "ResFormer").x) == [0, 10 * 2 * 16]  # a batch of 2 sequences of 16 tokens
    assert figure.layout.xaxis.title.text == "tokens read in training"
    assert "tokens" in trace(figure, "ResFormer").hovertemplate


def test_the_training_loss_is_smoothed_and_says_so(ask):
    plain = drawn(ask, training.train_loss, smooth=1).figure
    assert trace(plain, "ResFormer").y[3] == pytest.approx(4.0 - 0.3 - 0.005)
    assert "running mean" not in plain.layout.title.subtitle.text
    smooth = drawn(ask, training.train_loss).figure  # 20 steps, of which a fifth
    assert "running mean over 4 steps" in smooth.layout.title.subtitle.text
    assert smooth.data[1].y[0] < plain.data[1].y[0]


def test_the_race_marks_when_each_seed_learned_and_two_runs_are_subtracted(ask):
    whole = drawn(ask, training.copy_loss, a="race-svformer-s0").figure
    assert list(trace(whole, "SVFormer: crossing").x) == [5, 6, 7]
    two = drawn(ask, training.copy_loss, a="race-svformer-s0", b="race-transformer-s0", compare=1)
    assert min(trace(two.figure, "A − B").y) == -3.0


@pytest.mark.parametrize(
    ("view", "options"),
    [
        (training.validation_loss, {"x": "stepp"}),
        (training.validation_loss, {"domain": "eech"}),
        (training.learned_coefficients, {"of": "densformer"}),
    ],
)
def test_choices_that_are_not_there_are_refused_by_name(ask, view, options):
    with pytest.raises(UnknownName, match="did you mean"):
        drawn(ask, view, **options)


def test_what_nobody_wrote_down_is_said(ask):
    with pytest.raises(WorkbenchError, match="did not log seconds per step"):
        drawn(ask, training.seconds)


def test_the_parts_of_the_page_are_those_that_have_numbers(ask):
    link = Link("training", {"a": A})
    assert training.present(training.logged_quantities(ask, link)) == ["loss", "gradients", "coefficients", "pace"]
    race = Link("training", {"a": "race-svformer-s0"})
    assert training.present(training.logged_quantities(ask, race)) == ["loss", "gradients", "pace"]


# ---- gradients and coefficients ----


def test_gradients_are_those_of_the_last_step_written_down_before(ask):
    drawing = drawn(ask, training.gradients, step=8)
    assert set(drawing.table["step"]) == {0}
    late = drawn(ask, training.gradients, at=15)
    assert set(late.table["step"]) == {10}
    first = trace(late.figure, "Transformer")
    assert list(first.x) == ["W_Q", "W_V"]
    assert np.asarray(first.z)[:, 0] == pytest.approx(np.log10([0.01, 0.02]), abs=1e-6)
    assert "training step 10" in late.figure.layout.title.subtitle.text


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


# ---- thinning and differences ----


def test_long_curves_are_thinned_to_means_of_neighbouring_steps():
    frame = records([{"run": "r", "step": s, "metric": "train_loss", "value": float(s)} for s in range(10)])
    kept, width = thinned(frame, most=5)
    assert width == 2
    assert kept["step"].tolist() == [0, 2, 4, 6, 8]
    assert kept["value"].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert thinned(frame, most=10) == (frame, 1) or thinned(frame, most=10)[1] == 1
    figure = curves([pd.concat([frame.assign(step=frame["step"] + 10 * i) for i in range(100)])], title="t")
    assert "each point the mean of 2 steps" in figure.layout.title.subtitle.text


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


# ---- telemetry that grows ----


def test_only_parts_that_are_new_are_read_again(tmp_path, monkeypatch):
    path, opened = tmp_path / "mine", []
    recorded(path)
    real = table_cache.read_tables
    monkeypatch.setattr(
        table_cache, "read_tables", lambda files, *how: opened.append(files[0].name) or real(files, *how)
    )
    seen, source = TelemetryCache(), Source(tmp_path)

    def rows():
        entries = source.catalogue().entries
        frame, problems = seen.rows(entries, ["update_ratio"])
        assert not problems
        stored = Run.open(path).telemetry("metric == 'update_ratio'")
        shown = frame.astype(stored.dtypes.to_dict()).assign(run=stored["run"], architecture=stored["architecture"])
        pd.testing.assert_frame_equal(shown, stored)
        return frame

    assert len(rows()) == 24
    rows()
    assert opened == ["000000-000004.parquet"]
    write_parquet(rows_of(range(4, 6)), path / "telemetry" / "000004-000008.parquet")
    assert len(rows()) == 36
    write_parquet(rows_of(range(4, 8)), path / "telemetry" / "000004-000008.parquet")  # the last part grows
    assert len(rows()) == 48
    assert opened[1:] == ["000004-000008.parquet"] * 2
    write_parquet(rows_of(range(2)), path / "telemetry" / "000000-000004.parquet")  # begun anew
    (path / "telemetry" / "000004-000008.parquet").unlink()
    assert len(rows()) == 12
    assert seen.metrics(source.catalogue().entries) == {"update_ratio", "seconds_per_step"}


def test_a_damaged_part_names_its_run_and_leaves_the_others(tmp_path):
    for name in ("mine", "other"):
        recorded(tmp_path / name)
    part = tmp_path / "mine" / "telemetry" / "000000-000004.parquet"
    part.write_bytes(part.read_bytes()[:50])
    frame, problems = TelemetryCache().rows(Source(tmp_path).catalogue().entries)
    assert set(frame["run"]) == {"other"}
    assert list(problems) == ["mine"]
    assert "telemetry" in problems["mine"]
