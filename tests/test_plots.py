"""Figures of records: form, scales, words, colours, alt texts; formation steps from known numbers."""

from __future__ import annotations

import json

import dashboard
import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.models import ARCHITECTURES
from workbench.plots.attention_maps import per_head, percentage
from workbench.plots.style import with_signs
from workbench.plots.training_and_gradient_figures import gradient_layers
from workbench.runs.records import provenance, records


def rows(kind="text", architectures=("transformer", "resformer", "svformer"), seeds=2, what=dashboard.measured):
    common = [{"run": f"{kind}-{a}-s{s}", "architecture": a, "seed": s} for a in architectures for s in range(seeds)]
    return records(row for c in common for row in what(c, kind))


def of(frame, metric, **equal):
    frame = frame[frame["metric"] == metric]
    for name, value in equal.items():
        frame = frame[frame[name] == value]
    return frame


def named(figure, name):
    return [t for t in figure.data if t.name == name]


def test_a_layer_profile_has_lines_bands_init_and_baseline():
    figure = plots.plot(of(rows(), "importance_entropy"))
    (line,) = [t for t in named(figure, "ResFormer") if t.mode == "lines+markers"]
    assert list(line.x) == [0, 1]
    np.testing.assert_allclose(line.y, [2.3, 2.4])
    assert line.line.color == ARCHITECTURES["resformer"].colour
    assert named(figure, "ResFormer at step 0")[0].line.dash == "dash"
    assert named(figure, "uniform causal")[0].line.dash == "dot"
    said = figure.layout.title.subtitle.text
    for word in ("validation", "T = 16", "n = 4 documents", "2 seeds", "random init"):
        assert word in said
    assert "lower: more concentrated" in figure.layout.yaxis.title.text
    assert "nats" in figure.layout.yaxis.title.text


def test_a_baseline_is_that_of_the_trained_model_and_no_mean_with_random_init():
    frame = of(rows(seeds=1), "importance_entropy")
    control = frame["control"].notna()
    frame.loc[control, "value"] = frame.loc[control, "step"].map({0: 9.0, 20: 1.0}).astype("float64")
    (line,) = named(plots.plot(frame), "uniform causal")
    assert set(line.y) == {1.0}


def test_a_baseline_that_differs_between_models_is_named_as_their_mean():
    frame = of(rows(architectures=("transformer", "resformer")), "importance_entropy")
    control = frame["control"].notna()
    assert named(plots.plot(frame), "uniform causal")
    frame.loc[control, "value"] = np.where(frame.loc[control, "architecture"] == "resformer", 3.0, 1.0)
    (line,) = named(plots.plot(frame), "uniform causal, mean over models")
    assert set(line.y) == {2.0}
    assert "uniform causal, mean over models" in line.hovertemplate


def test_the_band_is_the_seed_range_or_the_standard_error_and_says_which():
    many = plots.plot(of(rows(), "token_identity_share", site="v", step=20))
    (band,) = named(many, "ResFormer band")
    assert max(band.y) == pytest.approx(0.98)
    assert min(band.y) == pytest.approx(0.77)
    assert "range over seeds" in many.layout.title.subtitle.text
    one = plots.plot(of(rows(seeds=1), "token_identity_share", site="v", step=20))
    assert not named(one, "ResFormer band"), "a band is of seeds"
    (line,) = named(one, "ResFormer")
    assert max(np.add(line.y, line.error_y.array)) == pytest.approx(1.0)
    assert "one seed: ± standard error over documents" in one.layout.title.subtitle.text


def test_the_standard_error_of_a_mean_of_heads_is_called_an_upper_bound():
    """The mean of two heads that vary in opposite ways over documents does not vary: the mean of their errors is no error of it."""
    one = {
        "run": "a",
        "architecture": "transformer",
        "seed": 0,
        "step": 20,
        "metric": "sink_mass",
        "se": 0.1,
        "n": 4,
        "value": 0.5,
    }
    frame = records(one | {"layer": n, "head": h} for n in range(2) for h in range(2))
    assert "over documents (averaged like the values: an upper bound)" in plots.plot(
        frame, form="profile"
    ).layout.title.subtitle.text.replace("<br>", " ")
    assert "upper bound" not in plots.plot(frame[frame["head"] == 0], form="profile").layout.title.subtitle.text


