"""The start page as a browser gets it: every part on every kind of folder, clicks that lead on, a demo that is still running."""

from __future__ import annotations

import math
import os
import re
import shutil

import dashboard
import pandas as pd
import pytest
from app_pages import address, charts

from app.tables import number_columns
from workbench.errors import WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.places import SHIPPED
from workbench.runs.records import load_records
from workbench.views import Link, Source, start
from workbench.views.registered_views import ONE_SEED
from workbench.views.start_runs import grouped, runs_table

SHOWN = {
    "populated": ("finding", "model", "here", "verdicts", "demo"), "empty": ("demo",),
    "damaged": ("model",), "half_written": ("here",),
}  # fmt: skip
"""Parts of the page that each kind of folder is a question to."""


@pytest.fixture
def page(browse):
    return lambda folder, **address: browse(folder, "start", **address)


def said(at):
    kinds = ("header", "subheader", "markdown", "info", "warning", "success", "error", "caption", "code")
    return " ".join(e.value.replace("\\", "") for kind in kinds for e in at.get(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "show"),
    [  # all runs are judged on every claim
        (kind, show) for kind, parts in SHOWN.items() for show in parts
    ],
)
def test_no_part_breaks_on_any_folder(page, folders, kind, show):
    at = page(folders[kind], show=show)
    assert "Traceback" not in said(at)
    for chart in charts(at):
        assert len(chart.alt) > 20
    if kind == "populated":
        assert show != "verdicts" or "w_set" not in at.session_state, "all runs are judged, so none is chosen"
        assert len(charts(at)) == {"finding": 2, "model": 4, "here": 0, "verdicts": 2, "demo": 4}[show]
        assert not at.warning or show == "verdicts"
    if kind in ("empty", "missing"):
        assert "make demo" in said(at)
        assert not charts(at)


def test_a_demo_alone_is_told_first_and_other_runs_are_looked_at(page, populated, tmp_path):
    assert any(e.label == "Glossary" for e in page(populated).expander)
    folder = dashboard.copied(populated, tmp_path / "runs")
    (folder / "text-resformer-s0").rename(folder / "mine")
    at = page(folder)
    assert at.button_group(key="w_show").value == "finding"
    assert at.header[0].value.replace("\\", "") == "SVFormer copies 7 [7, 7] steps earlier than the Transformer."
    assert len(charts(at)) == 2
    assert "How transformers use" not in said(at).split("SVFormer copies")[0]


@pytest.mark.slow
def test_an_opened_model_leaves_the_demo_on_the_first_page_and_comes_with_links_to_its_pages(page, populated, tmp_path):
    folder = tmp_path / "runs"
    for name in ("race-svformer-s0", "race-transformer-s0", "text-resformer-s0", "text-transformer-s0"):
        dashboard.copied(populated / name, folder / name)
    shutil.copy(populated / ".demo.json", folder)
    mine = dashboard.copied(populated / "text-resformer-s0", folder / "mine")
    info = read_json(mine / "run.json") | {"imported": {"from": "mine.pt"}}
    write_json(mine / "run.json", info | {"data": {"kind": "imported", "domains": ["unknown"]}})
    assert start.only_demo(Source(folder))
    assert page(folder).button_group(key="w_show").value == "demo"
    assert page(folder, show="model").selectbox(key="w_a").value == "text-resformer-s0"
    shutil.rmtree(mine / "records")
    at = page(folder, show="model", a="mine")
    assert "Opened: **mine, step 20**, 2 layers, 2 heads." in said(at)
    pages = [e.proto for e in at.main.get("page_link")]
    assert [e.label for e in pages] == ["Attention", "Prompt", "Depth"]
    assert all("a=mine" in e.query_string for e in pages)
    assert not at.info


def test_the_story_tells_the_verdict_and_the_formation_steps(page, populated):
    at = page(populated)
    told = said(at).replace("**", "")
    assert "Unresolved. In the runs here: Step of learning to copy minus the Transformer's: SVFormer −7" in told
    assert "controls that were not trained: " in told
    table = next(d.value for d in at.dataframe if "seed 0" in d.value)
    assert list(table["model"]) == ["SVFormer", "Transformer"]
    assert list(table["seed 0"]) == ["5", "12"]
    assert "No sink formed" in said(at)


