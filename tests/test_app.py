"""Every page of the dashboard on every kind of folder, its figures by value, and the selection's mirror in the URL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import dashboard
import figure_outputs
import pandas as pd
import pytest
import torch
from app_pages import APP, COMPARE, DEEP, FIGURES, FOLDERS, address, chart, charts, elements, ignored, numbers, said

from app import figures, page_frame
from workbench import plots
from workbench.models import ARCHITECTURES
from workbench.runs.records import load_records
from workbench.runs.run import Run
from workbench.views import Link


@pytest.fixture
def page(browse):
    return browse


# ---- every page on every folder ----


COVERING = {
    "populated": set(DEEP), "empty": {"start", "training"}, "missing": {"prompt"}, "one": {"depth", "heads", "intervene"},
    "damaged": {"start", "attention", "heads"}, "half_written": {"training", "depth", "prompt"}, "foreign": {"start", "intervene"},
}  # fmt: skip
"""Of each kind of folder the pages that read of it what no other page does; the rest is slow."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[] if name in COVERING[kind] else pytest.mark.slow)
        for kind in FOLDERS
        for name in DEEP
    ],
)
def test_a_deep_link_is_drawn_or_explained_on_any_folder(page, folders, kind, name):
    at = page(folders[kind], name, **DEEP[name])
    assert "Traceback" not in said(at)
    assert at.title[0].value == name.capitalize()
    for found in charts(at):
        assert len(found.alt) > 20
    if kind == "populated":
        assert elements(at, folders[kind]) == figure_outputs.kept(figure_outputs.PAGES)[name], figure_outputs.ANEW
    if kind in ("populated", "one"):
        assert len(charts(at)) == FIGURES[name]
        assert not at.warning
        assert not ignored(at) or kind == "one"
    if kind in ("empty", "missing"):
        assert "make demo" in said(at)
        assert not charts(at)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", ["populated", "damaged"])
def test_no_page_breaks_on_any_folder_with_its_defaults(page, folders, kind, name):
    at = page(folders[kind], name)
    assert "Traceback" not in said(at)
    assert bool(charts(at)) or kind != "populated" or name == "attention"
    assert not ignored(at)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", ["populated", "one", "damaged", "half_written"])
def test_no_comparison_breaks_on_any_folder(page, folders, kind, name):
    at = page(folders[kind], name, **DEEP[name] | COMPARE)
    assert "Traceback" not in said(at)
    if kind == "populated":
        assert not ignored(at)
        assert len(charts(at)) >= min(1, FIGURES[name])