def test_error_bars_over_seeds_are_the_range_the_standard_error_or_the_interval():
    frame = of(rows(seeds=2), "token_identity_share", site="v", step=20, layer=0)  # of each model 0.98 and 0.97
    half = {"range": 0.005, "se": 0.005, "ci": 0.005 * 12.7062}
    for spread, expected in half.items():
        (bar,) = plots.plot(frame, spread=spread).data
        assert bar.error_y.array[0] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UnknownName, match="spread 'sd'"):
        plots.plot(frame, spread="sd")


@pytest.mark.fast(2)
def test_a_profile_has_no_panel_for_a_matrix_without_layers():
    def norms(common, _):
        return [common | {"metric": "gradient_norm", "part": part, "layer": layer, "value": 1.0, "step": 20, "unit": "loss per weight"}
                for part in ("W_E", "W_V", "0_attn_out:1_mlp_out") for layer in ((None,) if part == "W_E" else (0, 1))]  # fmt: skip

    titles = [note.text for note in plots.plot(rows(what=norms), form="profile").layout.annotations]
    assert titles == ["W_V", "attention 0 to MLP 1"]


def test_two_runs_of_one_seed_count_as_one_seed():
    frame = of(rows(architectures=("transformer",)), "importance_entropy", step=20)
    again = frame[frame["seed"] == 1].assign(run="again", value=9.0)
    figure = plots.plot(pd.concat([frame, again], ignore_index=True), spread="ci")
    (line,) = [t for t in named(figure, "Transformer") if t.mode == "lines+markers"]
    first, second = (frame.loc[(frame["seed"] == s) & frame["control"].isna(), "value"].to_numpy() for s in (0, 1))
    np.testing.assert_allclose(line.y, (first + (second + 9.0) / 2) / 2)
    assert "2 seeds per model" in figure.layout.title.subtitle.text
    assert "runs of one seed averaged" in figure.layout.title.subtitle.text.replace("<br>", " ")


def test_a_line_whose_points_have_different_numbers_of_seeds_says_so():
    frame = of(rows(seeds=2, architectures=("resformer",)), "token_identity_share", site="v", step=20)
    later = frame.assign(step=40)
    figure = plots.plot(pd.concat([frame[frame["seed"] == 0], later]), form="steps")
    assert "ResFormer: 1 to 2 seeds, depending on the step" in figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "depending on" not in plots.plot(pd.concat([frame, later]), form="steps").layout.title.subtitle.text


def test_numbers_of_a_model_whose_seeds_end_at_different_steps_say_how_many_seeds_they_have():
    """A seed that stopped early is in no mean of a later step, and its last step is in no mean of the others' last."""
    one = {"architecture": "denseformer", "n": 4, "data": "validation"}
    frame = records(
        one | {"run": f"s{s}", "seed": s, "step": step, "metric": metric, "layer": n, "value": 10.0**s, **axes}
        for s in range(3) for step in ((0, 8, 20) if s else (0, 8)) for n in range(2)
        for metric, axes in (("sink_mass", {"head": 0}), ("coefficient", {"part": "own"}), ("gradient_norm", {"part": "W_V"}),
                             ("value_ablation", {"variant": "zero"}))
    )  # fmt: skip
    few, at_20 = "DenseFormer: 2 to 3 seeds, depending on the step", "DenseFormer at step 20: 2 of 3 seeds"
    profile = plots.plot(of(frame, "sink_mass"), form="profile")
    maps = plots.plot(of(frame.assign(head=frame["layer"]), "sink_mass", step=20), form="heads")
    drawn = [(plots.gradient_map(frame), few), (plots.coefficients_figure(frame), few), (profile, at_20)]
    for figure, note in drawn:
        said = figure.layout.title.subtitle.text.replace("<br>", " ")
        assert note in said
        assert "3 seeds per model" in said
    assert "seeds," not in maps.layout.title.subtitle.text, "none is lacking in what is drawn"
    assert "trained: step 8, 20" in profile.layout.title.subtitle.text.replace("<br>", " ")
    np.testing.assert_allclose(named(profile, "DenseFormer")[-1].y, [55, 55])
    zero = plots.ablation(frame)
    np.testing.assert_allclose(zero.data[0].y, [55])
    assert "2 seeds per model" in zero.layout.title.subtitle.text


def test_a_profile_of_models_measured_at_different_steps_names_them():
    frame = of(rows(seeds=1), "importance_entropy")
    later = frame["step"].mask((frame["architecture"] == "resformer") & (frame["step"] > 0), 40)
    said = plots.plot(frame.assign(step=later), form="profile").layout.title.subtitle.text.replace("<br>", " ")
    assert "trained: ResFormer step 40, SVFormer step 20, Transformer step 20" in said


