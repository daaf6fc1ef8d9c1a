"""A link says what is drawn; the page and the command draw the same from it; A, B and A - B share their scales."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from app.url_widgets import typeset
from workbench import plots
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.places import SHIPPED
from workbench.plots.style import LONG, at_least
from workbench.runs.records import load_records, provenance, records
from workbench.views import Link, Source, drawings, source_of
from workbench.views.depth import layers
from workbench.views.differences import moved_measures
from workbench.views.registered_views import timelapse, views_of
from workbench.views.writing import COLUMN, PAGE, fits, picture, write


@pytest.fixture(scope="module")
def ask(populated):
    return Source(populated)


def drawn(ask, link):
    ((_, drawing),) = drawings(ask, Link.parse(link), "layers")
    return drawing


# ---- links ----


def test_a_link_is_read_from_an_address_and_written_as_its_end():
    link = Link.parse("http://127.0.0.1:8501/depth?metric=sink_mass&compare=1&a=text-resformer-s0&prompt=a%20b%26c")
    assert link.page == "depth"
    assert link.text("prompt") == "a b&c"
    assert link.on("compare")
    assert Link.parse(str(link)) == link
    assert Link.parse("http://127.0.0.1:8501/").page == "start"


@pytest.mark.parametrize(
    "text", ["a + b == c", "resformer+neutreno", "100 % & more; $HOME `x` \"quoted\" 'single' !1", "é ∑\n\t#?"]
)
def test_any_text_comes_back_from_a_link_that_is_pasted_into_a_shell(text):
    link = Link("prompt", {"prompt": text})
    assert Link.parse(str(link)) == link
    pasted = subprocess.run(["bash", "-c", f'printf %s "{link}"'], capture_output=True, text=True, check=True).stdout
    assert Link.parse(pasted) == link


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("dept?metric=loss", UnknownName, "did you mean depth"),
        ("depth?metrik=loss", UnknownName, "did you mean metric"),
        ("depth?metric=a&metric=b", BadData, "twice"),
        ("../../etc/passwd", UnknownName, "page"),
    ],
)
def test_links_that_ask_for_what_is_not_there_are_refused_by_name(text, error, word):
    with pytest.raises(error, match=word):
        Link.parse(text)


def test_a_number_in_a_link_must_be_one():
    with pytest.raises(BadData, match="not an integer"):
        Link("depth", {"step": "two"}).whole("step")


# ---- the selection ----


def test_subjects_default_to_the_last_step_and_b_follows_a(ask):
    (a,) = ask.subjects(Link("depth", {"a": "text-resformer-s1"}))
    assert (a.entry.name, a.step, a.tag) == ("text-resformer-s1", 20, "")
    a, b = ask.subjects(Link("depth", {"a": "text-resformer-s1", "b": "text-svformer-s0", "step": "8", "compare": "1"}))
    assert (a.step, b.step, a.tag, b.tag) == (8, 8, "A", "B")
    assert a.series == "resformer · A: s1, step 8"


@pytest.mark.parametrize(
    ("options", "word"),
    [({"a": "text-resformer-s9"}, "did you mean"), ({"a": "text-resformer-s0", "step": "7"}, "no checkpoint at step 7"),
     ({"set": "nothing"}, "experiment"), ({"a": "../../etc"}, "run")],
)  # fmt: skip
def test_subjects_that_are_not_there_are_refused(ask, options, word):
    with pytest.raises(WorkbenchError, match=word):
        ask.subjects(Link("depth", options))


def test_an_empty_folder_says_what_to_do(tmp_path):
    with pytest.raises(BadData, match="workbench demo"):
        Source(tmp_path).subjects(Link("depth"))


# ---- words ----


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start", "training", "depth", "heads", "prompt", "intervene"])
def test_texts_of_every_figure_have_three_significant_digits_and_true_minus_signs(ask, page):
    drawn = 0
    for view in views_of(page).values():
        for more in ({}, {"compare": "1"}, {"edits": "sink"} if page == "intervene" else {"show": "model"}):
            try:
                drawing = view(ask, Link(page, {"a": "text-resformer-s0"} | more))
            except WorkbenchError:
                continue
            title, under = plots.untitled(drawing.figure)
            cells = [str(c) for t in drawing.figure.data for c in np.ravel(t.text) if t.text is not None]
            for text in (title, typeset(under), typeset(drawing.sentence), *cells):
                text = text.replace("\\", "")
                digits = [n.replace(".", "").lstrip("0") for n in LONG.findall(text)]
                assert all(len(n) < 4 for n in digits), (view.__name__, text)
                assert not re.search(r"(?<![\w.)=:-])-[.\d]", text), (view.__name__, text)
            drawn += 1
    assert drawn > 2


# ---- differences ----


def rows(values, name, **axes):
    common = {"metric": "m", "unit": "nats", "run": name, "architecture": name, "step": 5}
    return records([common | axes | {"layer": n, "value": v, "se": s} for n, (v, s) in enumerate(values)])


def test_a_link_to_a_model_that_ships_is_drawn_beside_runs_of_ones_own(ask):
    assert ask.catalogue().entries
    link = Link.parse("depth?metric=token_identity_share&a=models-resformer-s0&compare=1&b=models-transformer-s0")
    shipped = source_of(link, ask.folder)
    assert [s.entry.name for s in shipped.subjects(link)] == ["models-resformer-s0", "models-transformer-s0"]
    assert source_of(Link("depth", {"a": "text-resformer-s0"}), ask.folder).folder == ask.folder
    with pytest.raises(UnknownName, match="run 'nobody'"):
        source_of(nobody := Link("depth", {"a": "nobody"}), ask.folder).subjects(nobody)


@pytest.mark.slow
def test_measures_that_moved_are_a_minus_b_as_on_every_page(ask):
    link = Link.parse("differences?a=models-resformer-s0&compare=1&b=models-transformer-s0")
    drawing = moved_measures(source_of(link, ask.folder), link)
    table = drawing.table
    assert np.allclose(table["difference"], table["a"] - table["b"])
    loss = table[table["metric"] == "loss"].iloc[0]
    resformer = load_records([SHIPPED / "models" / "models-resformer-s0"])
    mean = resformer.query("metric == 'loss' and step == step.max()")["value"].mean()
    assert loss["a"] == pytest.approx(mean)
    assert drawing.figure.layout.xaxis.title.text == "(A − B) / half its interval"


def test_a_difference_is_taken_axis_by_axis_with_the_error_of_a_difference():
    a, b = rows([(1.0, 3.0), (2.0, 0.3)], "x"), rows([(0.5, 4.0), (5.0, 0.4), (7.0, 0.1)], "y")
    found = plots.difference(a, b)
    assert found["value"].tolist() == [0.5, -3.0]
    assert found["se"].tolist() == pytest.approx([5.0, 0.5])
    assert set(found["unit"]) == {"nats, A − B"}


def test_a_comparison_draws_both_on_one_scale_and_the_difference_on_its_own():
    a, b = rows([(1.0, 0.1), (2.0, 0.1)], "transformer"), rows([(0.5, 0.1), (5.0, 0.1)], "resformer")
    figure = plots.compared([a, b])
    curves = {t.name: t for t in figure.data if t.mode and "markers" in t.mode}
    assert list(curves[plots.MINUS].y) == [0.5, -3.0]
    assert curves["Transformer"].yaxis == curves["ResFormer"].yaxis != curves[plots.MINUS].yaxis
    maps = plots.compared([f.assign(head=pd.array([0, 1], "Int64"), layer=0) for f in (a, b)])
    kinds = [t.coloraxis for t in maps.data]
    assert kinds[0] == kinds[1] != kinds[2]
    own = maps.layout["coloraxis2"]
    assert own.cmin == -own.cmax


@pytest.mark.slow
def test_the_band_of_a_difference_is_the_interval_over_paired_seeds_by_hand():
    """Differences 1, 2 and 3 at a layer: 2 with Student's t on 2 degrees, 4.3027 / sqrt(3) = 2.4841, to either side."""
    pairs = [
        tuple(rows([(5.0 + e, 0.1)] * 2, name).assign(seed=d) for e, name in ((d, "transformer"), (0, "resformer")))
        for d in (1, 2, 3)
    ]
    figure = plots.compared(pairs[0], pairs[1:])
    (band,) = (t for t in figure.data if t.name == f"{plots.MINUS} band")
    assert sorted({round(y, 3) for y in band.y}) == [2 - 2.484, 2 + 2.484]
    assert "95 % interval over 3 paired seeds" in figure.layout.title.subtitle.text
    alone = plots.compared(pairs[0])
    assert "one pair of runs" in alone.layout.title.subtitle.text


