"""Every page of the dashboard on every kind of folder, its figures by value, and the selection's mirror in the URL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from urllib.parse import parse_qs

import dashboard
import figure_outputs
import pytest
from app_pages import APP, COMPARE, DEEP, FIGURES, address, chart, charts, elements, ignored, said

from app.url_widgets import SAME_PAGE
from workbench.places import SHIPPED
from workbench.views import Link, Source
from workbench.views.page_links import PAGES
from workbench.views.registered_views import ONE_SEED


@pytest.fixture
def page(browse):
    return browse


def test_depth_weights_are_drawn_by_an_address_also_of_files_without_a_run(page, populated, folders):
    at = page(populated, "depth", metric="importance_entropy", a="text-denseformer-s0", weights="1")
    drawn = [c.alt for c in charts(at) if "Learned depth weights" in c.alt]
    assert len(drawn) == 1
    path = str(populated / "text-denseformer-s0" / "step_000008")
    at = page(folders["half_written"], "depth", path=path)
    assert at.text_input(key="w_path").value == path
    assert len([c for c in charts(at) if "Learned depth weights" in c.alt]) == 1
    at = page(populated, "depth", a="text-transformer-s0", weights="1")
    assert "has no learned depth weights" in said(at)
    assert len(charts(at)) > 0, "the measures are drawn"


@pytest.mark.slow
def test_a_page_without_a_model_opens_on_the_text_model_that_ships_unless_the_address_names_one(
    page, populated, tmp_path, monkeypatch
):
    monkeypatch.setattr("workbench.views.source.MODELS", SHIPPED / "models")
    for run in populated.glob("race-*"):
        dashboard.copied(run, tmp_path / run.name)
    source = Source(tmp_path)
    for name in PAGES.keys() - {"training", "heads"}:
        assert source.subjects(Link(name))[0].entry.name == "models-resformer-s0", name
        assert source.subjects(Link(name, {"a": "race-svformer-s0"}))[0].entry.name == "race-svformer-s0", name
    assert source.group(Link("training"))[0].name.startswith("race"), "own runs"
    assert {e.name for e in source.listed()} == {run.name for run in populated.glob("race-*")}, "these alone are judged"
    links = page(tmp_path, "training").sidebar.get("page_link")
    assert not any("set=" in e.proto.query_string for e in links), "no page inherits a symbol model"
    links = page(tmp_path, "training", a="race-svformer-s0").sidebar.get("page_link")
    assert all("a=race-svformer-s0" in e.proto.query_string for e in links)
    at = dashboard.settled(page(tmp_path, "maps", groups="3"))
    assert any("read symbols, so the page opens on a shipped text model" in c.value for c in at.caption)
    assert at.selectbox(key="w_groups").value == 3, "an address with groups opens their panel"


@pytest.mark.slow
def test_another_experiment_keeps_the_measure_or_names_those_that_it_has(page, populated):
    at = page(populated, "depth")
    shown, text = at.selectbox(key="w_metric").value, at.selectbox(key="w_set").value
    other = next(e.group for e in Source(populated).catalogue().entries if e.group != text)
    at.selectbox(key="w_set").set_value(other)
    at = dashboard.settled(at.run())
    assert address(at, "metric") == shown
    told = "This experiment has no records of importance entropy; induction score is shown. It has: induction score."
    assert told in said(at).replace("\\", "")
    at.selectbox(key="w_set").set_value(text)
    assert dashboard.settled(at.run()).selectbox(key="w_metric").value == shown


@pytest.mark.slow
def test_experiments_of_a_study_are_named_by_what_differs_first(page, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.views.source.EVIDENCE", SHIPPED / "evidence")
    names = [name for name in page(tmp_path, show="model").selectbox(key="w_set").options if name.startswith("losses,")]
    assert len(names) == len({name[:20] for name in names}) == 3, "those of one content and shape differ in the rate"


def test_names_of_variants_in_a_definition_are_those_of_the_menus_and_numbers_hold_what_differs(page, populated):
    at = page(populated, "depth", metric="importance_entropy")
    at.session_state["definition"] = at.session_state["open_differences"] = True
    at.session_state["menu_differences"] = "Numbers"
    at = dashboard.settled(at.run())
    assert "“per head” takes the entropy" in " ".join(t.value for t in at.text)
    (table,) = (d.value for d in at.dataframe if "low" in d.value)
    assert not {"p", "metric", "n"} & {*table}, "equal in all rows"
    (equal,) = (c.value for c in at.caption if c.value.startswith("Equal in all rows: "))
    assert ", n 2, " in equal, "paired seeds, not documents"


# ---- differences ----


def test_differences_offer_the_comparison_and_then_show_the_documents_that_differ_most_in_loss(
    page, tmp_path, monkeypatch
):
    monkeypatch.setattr("workbench.views.source.MODELS", SHIPPED / "models")
    at = page(tmp_path, "differences")
    (offer,) = [e.proto for e in at.get("page_link") if e.proto.label.startswith("Compare")]
    assert offer.label == "Compare with Transformer · s0 (same experiment and seed)"
    at = page(tmp_path, "differences", **{k: v[0] for k, v in parse_qs(offer.query_string).items() if k != SAME_PAGE})
    assert at.selectbox(key="w_metric").value == "loss"
    assert at.selectbox(key="w_order").options == ["largest difference", "lowest A − B", "highest A − B"]
    assert "minus Transformer" in said(at)
    (table,) = (d.value for d in at.dataframe if "A − B" in d.value)
    assert table["A − B"].abs().is_monotonic_decreasing
    assert not any(ONE_SEED in e.value for e in at.get("markdown")), "each figure states its own number of seeds"
    titles = [header.value for header in at.header]
    assert titles.index("Weights that differ") > titles.index("Documents that differ most"), "unrelated models"


def test_a_measure_without_values_of_documents_names_those_that_have_them(page, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.views.source.MODELS", SHIPPED / "models")
    at = page(tmp_path, "depth", metric="importance_entropy", behind="1")
    assert "Measures with values of single documents: loss" in said(at).replace("\\", "")
    (offer,) = [e.proto for e in at.get("page_link") if e.proto.label == "Documents by loss"]
    assert "metric=loss" in offer.query_string


# ---- every page on every folder ----


SHOWN = {
    "populated": DEEP, "empty": ["start"], "missing": ["prompt"], "one": ["depth", "heads"],
    "damaged": ["start", "attention"], "half_written": ["training", "prompt"], "foreign": ["intervene"],
}  # fmt: skip
"""The pages that read of each kind of folder what no other page does."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, pages in SHOWN.items() for name in pages])
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
@pytest.mark.parametrize("name", ["depth", "prompt"])
def test_no_comparison_breaks_on_a_damaged_folder(page, folders, name):
    assert "Traceback" not in said(page(folders["damaged"], name, **DEEP[name] | COMPARE))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_damaged_run_is_named_and_does_not_hide_the_others(page, folders):
    at = page(folders["damaged"], "depth", metric="importance_entropy")
    assert any("text\\-svformer\\-s0" in w.value for w in at.warning)
    assert len({t["name"] for t in chart(at, "layers")["data"] if t.get("name")}) >= 3
    at = page(folders["damaged"], "prompt", a="text-transformer-s1", step="20")
    assert "cannot be opened" in said(at).replace("\\", "") or "model.safetensors" in said(at).replace("\\", "")
    assert not charts(at)