def test_a_map_of_small_shares_spends_its_colours_on_them_and_prints_a_true_minus():
    cell = {"run": "a", "architecture": "transformer", "seed": 0, "metric": "sink_mass", "unit": "share", "step": 0}
    for values, top in (((0.004, 0.02), 0.02), ((0.004, 0.6), 1.0)):
        frame = records(cell | {"layer": n, "head": h, "value": v} for n in (0, 1) for h, v in enumerate(values))
        assert plots.plot(frame, form="heads").layout.coloraxis.cmax == pytest.approx(top)
    frame = records(
        cell | {"layer": n, "head": h, "value": v, "unit": "cosine"} for n in (0, 1) for h, v in enumerate((-0.5, 1))
    )
    assert plots.plot(frame, form="heads").data[0].text[0] == ["−0.50", "1.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "form"),
    [("importance_entropy", "profile"), ("token_importance", "positions"), ("sink_mass", "heads"), ("loss", "bars")],
)
def test_the_form_follows_from_the_axes(metric, form):
    frame = of(rows(), metric)
    assert plots.form_of(frame) == form
    kinds = {t.type for t in plots.plot(frame).data}
    assert kinds == {"profile": {"scatter"}, "positions": {"heatmap"}, "heads": {"heatmap"}, "bars": {"bar"}}[form]


def test_steps_become_curves_and_may_be_logarithmic():
    frame = of(rows(what=dashboard.telemetry), "train_loss")
    assert plots.form_of(frame) == "steps"
    figure = plots.plot(frame, log_x=True, smooth=5)
    assert figure.layout.xaxis.type == "log"
    assert "running mean over 5 steps" in figure.layout.title.subtitle.text


@pytest.mark.slow
def test_metrics_lengths_and_data_never_share_an_axis():
    frame = of(rows(), "importance_entropy")
    figure = plots.plot(pd.concat([frame, frame.assign(T=32)]))
    assert {a.text for a in figure.layout.annotations} == {"T = 16", "T = 32"}
    both = pd.concat([frame, of(rows(), "token_identity_share")])
    assert len(plots.plot(both).layout.annotations) == 3
    with pytest.raises(WorkbenchError, match="panels do not fit"):
        plots.plot(pd.concat([frame.assign(T=t) for t in range(30)]))


def test_nothing_to_plot_and_unknown_forms_are_refused():
    with pytest.raises(WorkbenchError, match="no records"):
        plots.plot(records([]))
    frame = of(rows(), "importance_entropy")
    with pytest.raises(WorkbenchError, match="no records"):
        plots.plot(frame[frame["control"].notna()])
    with pytest.raises(UnknownName, match="profile"):
        plots.plot(frame, form="profiel")


def test_an_assumed_architecture_is_said():
    frame = of(rows(), "importance_entropy").assign(provenance=provenance(assumed=True, key="k", reading="up"))
    assert "architecture assumed" in plots.plot(frame).layout.title.subtitle.text


def test_variants_that_are_read_another_way_say_so():
    frame = rows()
    for variant, said in (
        ("zero", "higher: these values matter more"),
        ("token_mean", "lower: less context is needed"),
    ):
        assert plots.reading_direction(of(frame, "value_ablation", variant=variant)) == said
    kept = of(frame, "value_ablation", variant="zero").assign(variant="kept")
    assert plots.reading_direction(kept) == "higher: less context is needed"
    top = of(frame, "importance_entropy").assign(metric="effective_rank", variant="top_share")
    assert plots.reading_direction(top) == "higher: fewer directions in use"
    assert plots.reading_direction(kept.assign(architecture=plots.MINUS)) != "higher: less context is needed"


# ---- the race --------------------------------------------------------------------------------------------------------


def race(curves):
    return records(
        {"run": f"{a}-{s}", "architecture": a, "seed": s, "step": i, "metric": "copy_loss", "value": v, "unit": "nats"}
        for (a, s), values in curves.items()
        for i, v in enumerate(values)
    )


def curve(step):
    return [4.0] * step + [1.0] * (10 - step)


