"""The start page as a browser gets it: every part on every kind of folder, clicks that lead on, a demo that is still running."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import dashboard
import pytest
from app_pages import charts

from workbench.files import write_json

APP = Path(__file__).parent.parent / "app"
SHOWN = {
    "populated": ("finding", "model", "here", "verdicts", "demo"), "empty": ("demo",), "missing": ("model",),
    "damaged": ("finding", "model", "verdicts"), "half_written": ("here",), "foreign": ("here",),
}  # fmt: skip
"""Parts of the page that each kind of folder is a question to."""


@pytest.fixture
def page(browse):
    return lambda folder, **address: browse(folder, "start", **address)


def said(at):
    kinds = ("header", "subheader", "markdown", "info", "warning", "success", "error", "caption", "code")
    return " ".join(e.value.replace("\\", "") for kind in kinds for e in at.get(kind))


@pytest.mark.parametrize(("kind", "show"), [(kind, show) for kind, parts in SHOWN.items() for show in parts])
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


def test_the_story_tells_the_verdict_and_the_formation_steps(page, populated):
    at = page(populated)
    told = said(at).replace("**", "")
    assert "Unresolved. Step of learning to copy minus the Transformer's: SVFormer -7" in told
    assert "controls that were not trained: " in told
    table = next(d.value for d in at.dataframe if "seed 0" in d.value)
    assert list(table["model"]) == ["SVFormer", "Transformer"]
    assert list(table["seed 0"]) == ["step 5", "step 12"]
    assert "No sink formed" in said(at)


def test_the_slider_of_the_heads_moves_the_map_and_the_address(page, populated):
    at = page(populated)
    at.select_slider(key="w_at").set_value(8)
    dashboard.settled(at.run())
    assert at.query_params["at"] in ("8", ["8"])
    assert any("training step 8" in chart.spec for chart in charts(at))


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


def test_an_empty_folder_says_that_a_demo_has_begun(page, tmp_path):
    write_json(tmp_path / ".demo.json", {"finished": False, "ready": [], "models": ["a"], "left_s": None, "failed": {}})
    assert "The demo has begun" in said(page(tmp_path))


def test_two_models_are_xrayed_side_by_side(page, populated):
    at = page(populated, show="model", a="text-resformer-s0", b="text-transformer-s0", compare=1)
    assert len(charts(at)) == 4
    assert all("A − B" in chart.spec or "A \\u2212 B" in chart.spec for chart in charts(at))
    assert "A: Concentrated" in said(at)


def test_what_is_not_measured_is_measured_by_a_button_and_then_drawn(page, tmp_path):
    from workbench.config import ModelConfig, TrainConfig
    from workbench.data.sources import RepeatedData
    from workbench.training.loop import train

    shape = ModelConfig(n_layers=2, d_model=16, n_heads=4, d_mlp=24, d_vocab=64, n_ctx=128)
    recipe = TrainConfig(steps=4, batch=4, T=64, warmup=2, validate_every=4, validation_sequences=8)
    train("transformer", RepeatedData(), name="mine", runs=tmp_path, model=shape, train=recipe, device="cpu")
    at = page(tmp_path)
    assert "is not measured yet: concentration parts" in said(at)
    assert any(c.value == f"workbench xray {tmp_path}/mine" for c in at.code)
    assert not charts(at)
    next(b for b in at.button if b.label == "Measure").click()
    dashboard.settled(at.run())
    assert len(charts(at)) == 4
    assert "not measured yet" not in said(at)


def test_a_chosen_run_without_weights_is_led_on_to_its_numbers(page, folders):
    assert "**race-svformer-s0** has no weights here" in said(
        page(folders["half_written"], show="here", a="race-svformer-s0")
    )


def test_a_clicked_row_becomes_model_a(page, populated, monkeypatch):
    at = page(populated, show="here")
    table = at.dataframe[0].value
    assert list(table["run"]) == sorted(table["run"])
    row = list(table["run"]).index("race-transformer-s1")
    from app.screens import start as view

    selected = SimpleNamespace(selection=SimpleNamespace(rows=(row,)))
    monkeypatch.setattr(view.st, "session_state", {"runs": selected})
    changed = {}
    monkeypatch.setattr(view.widgets, "update_url", lambda **keys: changed.update(keys))
    view.take_run()
    assert changed["a"] == "race-transformer-s1"
    assert changed["show"] == "here", "two rows can be selected to compare them"
    assert changed["set"].startswith("repeated-")


def test_verdicts_name_the_claim_its_sentence_and_the_command(page, populated):
    at = page(populated, show="verdicts", alone="1", claim="fast_at_first_then_overtaken", a="text-resformer-s0")
    assert "SVFormer - Transformer at equal step" in said(at)
    assert at.selectbox(key="w_claim").value == "fast_at_first_then_overtaken"
    assert any(c.value.startswith("workbench analyze") and "text-*" in c.value for c in at.code)
    assert any("undecided claims" in e.label for e in at.expander)


def test_verdicts_of_one_experiment_are_of_that_which_the_headline_is_about(page, populated):
    at, judged = page(populated, show="finding"), page(populated, show="verdicts", alone="1")
    assert judged.selectbox(key="w_set").value == at.selectbox(key="w_set").value
    assert judged.selectbox(key="w_set").value != page(populated, show="model").selectbox(key="w_set").value


@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ({"show": "everything", "left": "../../etc", "at": "7"}, {"part", "left model", "training step"}),
        ({"show": "verdicts", "claim": "<script>"}, {"claim"}),
    ],
)
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, address, labels):
    at = page(populated, **address)
    assert {i.value.partition("“")[2].partition("”")[0] for i in at.info if "ignored" in i.value} == labels
    assert not any("<script>" in i.value for i in at.info)