@pytest.mark.slow
def test_an_address_opens_the_table_of_grouped_runs_and_the_box_writes_it(page, populated):
    at = page(populated, show="here", group="model,seed")
    assert at.multiselect(key="w_group").value == ["model", "seed"]
    assert len(charts(at)) == 1
    assert {"model", "seed", "runs", "final loss, seeds"} <= set(at.dataframe[0].value)
    dashboard.settled(at.multiselect(key="w_group").set_value(["model"]).run())
    assert address(at, "group") == "model"
    assert "seed" not in at.dataframe[0].value
    assert "which does not exist; it was ignored" in said(page(populated, show="here", group="models"))
    told = said(page(populated, show="finding", set="nothing"))
    assert re.search(r"Available: [^;]*, [^;]*; ", told), "names with commas are told apart"


def test_shipped_models_are_named_beside_the_table_of_runs(page, populated, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.views.source.MODELS", SHIPPED / "models")
    dashboard.copied(populated / "race-svformer-s0", tmp_path / "race-svformer-s0")
    named = [e.proto.label for e in page(tmp_path, show="here").main.get("page_link")]
    assert named == ["ResFormer · s0 (text)", "Transformer · s0 (text)"]


def test_groups_of_runs_are_drawn_with_the_interval_over_their_seeds(populated):
    source = Source(populated)
    with pytest.raises(WorkbenchError, match="drawn with group=model"):
        grouped(source, Link("start", {"show": "here"}))
    drawing = grouped(
        source,
        Link("start", {"show": "here", "group": "model", "set": source.catalogue().entry("text-resformer-s0").group}),
    )
    runs = runs_table(source)
    losses = runs.loc[runs["run"].isin(["text-resformer-s0", "text-resformer-s1"]), "final loss"]
    place = list(drawing.figure.data[0].y).index("ResFormer")
    assert drawing.figure.data[0].x[place] == pytest.approx(losses.mean())
    half = 12.7062 * losses.std() / 2**0.5  # Student's t of one degree of freedom
    assert drawing.figure.data[0].error_x.array[place] == pytest.approx(half, rel=1e-4)
    assert set(drawing.table["set"]) == set(runs["group"])


def test_a_badge_of_two_models_is_absent_where_all_runs_are_shown(page, populated):
    assert ONE_SEED not in said(page(populated, show="here", compare="1"))


def test_a_mean_has_as_many_decimals_as_its_interval():
    columns = number_columns(pd.DataFrame({"loss": [2.4576], "loss ± 95 %": [0.0115], "rate": [0.003]}))
    assert {name: column["type_config"]["format"] for name, column in columns.items()} == {
        "loss": "%.3f",
        "loss ± 95 %": "%.3f",
        "rate": "%.3g",
    }
    columns = number_columns(pd.DataFrame({"mixed": [2049.5, 0.31], "large": [2049.5, 20.0], "none": [math.nan] * 2}))
    assert [column["type_config"]["format"] for column in columns.values()] == ["%.4g", "%.0f", "%.3g"]


def test_a_running_demo_says_how_far_it_is_and_a_stopped_one_how_to_go_on(page, folders, tmp_path):
    folder = dashboard.copied(folders["half_written"], tmp_path / "runs")
    at = page(folder)
    assert "x failed: boom" in said(at)
    assert at.get("progress")
    assert "first model" not in said(at)
    os.utime(folder / ".demo.json", (1, 1))
    for path in folder.glob("*/telemetry"):
        os.utime(path, (1, 1))
    assert "`make demo` continues it" in said(page(folder))


def test_verdicts_are_drawn_with_the_runs_behind_them(page, populated, tmp_path):
    """Of the race alone."""
    for path in populated.glob("race-*"):
        dashboard.copied(path, tmp_path / path.name)
    at = page(tmp_path, show="verdicts", claim="value_paths_speed_up_induction")
    assert len(charts(at)) == 2
    assert "Unresolved" in said(at).replace("*", "")
    (behind,) = (d.value for d in at.dataframe if "address" in d.value)
    assert set(behind["run"]) == {path.name for path in tmp_path.glob("race-*")}


def test_a_button_measures_what_the_page_names(page, populated, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.views.start.xray_plan", lambda entry, step: [(step, "loss")])
    path = dashboard.copied(populated / "race-transformer-s0", tmp_path / "race-transformer-s0")
    shutil.rmtree(path / "records")
    at = page(tmp_path, show="model")
    assert "Measure it.** This page shows concentration parts" in said(at)
    assert any(c.value.startswith(f"workbench xray {tmp_path}") for c in at.code)
    next(b for b in at.button if b.label == "Measure").click()
    dashboard.settled(at.run())
    assert set(load_records([path])["metric"]) == {"loss"}