def test_a_table_that_is_damaged_while_it_is_shown_is_named_and_no_longer_shown(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    at = page(folder, "depth", metric="importance_entropy", models="resformer")
    assert not at.warning
    for file in (folder / "text-resformer-s1" / "records").glob("*.parquet"):
        with file.open("r+b") as table:  # no folder changes
            table.seek(200)
            table.write(b"damage" * 20)
    at.run()
    assert "text\\-resformer\\-s1 is left out" in at.warning[0].value
    assert "1 seed per model" in charts(at)[0].alt


def test_a_damaged_run_is_named_and_does_not_hide_the_others(page, folders):
    at = page(folders["damaged"], "depth", metric="importance_entropy")
    assert any("text\\-svformer\\-s0" in w.value for w in at.warning)
    assert len({t["name"] for t in chart(at, "layers")["data"] if t.get("name")}) >= 3
    at = page(folders["damaged"], "prompt", a="text-transformer-s1", step="20")
    assert "cannot be opened" in said(at).replace("\\", "") or "model.safetensors" in said(at).replace("\\", "")
    assert not charts(at)


def test_folders_that_cannot_be_read_are_named_at_the_foot_of_every_page(page, folders):
    at = page(folders["damaged"], "depth")
    table = at.dataframe[-1].value
    assert list(table["folder"]) == ["race-svformer-s1"]
    assert "run.json" in table["problem"][0]


# ---- figures by value ----


def test_depth_draws_the_mean_of_the_records_of_each_model(page, populated):
    at = page(populated, "depth", **DEEP["depth"] | {"seed": "all"})
    rows = load_records([populated / f"text-svformer-s{s}" for s in range(2)])
    rows = rows[(rows["metric"] == "importance_entropy") & rows["control"].isna()]
    means = rows[rows["step"] == 20].groupby("layer")["value"].mean()
    (trace,) = [t for t in chart(at, "layers")["data"] if t.get("name") == "SVFormer" and "markers" in t["mode"]]
    assert numbers(trace["y"]) == pytest.approx(means.to_numpy())
    assert trace["line"]["color"] == plots.colour("svformer")


def test_depth_compares_two_models_and_their_difference(page, populated):
    at = page(populated, "depth", metric="importance_entropy", **COMPARE | {"b": "text-transformer-s0", "step_b": "20"})
    figure = chart(at, "layers")
    named = {t.get("name") for t in figure["data"]}
    assert any(str(n).startswith("A: ResFormer") for n in named)
    assert any(str(n).startswith("B: Transformer") for n in named)
    assert plots.MINUS in named


def test_the_prompt_page_draws_what_the_model_computes(page, populated):
    at = page(populated, "prompt", a="text-resformer-s0", prompt="return values")
    model = Run.open(populated / "text-resformer-s0").load()
    ids = torch.tensor([model.tokenizer.encode("return values")])
    with torch.no_grad():
        log_p = model(ids).log_softmax(-1)[0]
    (bars,) = chart(at, "predictions")["data"]
    assert numbers(bars["x"])[0] == pytest.approx(float(log_p[-1].exp().max()), abs=1e-5)
    (line,) = chart(at, "surprise")["data"]
    assert numbers(line["y"])[1:] == pytest.approx(-log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy(), abs=1e-5)
    at = page(populated, "prompt", a="text-resformer-s0", prompt="return values", show="layers")
    assert numbers(chart(at, "lens")["data"][0]["z"]).shape == (3, ids.shape[1])  # L + 1 rows
    at = page(populated, "prompt", a="text-resformer-s0", prompt="return values", show="who")
    assert "sum of the parts" in said(at)
    at = page(populated, "prompt", a="text-resformer-s0", prompt="return values", show="carries")
    assert numbers(chart(at, "values")["data"][0]["z"]).shape == (2, ids.shape[1])
    assert len(charts(at)) == 2


def test_intervening_draws_the_change_that_the_edit_makes(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", edits="remove:part=mlp,layer=1")
    model = Run.open(populated / "text-resformer-s0").load()
    ids = torch.tensor([model.tokenizer.encode("return values")])

    def losses(*hooks):
        logits = model.run_with_hooks(ids, fwd_hooks=list(hooks))
        return -logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    with torch.no_grad():
        change = losses(("blocks.1.hook_mlp_out", lambda out, hook: torch.zeros_like(out))) - losses()
    (bars,) = chart(at, "effect")["data"]
    assert numbers(bars["y"]) == pytest.approx(change.numpy(), abs=1e-5)


# ---- the address ----


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("depth", {"metric": "token_identity_share", "site": "v", "seed": "1", "a": "text-svformer-s1"}),
        ("prompt", {"a": "text-resformer-s0", "show": "who", "layer": "0"}),
        ("prompt", {"show": "layers", "quantity": "kl"}),
        ("intervene", {"show": "sweep", "sweep": "sink"}),
    ],
)
def test_deep_links_reach_the_widgets(page, populated, name, address):
    at = page(populated, name, **address)
    shown = {key: at.selectbox(key=f"w_{key}").value for key in address if key != "show"}
    assert {key: str(value) for key, value in shown.items()} == {k: v for k, v in address.items() if k != "show"}
    assert not ignored(at)