# ---- the address ----


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "address", "labels"),
    [
        ("depth", {"metric": "nonsense", "seed": "-1", "set": "<script>"}, {"measure", "seed", "experiment"}),
        ("prompt", {"a": "../../etc", "step": "7", "position": "99", "stored": "../../etc/passwd"},
         {"model a", "step of a", "position", "stored prompt"}),
        ("intervene", {"show": "sweep", "over": "<b>"}, {"sweep over"}),
    ],
)  # fmt: skip
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, name, address, labels):
    at = page(populated, name, **address)
    told = " ".join(ignored(at))
    assert set(re.findall("“(.*?)”", told)) == labels
    assert ("unknown options" in told) == ("colour" in address)
    assert charts(at)
    assert "<script>" not in said(at)


@pytest.mark.slow
def test_choices_are_written_to_the_address(page, populated):
    at = page(populated, "depth", a="text-resformer-s0")
    at.selectbox(key="w_metric").set_value("sink_mass")
    at.button_group(key="w_models").set_value(["resformer", "svformer"])
    at.select_slider(key="w_step").set_value(0).run()
    chosen = {key: address(at, key) for key in ("metric", "models", "step")}
    assert chosen == {"metric": "sink_mass", "models": "resformer,svformer", "step": "0"}
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


@pytest.mark.slow
def test_a_click_before_the_page_has_drawn_what_was_chosen_makes_what_was_chosen(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", kind="head")
    dashboard.settled(at.button(key="edit_set").click().run())
    at.selectbox(key="w_kind").set_value("sink")
    at.multiselect(key="edit_layers").set_value([1])
    at.multiselect(key="edit_heads").set_value([0])
    dashboard.settled(at.button(key="edit_add").click().run())
    assert address(at, "edits") == "head;sink:layer=1,head=0"
    assert at.text_input(key="w_edits").value == address(at, "edits")
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


def test_no_page_writes_raw_html_or_imports_torch():
    for path in APP.rglob("*.py"):
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "st.html" not in source
    for path in (APP / "screens").glob("*.py"):
        assert "import torch" not in path.read_text()


@pytest.mark.slow
def test_a_model_shown_by_default_that_goes_away_is_announced(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    at = page(folder, "depth")
    gone = at.selectbox(key="w_a").value
    shutil.rmtree(folder / gone)
    at.run()
    shown = at.selectbox(key="w_a").value
    assert shown != gone
    assert [t.value for t in at.toast] == [f"Model A: {gone} was removed; {shown} is shown."]
