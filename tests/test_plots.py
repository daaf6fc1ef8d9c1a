"""Figures of records: form, scales, words, colours, alt texts; formation steps from known numbers."""

from __future__ import annotations

import json

import dashboard
import numpy as np
import pandas as pd
import pytest
from plotly.subplots import make_subplots

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.models import ARCHITECTURES
from workbench.plots import training
from workbench.plots.style import PANEL, outer_titles
from workbench.reports.xray_sentences import concentration_text
from workbench.runs.records import provenance, records
from workbench.statistics.formation import formation_steps


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
    assert "higher: more" in figure.layout.yaxis.title.text
    assert "nats" in figure.layout.yaxis.title.text


def test_a_baseline_is_that_of_the_trained_model_and_no_mean_with_random_init():
    frame = of(rows(seeds=1), "importance_entropy")
    control = frame["control"].notna()
    frame.loc[control, "value"] = frame.loc[control, "step"].map({0: 9.0, 20: 1.0}).astype("float64")
    (line,) = named(plots.plot(frame), "uniform causal")
    assert set(line.y) == {1.0}


def test_a_baseline_far_from_all_lines_does_not_squeeze_them_and_is_told():
    frame = of(rows(), "importance_entropy")
    lines = frame.loc[frame["control"].isna(), "value"]
    near = plots.plot(frame)
    assert near.layout.yaxis.range is None
    far = frame.assign(value=frame["value"].where(frame["control"].isna(), lines.min() - 10 * np.ptp(lines)))
    figure = plots.plot(far)
    low, high = figure.layout.yaxis.range
    assert low < lines.min() < lines.max() < high
    assert high - low < 1.2 * np.ptp(lines)
    assert "off the scale: uniform causal" in plots.alt_text(figure)


def test_a_row_without_a_layer_has_no_place_on_a_map():
    frame = of(rows(architectures=("resformer",), seeds=1), "sink_mass", step=20)
    frame.loc[frame["head"] == 1, "layer"] = pd.NA
    (drawn,) = [t for t in plots.plot(frame, form="heads").data if t.type == "heatmap"]
    assert (list(drawn.y), list(drawn.x)) == ([0, 1], [0])


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


def test_error_bars_over_seeds_are_the_range_the_standard_error_or_the_interval():
    frame = of(rows(seeds=2), "token_identity_share", site="v", step=20, layer=0)  # of each model 0.98 and 0.97
    half = {"range": 0.005, "se": 0.005, "ci": 0.005 * 12.7062}
    for spread, expected in half.items():
        (bar,) = plots.plot(frame, spread=spread).data
        assert bar.error_y.array[0] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UnknownName, match="spread 'sd'"):
        plots.plot(frame, spread="sd")


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


def test_metrics_lengths_and_data_never_share_an_axis():
    frame = of(rows(), "importance_entropy")
    figure = plots.plot(pd.concat([frame, frame.assign(T=32)]))
    assert {a.text for a in figure.layout.annotations} == {"T = 16", "T = 32"}
    both = pd.concat([frame, of(rows(), "token_identity_share")])
    assert len(plots.plot(both).layout.annotations) == 3
    with pytest.raises(WorkbenchError, match="panels do not fit"):
        plots.plot(pd.concat([frame.assign(T=t) for t in range(30)]))


def test_panels_of_one_unit_share_their_scales():
    figure = plots.plot(of(rows(), "token_identity_share"))
    assert figure.layout.yaxis2.matches == "y"
    maps = plots.plot(of(rows(), "sink_mass", step=20))
    assert {t.coloraxis for t in maps.data} == {"coloraxis"}
    assert (maps.layout.coloraxis.cmin, maps.layout.coloraxis.cmax) == (0, 1), "a share is never negative"
    assert "uniform causal, 0.05" in maps.layout.title.subtitle.text
    assert 1 < maps.layout.coloraxis.colorbar.x < 1.1, "right beside the map"


def test_a_baseline_between_the_values_of_a_map_is_white_where_the_scale_stays_above_zero():
    frame = of(rows(), "sink_mass", step=20).assign(unit="nats")
    measured = frame["control"].isna()
    for even, white in ((0.035, True), (0.05, False)):
        maps = plots.plot(frame.assign(value=frame["value"].where(measured, even)))
        middle = (maps.layout.coloraxis.cmin + maps.layout.coloraxis.cmax) / 2
        assert (middle == pytest.approx(even)) is white
        assert (f"white: uniform causal, {even}" in maps.layout.title.subtitle.text) is white


def test_only_the_lowest_panel_of_each_column_names_its_axis():
    figure = make_subplots(2, 2).update_xaxes(title_text="step")
    outer_titles(figure, 3, 2)
    assert [axis.title.text for axis in figure.select_xaxes()][:3] == ["", "step", "step"]


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


def test_the_registry_supplies_the_direction_where_a_record_does_not():
    frame = of(rows(), "importance_entropy").assign(provenance=provenance(assumed=False, key="k"))
    assert "lower: more concentrated" in plots.reading_direction(frame)


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


def test_backgrounds_are_transparent():
    figure = plots.plot(of(rows(), "importance_entropy"))
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"


# ---- the race --------------------------------------------------------------------------------------------------------


def race(curves):
    return records(
        {"run": f"{a}-{s}", "architecture": a, "seed": s, "step": i, "metric": "copy_loss", "value": v, "unit": "nats"}
        for (a, s), values in curves.items()
        for i, v in enumerate(values)
    )