def test_grids_subtract_only_where_their_axes_agree():
    grid = plots.Grid(np.array([[1.0, np.nan]]), ["0"], ["a", "b"], "nats", "layer", "token")
    other = plots.Grid(np.array([[0.25, np.nan]]), ["0"], ["a", "b"], "nats", "layer", "token")
    figure = plots.grids([("A", grid), ("B", other)], "t")
    assert [t.z[0][0] for t in figure.data] == [1.0, 0.25, 0.75]
    assert figure.data[0].coloraxis == figure.data[1].coloraxis
    shorter = plots.Grid(np.array([[0.25]]), ["0"], ["a"], "nats", "layer", "token")
    for under, told in (("", "A and B have"), ("as stored", "as stored; A and B have")):
        figure = plots.grids([("A", grid), ("B", shorter)], "t", under)
        assert len(figure.data) == 2
        assert figure.layout.title.subtitle.text.startswith(told)
        assert "not drawn" in figure.layout.title.subtitle.text
    assert len(plots.grid_table([("A", grid)])) == 1


@pytest.mark.slow
def test_a_time_lapse_has_a_frame_a_step_on_scales_that_hold_still(ask):
    with pytest.raises(WorkbenchError, match="no checkpoints to play over"):
        plots.timelapse_figure([])
    lapse = timelapse(
        layers, ask, Link("depth", {"metric": "importance_entropy", "a": "text-resformer-s0", "compare": "1"})
    )
    assert [f.name for f in lapse.figure.frames] == ["step 0", "step 20"]  # step 8 was not measured
    assert all(len(f.data) == len(lapse.figure.data) for f in lapse.figure.frames)
    assert lapse.figure.layout.yaxis.range is not None
    assert set(lapse.table["frame"]) == {"step 0", "step 20"}
    assert lapse.sentence.startswith("1 of 3 checkpoints")
    with pytest.raises(WorkbenchError, match="too few"):
        timelapse(layers, ask, Link("depth", {"metric": "value_ablation", "a": "text-resformer-s0", "compare": "1"}))