def test_the_race_marks_each_seed_on_the_line():
    figure = plots.race_figure(race({("svformer", 0): curve(2), ("svformer", 1): curve(4)}))
    (marks,) = [t for t in figure.data if t.mode == "markers"]
    assert list(marks.x) == [2, 4]
    assert list(marks.y) == [2.0, 2.0]
    assert figure.layout.shapes[0].y0 == 2.0
    first_empty = {("svformer", 0): curve(2), ("svformer", 1): [float("nan"), *curve(4)[1:]]}
    (marks,) = [t for t in plots.race_figure(race(first_empty)).data if t.mode == "markers"]
    assert (list(marks.x), list(marks.y)) == ([2, 4], [2.0, 2.0]), "a batch without copied tokens has no copy loss"
    with pytest.raises(WorkbenchError, match="copy_loss"):
        plots.race_figure(rows())


# ---- attention, ablation, training -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "probability", "difference"),
    [(0.988, "98.8%", "+98.8"), (0.0005, "0.1%", "+0.1"), (0.0004, "<0.1%", "<0.1"), (0.0, "<0.1%", "0"),
     (-0.0004, None, ">−0.1"), (-0.0611, None, "−6.1")],
)  # fmt: skip
def test_no_probability_and_no_difference_but_an_exact_0_is_written_as_0(share, probability, difference):
    assert percentage(share, difference=True) == difference
    assert probability is None or percentage(share) == probability


def test_an_attention_map_masks_the_future_and_keeps_tokens_apart():
    figure = plots.attention_map_figure(dashboard.pattern(3), ["<b>", "a", "a"])
    (trace,) = figure.data
    assert np.isnan(trace.z[0, 1])
    assert trace.z[2, 0] == pytest.approx(1 / 3)
    assert list(trace.x) == ["0:&lt;b&gt;", "1:a", "2:a"]
    assert figure.layout.yaxis.autorange == "reversed"
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    with pytest.raises(WorkbenchError, match="does not fit"):
        plots.attention_map_figure(dashboard.pattern(3), ["a"])


def test_ablation_leaves_the_first_layer_out_and_says_who_has_no_deep_values():
    figure = plots.ablation(rows())
    assert {a.text for a in figure.layout.annotations} == {"Transformer", "ResFormer"}
    assert "SVFormer: no values of its own" in figure.layout.title.subtitle.text
    zero = next(t for t in figure.data if t.name == "zero")
    assert list(zero.x) == ["1", "1–1"]
    assert zero.y[0] == pytest.approx(0.205)


def test_whiskers_of_an_ablation_are_the_seed_range_or_the_standard_error_and_say_which():
    both, one = plots.ablation(rows()), plots.ablation(rows(seeds=1))
    assert "whisker: range over seeds" in both.layout.title.subtitle.text
    assert "whisker: standard error over documents" in one.layout.title.subtitle.text
    assert [list(t.error_y.array) for t in one.data[:2]] == [[0.03, 0.03]] * 2


def test_an_ablation_at_several_steps_draws_the_last_one_and_no_mean_over_training():
    frame = rows()
    early = frame.assign(step=0, value=frame["value"] + 10)
    figures = [plots.ablation(each) for each in (frame, pd.concat([early, frame]))]
    assert [list(t.y) for t in figures[1].data] == [list(t.y) for t in figures[0].data]
    assert [list(t.error_y.array) for t in figures[1].data] == [list(t.error_y.array) for t in figures[0].data]


def test_relative_pairs_by_seed():
    frame = of(rows(what=dashboard.telemetry), "train_loss")
    found = plots.relative_to_baseline(frame)
    assert set(found["architecture"]) == {"resformer", "svformer"}
    np.testing.assert_allclose(found["value"], 0, atol=1e-12)
    with pytest.raises(WorkbenchError, match="shares a seed"):
        plots.relative_to_baseline(frame[frame["architecture"] == "svformer"])