@pytest.mark.parametrize(
    ("name", "address", "labels"),
    [
        ("depth", {"metric": "nonsense", "seed": "-1", "set": "<script>"}, {"measure", "seed", "experiment"}),
        ("prompt", {"a": "../../etc", "step": "7", "position": "99", "stored": "../../etc/passwd"},
         {"model a", "step of a", "position", "stored prompt"}),
        ("prompt", {"show": "who", "layer": "99"}, {"layer"}),
        ("training", {"models": "gpt", "colour": "red"}, {"models"}),
        ("intervene", {"show": "sweep", "over": "<b>"}, {"over"}),
    ],
)  # fmt: skip
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, name, address, labels):
    at = page(populated, name, **address)
    told = " ".join(ignored(at))
    assert set(re.findall("“(.*?)”", told)) == labels
    assert ("unknown options" in told) == ("colour" in address)
    assert charts(at)
    assert "<script>" not in said(at)


def test_choices_are_written_to_the_address(page, populated):
    at = page(populated, "depth", a="text-resformer-s0")
    at.selectbox(key="w_metric").set_value("sink_mass").run()
    assert address(at, "metric") == "sink_mass"
    at.button_group(key="w_models").set_value(["resformer", "svformer"]).run()
    assert address(at, "models") == "resformer,svformer"
    at.select_slider(key="w_step").set_value(0).run()
    assert address(at, "step") == "0"
    at.toggle(key="w_compare").set_value(True).run()
    assert address(at, "compare") == "1"
    assert at.select_slider(key="w_step_b").value == 0  # goes along with A
    offered = at.selectbox(key="w_b").options
    assert len(set(offered)) == len(offered) > 2
    at.selectbox(key="w_b").set_value("text-svformer-s1").run()
    assert address(at, "b") == "text-svformer-s1"
    assert not at.exception
    at.toggle(key="w_compare").set_value(False).run()
    at.button_group(key="w_models").set_value([]).run()
    assert any("at least one" in i.value for i in at.info)


def test_what_only_the_old_prompt_had_leaves_the_address_with_it(page, populated):
    at = page(populated, "prompt", a="text-resformer-s0", prompt="return values now", position="3", target="5")
    at.text_area(key="w_prompt").set_value("mean").run()
    assert set(at.query_params) == {"a", "prompt"}
    assert not ignored(at)


def test_another_experiment_takes_its_own_models(page, populated):
    at = page(populated, "depth", a="text-resformer-s0", models="resformer", step="20")
    other = next(o for o in at.selectbox(key="w_set").options if o.startswith("repeated"))
    at.selectbox(key="w_set").select(other).run()
    assert set(at.query_params) == {"set"}
    assert not at.exception
    assert not ignored(at)