# ---- depth ----


@pytest.mark.slow
def test_two_models_of_one_seed_are_compared_over_all_seeds_that_both_have(ask):
    page = "depth?metric=token_identity_share&site=own_v&compare=1&a=text-resformer-s1&b=text-transformer-s1"
    assert plots.MINUS not in {t.name for t in drawn(ask, page).figure.data}, "the paired difference has its own figure"
    ((_, drawing),) = drawings(ask, Link.parse(page), "differences")
    frame = load_records(
        [ask.folder / f"text-{name}-s{seed}" for name in ("resformer", "transformer") for seed in (0, 1)]
    )
    frame = frame[(frame["metric"] == "token_identity_share") & (frame["site"] == "own_v") & (frame["step"] == 20)]
    frame = frame[frame["variant"].isna() & frame["control"].isna()]
    means = frame.groupby(["architecture", "layer"])["value"].mean()
    assert list(drawing.figure.data[0].y) == pytest.approx(list(means["resformer"] - means["transformer"]))
    assert "mean over 2 paired seeds" in drawing.figure.layout.title.subtitle.text


def test_a_difference_by_layer_is_of_one_step_text_and_length_also_beside_lines_over_training(ask, monkeypatch):
    page = "depth?metric=importance_entropy&models=transformer,resformer"
    ((_, alone),) = drawings(ask, Link.parse(page), "differences")
    ((_, beside),) = drawings(ask, Link.parse(f"{page}&view=steps"), "differences")
    assert beside.figure.layout.title.text == alone.figure.layout.title.text
    assert alone.figure.layout.title.text.endswith(", step 20")
    assert beside.table.equals(alone.table), "no mean over training"
    there = ask.records

    def longer(entries, metrics=None):
        frame = there(entries, metrics)
        return frame.assign(T=frame["T"].mask(frame["run"] == "text-resformer-s1", 32))

    monkeypatch.setattr(ask, "records", longer)
    with pytest.raises(WorkbenchError, match="measured on validation, T = 16 and validation, T = 32"):
        list(drawings(ask, Link.parse(page), "differences"))


def test_a_line_at_random_init_is_not_named_by_the_step_of_the_trained_model(ask):
    drawing = drawn(ask, "depth?metric=importance_entropy&compare=1&a=text-resformer-s0&b=text-svformer-s0")
    names = {str(t.name) for t in drawing.figure.data}
    assert {"A: ResFormer · s0 at step 0", "A: ResFormer · s0, step 20"} <= names