@pytest.mark.slow
def test_gradients_and_coefficients_are_drawn():
    frame = rows(what=dashboard.telemetry, architectures=("denseformer", "transformer"))
    norms = plots.gradient_map(frame)
    # the first layer below, as in the other maps; a blank row between matrices
    assert list(norms.data[0].y) == ["W_V 0", "W_V 1", "  ", "W_Q 0", "W_Q 1"]
    assert norms.layout.yaxis.ticktext == ("W_V", "W_Q")
    assert norms.data[0].z[1, 0] == pytest.approx(np.log10(0.02), abs=1e-6)
    learned = plots.coefficients_figure(frame)
    assert [t.name for t in learned.data] == ["embedding", "output of block 0"]
    deeper = records(
        {"run": "a", "architecture": "denseformer", "seed": 0, "metric": "coefficient", "part": "own", "layer": n, "step": s, "value": n}
        for n in range(3) for s in (0, 1)
    )  # fmt: skip
    assert [t.yaxis for t in plots.coefficients_figure(deeper).data] == ["y", "y2", "y3"], "a panel for each layer"
    assert [note.text for note in plots.coefficients_figure(deeper).layout.annotations] == [
        "layer 0",
        "layer 1",
        "layer 2",
    ]
    assert [note.text for note in learned.layout.annotations] == ["after block 0"], "averages of DenseFormer"
    assert plots.pace_figure(frame).data[0].y[0] == pytest.approx(1000.5)
    lacking = frame[~((frame["architecture"] == "transformer") & (frame["part"] == "W_V") & (frame["layer"] == 1))]
    lacking = lacking.assign(value=lacking["value"] / 1000)
    cells = [(n, part) for n, part in lacking[lacking["part"].isin(["W_V", "W_Q"])].groupby("architecture")]
    by_layer = gradient_layers(cells)
    assert "blank: no such matrix" in by_layer.layout.title.subtitle.text.replace("<br>", " ")
    assert {"", "2.0e−5"} & {text for trace in by_layer.data for row in trace.text for text in row}, "short numbers"
    assert by_layer.layout.meta["least"] > plots.gradient_map(frame).layout.meta["least"], "a narrow page stacks them"


def test_sentences_have_three_digits_true_minus_signs_and_a_fixed_space_before_percent():
    assert with_signs("-0.12345 and 50% to 70 % of A - B, 5-3") == "−0.123 and 50\u00a0% to 70\u00a0% of A − B, 5-3"
    assert with_signs("p = 0.0213") == "p\u00a0=\u00a00.0213"
    assert with_signs("55.0%-87.5%") == "55.0\u00a0%-87.5\u00a0%", "no minus between percentages"


def test_panels_of_training_batches_are_named_beside_those_of_held_out_text():
    logged = [{"metric": "chain_loss", "step": s, "value": 3.0 - s} for s in (0, 1, 2)]
    told = [row | {"data": "prose", "T": 8, "variant": "validation"} for row in logged]
    figure = plots.plot(records({"run": "a", "architecture": "transformer", "seed": 0} | row for row in logged + told))
    assert [note.text for note in figure.layout.annotations] == ["training batches", "validation, prose, T = 8"]


# ---- words and files -------------------------------------------------------------------------------------------------


def test_alt_text_names_what_is_seen():
    said = plots.alt_text(plots.plot(of(rows(), "importance_entropy")))
    assert said.startswith("Importance entropy; ")
    assert "ResFormer: from 2.3 at 0" in said
    assert plots.alt_text(of(rows(), "importance_entropy")) == said
    assert "0.333 to 1" in plots.alt_text(plots.attention_map_figure(dashboard.pattern(3), ["a", "b", "c"]))


def test_html_works_offline_and_shares_nothing():
    figure = plots.plot(of(rows(), "importance_entropy"))
    found = plots.html(figure, script=False)
    assert '"showSendToCloud": false' in found
    assert '"displaylogo": false' in found
    assert 'aria-label="Importance entropy' in found
    assert "<script src" not in found
    assert len(found) < 60_000
    assert plots.html(figure, whole=True).startswith("<!doctype html>")


def test_uniform_attention_of_two_models_is_one_line_only_where_it_is_the_same():
    heads = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "sink_mass": [0.1, 0.2]})
    for b, lines in ((0.05, [0.05]), (0.02, [0.05, 0.02])):
        parts = [(name, heads, {"sink_mass": x}) for name, x in (("transformer", 0.05), ("resformer", b))]
        shapes = per_head(parts, {"sink_mass": "sink mass"}, "").layout.shapes
        assert [shape.y0 for shape in shapes if shape.yref == "y"] == lines


LINK = '<a href="http://evil.example">there</a>'


def test_names_from_files_never_become_markup_in_a_figure():
    rows = records(
        {"run": LINK, "architecture": LINK, "seed": 0, "step": 1, "metric": f"m {LINK}", "data": LINK, "variant": LINK,
         "layer": n, "value": 1.0, "n": 2, "unit": LINK, "provenance": json.dumps({"reading": LINK})}
        for n in range(2)
    )  # fmt: skip
    for figure in (plots.plot(rows), plots.narrow(plots.plot(rows))):
        layout = figure.to_dict()["layout"]
        assert "there" in json.dumps(layout)
        assert "<a" not in json.dumps(layout)
        for trace in figure.data:
            assert "<a" not in f"{trace.name}{trace.hovertemplate}{trace.text}"