def test_formation_steps_stand_in_a_row_for_each_model():
    frame = race({("svformer", 0): [4.0, 2.0, 1.99, 3.0], ("transformer", 0): [4.0, 3.9, 3.8, 2.0]})
    assert list(plots.formation_table(formation_steps(frame))["seed 0"]) == ["step 2", "not formed"]


def curve(step):
    return [4.0] * step + [1.0] * (10 - step)


def test_the_race_marks_each_seed_on_the_line():
    figure = plots.race_figure(race({("svformer", 0): curve(2), ("svformer", 1): curve(4)}))
    (marks,) = [t for t in figure.data if t.mode == "markers"]
    assert list(marks.x) == [2, 4]
    assert list(marks.y) == [2.0, 2.0]
    assert figure.layout.shapes[0].y0 == 2.0
    with pytest.raises(WorkbenchError, match="copy_loss"):
        plots.race_figure(rows())


# ---- attention, ablation, training -----------------------------------------------------------------------------------


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


def test_ablation_of_a_model_without_deep_values_draws_the_first_layers():
    figure = plots.ablation(rows(architectures=("svformer",)))
    assert [list(t.x) for t in figure.data] == [["0"], ["0"]]
    assert "no later layer has values of its own" in figure.layout.title.subtitle.text


def test_whiskers_of_an_ablation_are_the_seed_range_or_the_standard_error_and_say_which():
    both, one = plots.ablation(rows()), plots.ablation(rows(seeds=1))
    assert "whisker: range over seeds" in both.layout.title.subtitle.text
    assert "whisker: standard error over documents" in one.layout.title.subtitle.text
    assert [list(t.error_y.array) for t in one.data[:2]] == [[0.03, 0.03]] * 2


def test_relative_pairs_by_seed():
    frame = of(rows(what=dashboard.telemetry), "train_loss")
    found = plots.relative_to_baseline(frame)
    assert set(found["architecture"]) == {"resformer", "svformer"}
    np.testing.assert_allclose(found["value"], 0, atol=1e-12)
    with pytest.raises(WorkbenchError, match="shares a seed"):
        plots.relative_to_baseline(frame[frame["architecture"] == "svformer"])


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (-0.1, 0.35, "0.8 1 1.25 1.6 2"), (0.3, 0.95, "2 2.5 3.2 4 5 6.3 8"), (0.0, 1.0, "1 2 5 10"),
        (0.0, 2.0, "1 2 5 10 20 50 100"), (-1.5, 2.0, "0.1 1 10 100"),
    ],
)  # fmt: skip
def test_ticks_between_logarithms_are_plain_numbers_as_dense_as_they_fit(low, high, texts):
    ticks = training._ticks(low, high)
    assert ticks["ticktext"] == texts.split()
    np.testing.assert_allclose(10 ** np.array(ticks["tickvals"]), [float(t) for t in texts.split()])


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
    assert plots.pace_figure(frame).data[0].y[0] == pytest.approx(1000.5)


def test_panels_with_labels_of_their_own_stand_further_apart():
    alike = [(str(i), pd.DataFrame(np.ones((3, 2)), columns=[0, 1])) for i in range(4)]
    apart = [*alike[:3], ("3", pd.DataFrame(np.ones((3, 2)), columns=[0, 2]))]
    heights = [training._maps(grids, "at", compare=False, height=100).layout.height for grids in (alike, apart)]
    assert heights[1] - heights[0] == 2 * (96 - 40), "two rows of panels"


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


def test_the_table_keeps_what_says_something():
    found = plots.table(of(rows(), "importance_entropy"))
    assert "provenance" not in found
    assert "head" not in found
    assert list(found["layer"].unique()) == [0, 1]


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


def test_an_xray_of_records_without_parts_says_the_whole():
    known = {"run": "r", "architecture": "resformer", "seed": 0, "step": 9, "metric": "concentration_parts", "layer": 1}
    said = concentration_text(
        records([known | {"value": 0.5, "se": 0.01}, known | {"variant": "theirs", "value": 0.5}])
    )
    assert said.startswith(
        "Concentrated: most in layer 1, 0.50 ± 0.01 nats from uniform causal attention (0 by definition)."
    )


def test_a_spectrum_is_curves_over_ranks_for_each_layer_falling_on_a_logarithmic_axis():
    common = {"metric": "spectrum", "site": "own_v", "run": "a", "architecture": "resformer", "seed": 0, "step": 3,
              "data": "validation", "T": 8, "n": 4, "unit": "share of the trace"}  # fmt: skip
    frame = records(common | {"layer": n, "index": i, "value": 10.0**-i} for n in range(2) for i in range(4))
    figure = plots.plot(frame)
    assert [a.text for a in figure.layout.annotations] == ["layer 0", "layer 1"]
    assert {figure.layout.yaxis.type, figure.layout.yaxis2.type} == {"log"}
    assert list(figure.data[1].y) == pytest.approx([1, 0.1, 0.01, 0.001])
    assert list(figure.data[1].x) == [0, 1, 2, 3]
    two = plots.compared([frame, frame.assign(value=frame["value"] / 2, architecture="transformer")])
    by_title = dict(zip([a.text for a in two.layout.annotations], two.select_yaxes(), strict=False))
    minus = [axis for text, axis in by_title.items() if text.startswith(plots.MINUS)]
    assert len(minus) == 2
    assert all(axis.type is None for axis in minus)
    assert two.layout.meta["least"] == 2 * PANEL, "narrower, an axis would be written over the panel before"