def test_the_builder_writes_an_edit_and_adds_to_it(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", kind="sink")
    at.multiselect(key="edit_layers").set_value([1]).run()
    dashboard.settled(at.button(key="edit_set").click().run())
    assert address(at, "edits") == "sink:layer=1"
    at.multiselect(key="edit_heads").set_value([0]).run()
    dashboard.settled(at.button(key="edit_add").click().run())
    assert address(at, "edits") == "sink:layer=1;sink:layer=1,head=0"
    assert at.text_input(key="w_edits").value == address(at, "edits")


def test_a_click_before_the_page_has_drawn_what_was_chosen_makes_what_was_chosen(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", kind="remove:part=mlp")
    dashboard.settled(at.button(key="edit_set").click().run())
    at.selectbox(key="w_kind").set_value("sink")
    at.multiselect(key="edit_layers").set_value([1])
    dashboard.settled(at.button(key="edit_add").click().run())
    assert address(at, "edits") == "remove:part=mlp;sink:layer=1"
    at.selectbox(key="w_kind").set_value("coefficient:value=0")
    dashboard.settled(at.button(key="edit_set").click().run())
    assert address(at, "edits") == "coefficient:layer=1,value=0"
    assert (at.slider(key="edit_value").min, at.slider(key="edit_value").max) == (-2, 2)


def test_an_edit_that_cannot_be_read_is_explained_and_the_rest_of_the_page_stands(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", edits="velues:how=zero")
    assert "values" in " ".join(i.value for i in at.info)
    assert not charts(at)
    at.button_group(key="w_show").set_value("sweep").run()
    assert len(charts(at)) == 1


def test_a_folder_of_many_models_draws_the_first_and_says_so(page, tmp_path):
    for i, name in enumerate(("transformer", *(f"resformer_{k}" for k in ("constant", "learnable", "sparse", "dense")),
                              "resformer", "svformer", "neutreno", "denseformer", "mqa")):  # fmt: skip
        common = dashboard.run(tmp_path, f"text-{name}-s0", name, i, "text", steps=())
        dashboard.write_parquet(
            dashboard.records(dashboard.measured(common, "text")),
            tmp_path / f"text-{name}-s0" / "records" / "a.parquet",
        )
    at = page(tmp_path, "depth", metric="importance_entropy")
    assert (
        len({t["name"] for t in chart(at, "layers")["data"] if t.get("name") in map(plots.label, ARCHITECTURES)}) == 8
    )


# ---- what pages are made of ----


@pytest.mark.slow
def test_pages_that_only_show_tables_never_import_torch(populated):
    code = (  # in a process of its own
        "import sys; from streamlit.testing.v1 import AppTest; sys.argv = ['main.py'];"
        f"at = AppTest.from_file({str(APP / 'main.py')!r}, default_timeout=60);"
        "at.query_params['show'] = 'here'; at.run(); assert not at.exception; at.query_params.clear();"
        "[at.switch_page(f'screens/{name}.py').run() for name in ('training', 'depth')]; assert len(at.get('bidi_component'));"
        "print(sorted({'torch', 'transformer_lens'} & set(sys.modules)))"
    )
    environment = os.environ | {"WORKBENCH_RUNS": str(populated)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "[]"


def test_the_folder_can_be_given_after_the_double_dash(folders, monkeypatch):
    from app.cached_source import root

    monkeypatch.setenv("WORKBENCH_RUNS", str(folders["empty"]))
    monkeypatch.setattr(sys, "argv", ["main.py", "--runs", str(folders["populated"])])
    assert root() == folders["populated"].resolve()


def test_no_page_writes_raw_html_or_imports_torch():
    for path in APP.rglob("*.py"):
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "st.html" not in source
    for path in (APP / "screens").glob("*.py"):
        assert "import torch" not in path.read_text()


def test_a_model_shown_by_default_that_goes_away_is_announced(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    at = page(folder, "depth")
    gone = at.selectbox(key="w_a").value
    shutil.rmtree(folder / gone)
    at.run()
    shown = at.selectbox(key="w_a").value
    assert shown != gone
    assert [t.value for t in at.toast] == [f"Model A: {gone} was removed; {shown} is shown."]


def test_provenance_is_told_of_the_tables_that_have_some():
    told = pd.DataFrame({"run": ["a"], "step": [3], "provenance": [dashboard.known(metric="loss", weights="w")]})
    (found,) = page_frame.provenance_table([pd.DataFrame({"value": [1.0]}), told]).to_dict("records")
    assert (found["run"], found["step"], found["metric"]) == ("a", "3", "loss")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8501", "http://127.0.0.1:8501/", "http://127.0.0.1:8501/depth?a=x"])
def test_a_copied_link_names_this_server_on_any_page(monkeypatch, url):
    monkeypatch.setattr(figures, "st", SimpleNamespace(context=SimpleNamespace(url=url)))
    assert figures.link_address(Link("depth", {"a": "b/c d"})) == "http://127.0.0.1:8501/depth?a=b/c%20d"