def test_relative_depth_ends_at_one(ask):
    drawing = drawn(ask, "depth?metric=importance_entropy&depth=1&compare=1&a=text-resformer-s0&b=text-svformer-s0")
    assert drawing.table["layer"].max() == 1.0
    titles = [a.title.text for a in drawing.figure.select_xaxes()]
    assert titles == ["relative depth: 0 the first layer, 1 the last"]


def test_depth_draws_one_sample_of_each_run_and_says_what_is_not_stored(ask, monkeypatch):
    there = ask.records

    def both(entries, metrics=None):
        frame = there(entries, metrics)
        frame = frame[frame["run"] != "text-svformer-s0"]
        few = frame.assign(value=-1.0, n=2, provenance=provenance(data="few", metric="m", key="k"))
        return pd.concat([few, frame], ignore_index=True)

    plain = drawn(ask, "depth?metric=importance_entropy&seed=0&models=transformer,svformer")
    monkeypatch.setattr(ask, "records", both)
    drawing = drawn(ask, "depth?metric=importance_entropy&seed=0&models=transformer,svformer")
    assert drawing.sentence == "No records of SVFormer."
    lines = [next(t for t in d.figure.data if t.name == "Transformer") for d in (plain, drawing)]
    assert list(lines[0].y) == list(lines[1].y)


# ---- files ----


@pytest.mark.slow
def test_a_link_writes_its_page_and_its_tables(ask, tmp_path):
    link = Link.parse("depth?metric=sink_mass&a=text-resformer-s0&compare=1")
    page, reasons = write(ask, link, tmp_path / "v.html", command="workbench view x")
    assert reasons.pop("behind") == "drawn with behind=1"
    assert "drawn with weights=1" in reasons.pop("coefficients")
    assert set(reasons) == {"experts", "routers"}, "this model has none"
    assert "workbench view x" in page.read_text()
    table = pd.read_csv(write(ask, link, tmp_path / "v.csv")[0])
    assert set(table["metric"]) == {"sink_mass"}
    kept = pd.read_parquet(write(ask, link, tmp_path / "v.parquet")[0])
    assert len(kept) == len(table)
    with pytest.raises(UnknownName, match="file ending"):
        write(ask, link, tmp_path / "v.pdf")
    with pytest.raises(UnknownName, match="view of page"):
        write(ask, link, tmp_path / "v.csv", only="nothing")
    with pytest.raises(WorkbenchError, match="time-lapse"):
        write(ask, link, tmp_path / "v.csv", play=True)


@pytest.mark.slow
def test_pictures_are_drawn_where_a_browser_is(ask, tmp_path):
    from workbench.plots.image_export import find_browser

    if find_browser() is None:
        pytest.skip("no browser to draw with; `make browser` installs one")
    link = Link.parse("depth?metric=sink_mass&a=text-resformer-s0")
    svg = write(ask, link, tmp_path / "v.svg", only="layers")[0].read_text()
    assert svg.startswith("<svg")
    assert "Sink mass" in svg
    again = write(ask, link, tmp_path / "again.svg", only="layers")[0].read_text()
    assert again == svg, "one command, one file; plotly's names of clips are random"
    assert write(ask, link, tmp_path / "v.png", only="layers")[0].read_bytes()[:4] == b"\x89PNG"
    drawing = layers(ask, link)
    for mm in (COLUMN, PAGE):
        picture(drawing.figure, tmp_path / "v.svg", mm=mm)
        svg = re.sub("<style>.*?</style>", "", (tmp_path / "v.svg").read_text(), flags=re.DOTALL)
        assert f'width="{mm}mm"' in svg[:300]
        (pixels,) = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ', svg[:400]))
        points = [float(size) * mm / pixels * 72 / 25.4 for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert 7 <= min(points) <= max(points) < 9
        png = picture(drawing.figure, tmp_path / "v.png", mm=mm).read_bytes()
        across, per_metre = (int.from_bytes(png[at : at + 4]) for at in (16, png.index(b"pHYs") + 4))
        assert across / per_metre * 1000 == pytest.approx(mm, abs=0.1)


def test_a_figure_whose_panels_need_two_columns_is_not_squeezed_into_one(tmp_path):
    wide = plots.dressed(at_least(go.Figure().add_scatter(x=[1], y=[1]), 600), "Two panels", "", 300)
    assert [fits(wide, mm) for mm in (COLUMN, PAGE)] == [False, True]
    with pytest.raises(WorkbenchError, match=f"choose {PAGE} mm"):
        picture(wide, tmp_path / "v.svg", mm=COLUMN)
