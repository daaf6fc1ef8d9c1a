"""Every page of the dashboard on every kind of folder, the selection's mirror in the URL, and hostile input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import dashboard
import pytest
from streamlit.testing.v1 import AppTest

APP = Path(__file__).parent.parent / "app"
PAGES = ("start", "xray", "training", "depth", "prompt")
FOLDERS = ("populated", "empty", "missing", "damaged", "half_written", "foreign")


@pytest.fixture(scope="session")
def populated(tmp_path_factory):
    return dashboard.populate(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def folders(populated, tmp_path_factory):
    made = {"populated": populated, "empty": tmp_path_factory.mktemp("empty")}
    made["missing"] = made["empty"] / "nowhere"
    made["damaged"] = dashboard.damage(dashboard.copied(populated, tmp_path_factory.mktemp("d") / "runs"))
    made["half_written"] = dashboard.half_write(tmp_path_factory.mktemp("half"))
    made["foreign"] = dashboard.foreign(tmp_path_factory.mktemp("foreign"))
    return made


@pytest.fixture
def page(monkeypatch):
    """`page(folder, "depth", metric="...")`: the page as a browser at that address sees it."""

    def show(folder, name="start", **address):
        monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
        monkeypatch.setattr(sys, "argv", ["main.py"])
        at = AppTest.from_file(str(APP / "main.py"), default_timeout=60)
        if name != "start":
            at.run()
            at.switch_page(f"views/{name}.py")
        for key, value in address.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception, [e.message for e in at.exception]
        return at

    return show


def charts(at):
    return [element.proto for element in at.get("plotly_chart")]


def address(at, key):
    """A key of the address, as one text."""
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def said(at):
    return " ".join(
        e.value for kind in ("markdown", "info", "warning", "success", "caption", "text") for e in at.get(kind)
    )


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("kind", FOLDERS)
def test_no_page_breaks_on_any_folder(page, folders, kind, name):
    at = page(folders[kind], name)
    assert "Traceback" not in said(at)
    for chart in charts(at):
        assert len(chart.alt) > 20
    if kind == "populated":
        assert charts(at)
        assert not at.warning
        assert not at.info
    if kind in ("empty", "missing"):
        assert "make demo" in said(at) + " ".join(c.value for c in at.code)
        assert not charts(at)


def test_start_tells_the_verdict_and_the_formation_steps(page, populated):
    at = page(populated)
    assert "SVFormer before Transformer: seeds disjoint." in said(at)
    table = at.dataframe[0].value
    assert list(table["model"]) == ["SVFormer", "Transformer"]
    assert list(table["seed 0"]) == ["step 5", "step 12"]
    assert "No attention sink formed" in said(at)
    assert len(charts(at)) == 4


def test_step_slider_moves_the_map_and_the_address(page, populated):
    at = page(populated)
    at.select_slider(key="w_race_step").set_value(8).run()
    assert not at.exception
    assert address(at, "race_step") == "8"


def test_an_unfinished_demo_says_how_far_it_is(page, folders):
    at = page(folders["half_written"])
    assert "x failed: boom" in said(at)
    assert at.get("progress")


def test_a_damaged_run_is_named_and_does_not_hide_the_others(page, folders):
    at = page(folders["damaged"], "training")
    assert any("text\\-transformer\\-s0" in w.value for w in at.warning)
    assert len(charts(at)) >= 4
    at = page(folders["damaged"], "prompt", left="text-transformer-s1", right="text-denseformer-s0")
    assert any("model.safetensors" in w.value.replace("\\", "") for w in at.warning)
    assert not charts(at)


@pytest.mark.parametrize(
    ("name", "address", "widget", "value"),
    [
        ("depth", {"metric": "importance_entropy"}, "w_metric", "importance_entropy"),
        ("depth", {"site": "v"}, "w_site", "v"),
        ("depth", {"seed": "1"}, "w_seed", "1"),
        ("prompt", {"left": "text-svformer-s1"}, "w_left", "text-svformer-s1"),
        ("prompt", {"layer": "0"}, "w_layer", 0),
    ],
)
def test_deep_links_reach_the_widgets(page, populated, name, address, widget, value):
    at = page(populated, name, **address)
    assert at.selectbox(key=widget).value == value
    assert not at.info


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("depth", {"metric": "nonsense"}),
        ("depth", {"seed": "-1"}),
        ("prompt", {"left": "../../etc"}),
        ("prompt", {"layer": "99"}),
        ("prompt", {"step": "7"}),
        ("prompt", {"stored": "../../etc/passwd"}),
        ("training", {"models": "gpt"}),
        ("training", {"colour": "red"}),
        ("start", {"race_left": "<script>"}),
    ],
)
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, name, address):
    at = page(populated, name, **address)
    assert any("ignored" in i.value for i in at.info)
    assert charts(at)
    assert "<script>" not in said(at)


def test_a_choice_is_written_to_the_address(page, populated):
    at = page(populated, "depth")
    at.selectbox(key="w_metric").set_value("sink_mass").run()
    assert address(at, "metric") == "sink_mass"
    assert not at.exception
    at.button_group(key="w_models").set_value(["resformer", "svformer"]).run()
    assert address(at, "models") == "resformer,svformer"
    at.button_group(key="w_models").set_value([]).run()
    assert any("at least one" in i.value for i in at.info)


@pytest.mark.parametrize("metric", ["importance_entropy", "token_importance", "sink_mass", "loss", "value_ablation"])
def test_depth_draws_every_kind_of_record(page, populated, metric):
    at = page(populated, "depth", metric=metric)
    assert charts(at)
    assert not at.info


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("x" * 5000, "tokens long"),
        ("a", "tokens long"),
    ],
)
def test_prompts_that_cannot_be_read_are_explained(page, populated, text, word):
    at = page(populated, "prompt")
    at.text_area(key="w_prompt").set_value(text).run()
    assert not at.exception
    assert any(word in w.value.replace("\\", "") for w in at.warning)
    assert not charts(at)


def test_hostile_text_stays_text(page, populated):
    text = "<script>alert(1)</script> [x](javascript:alert(1)) $\\alpha$ :red[a] <b>"
    at = page(populated, "prompt")
    at.text_area(key="w_prompt").set_value(text).run()
    assert not at.exception
    specs = " ".join(chart.spec for chart in charts(at))
    assert len(charts(at)) == 3
    assert "<script" not in specs
    assert not re.search(r"\d:<b|&lt;<", specs)


def test_repeated_token_models_read_letters_twice(page, populated):
    group = next(o for o in page(populated, "prompt").selectbox(key="w_set").options if "repeated" in o)
    at = page(populated, "prompt")
    at.selectbox(key="w_set").select(group).run()
    at.text_area(key="w_prompt").set_value("abc").run()
    assert not at.exception
    assert "5:c" in charts(at)[0].spec
    assert "6:" not in charts(at)[0].spec
    at.text_area(key="w_prompt").set_value("a€b").run()
    assert any("€" in w.value for w in at.warning)


def test_long_prompts_are_stored_and_linked_by_hash(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    text = "def f(x): return x\n" * 12
    at = page(folder, "prompt")
    at.text_area(key="w_prompt").set_value(text).run()
    name = address(at, "stored")
    assert "prompt" not in at.query_params
    assert (folder / ".prompts" / f"{name}.txt").read_text() == text
    assert page(folder, "prompt", stored=name).text_area(key="w_prompt").value == text


def test_pages_that_only_show_tables_never_import_torch(populated):
    code = (
        "import sys; from streamlit.testing.v1 import AppTest; sys.argv = ['main.py'];"
        f"at = AppTest.from_file({str(APP / 'main.py')!r}, default_timeout=60); import app.state;"
        "entries, _ = app.state.listing(); assert entries; frame = app.state.table(entries, 'records'); assert len(frame);"
        "from workbench import plots; plots.plot(frame[(frame['metric'] == 'importance_entropy')]);"
        "print(sorted({'torch', 'transformer_lens'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"WORKBENCH_RUNS": str(populated)},
    )
    assert found.stdout.strip() == "[]"


def test_the_folder_can_be_given_after_the_double_dash(folders, monkeypatch):
    from app import state

    monkeypatch.setenv("WORKBENCH_RUNS", str(folders["empty"]))
    monkeypatch.setattr(sys, "argv", ["main.py", "--runs", str(folders["populated"])])
    assert state.root() == folders["populated"].resolve()


def test_no_page_writes_raw_html_and_pages_stay_short():
    for path in APP.rglob("*.py"):
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "st.html" not in source
    for path in (APP / "views").glob("*.py"):
        assert "torch" not in path.read_text()


# ---- X-ray -----------------------------------------------------------------------------------------------------------


def test_the_four_answers_of_a_measured_run_are_those_of_the_command(page, tmp_path):
    from workbench import xrays
    from workbench.config import ModelConfig, TrainConfig
    from workbench.data import RepeatedData
    from workbench.training import train

    shape = ModelConfig(n_layers=2, d_model=16, n_heads=4, d_mlp=24, d_vocab=64, n_ctx=128)
    recipe = TrainConfig(steps=4, batch=4, T=64, warmup=2, validate_every=4, validation_sequences=8)
    run = train("transformer", RepeatedData(), name="mine", runs=tmp_path, model=shape, train=recipe, device="cpu")
    at = page(tmp_path, "xray", run="mine")
    assert any("Not measured on this run yet" in i.value for i in at.info)
    assert at.code[0].value == "workbench xray mine"
    found = xrays.xray(run.path, n=8)
    at = page(tmp_path, "xray", run="mine")
    assert len(charts(at)) == 4
    shown = " ".join(m.value.replace("\\", "") for m in at.markdown)
    for answer in found.answers:
        assert answer.sentence in shown
