"""Every page of the dashboard on every kind of folder, the selection's mirror in the URL, and hostile input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import dashboard
import numpy as np
import pytest
import torch

from workbench import plots
from workbench.results import load_records
from workbench.runs import Run
from workbench.views.link import PAGES, SELECTION

APP = Path(__file__).parent.parent / "app"
FOLDERS = ("populated", "empty", "missing", "one", "damaged", "half_written", "foreign")
DEEP = {
    "start": {"show": "here", "a": "text-resformer-s1"},
    "training": {"show": "gradients", "models": "svformer,resformer", "a": "text-resformer-s1"},
    "depth": {"metric": "importance_entropy", "models": "svformer,resformer", "seed": "1", "a": "text-resformer-s1"},
    "attention": {"layer": "0", "head": "1", "a": "text-resformer-s1", "step": "8", "prompt": "return values"},
    "prompt": {"a": "text-resformer-s1", "step": "8", "prompt": "return values", "position": "1", "show": "layers", "quantity": "rank"},
    "intervene": {"a": "text-resformer-s1", "step": "8", "prompt": "return values", "edits": "sink:layer=1", "sweep": "remove:part=mlp"},
}  # fmt: skip
"""A link to each page that says more than the defaults."""
FIGURES = {"start": 0, "training": 2, "depth": 1, "attention": 0, "prompt": 1, "intervene": 3}
"""Figures of those links on a folder that has everything; the attention page draws itself."""
COMPARE = {"compare": "1", "a": "text-resformer-s0", "b": "text-transformer-s1", "step": "20", "step_b": "0"}
HOSTILE = {
    "markup": "<script>alert(1)</script>",
    "path": "../../etc/passwd",
    "long": "x" * 10_000,
    "nan": "NaN",
    "negative": "-1",
    "huge": "9" * 400,
    "empty": "",
    "control": "a\x00\x1b[31m\u202e\u200b;=,:-",
}


@pytest.fixture
def page(browse):
    return browse


def charts(at):
    return [element.proto for element in at.get("plotly_chart")]


def chart(at, name):
    """The figure of a view, as the browser gets it."""
    (found,) = [json.loads(c.spec) for c in charts(at) if f"figure_{name}" in c.id]
    return found


def numbers(values):
    """Numbers of a figure's trace, however they travel."""
    if isinstance(values, dict):
        import base64

        found = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
        return found.reshape([int(n) for n in values["shape"].split(",")]) if "shape" in values else found
    return np.asarray(values, dtype=float)


def address(at, key):
    """A key of the address, as one text."""
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def said(at):
    kinds = (
        "title",
        "header",
        "subheader",
        "markdown",
        "info",
        "warning",
        "success",
        "error",
        "caption",
        "text",
        "code",
    )
    return " ".join(str(e.value) for kind in kinds for e in at.get(kind))


def ignored(at):
    return [i.value for i in at.info if "ignored" in i.value]


# ---- every page on every folder ----


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_deep_link_is_drawn_or_explained_on_any_folder(page, folders, kind, name):
    at = page(folders[kind], name, **DEEP[name])
    assert "Traceback" not in said(at)
    assert at.title[0].value == name.capitalize()
    for found in charts(at):
        assert len(found.alt) > 20
    if kind in ("populated", "one"):
        assert len(charts(at)) == FIGURES[name]
        assert not at.warning
        assert not ignored(at) or kind == "one"
    if kind in ("empty", "missing"):
        assert "make demo" in said(at)
        assert not charts(at)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", FOLDERS)
def test_no_page_breaks_on_any_folder_with_its_defaults(page, folders, kind, name):
    at = page(folders[kind], name)
    assert "Traceback" not in said(at)
    assert bool(charts(at)) or kind != "populated" or name == "attention"
    assert not ignored(at)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", FOLDERS)
def test_no_comparison_breaks_on_any_folder(page, folders, kind, name):
    at = page(folders[kind], name, **DEEP[name] | COMPARE)
    assert "Traceback" not in said(at)
    if kind == "populated":
        assert not ignored(at)
        assert len(charts(at)) >= min(1, FIGURES[name])


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
    assert "run.json" in table["what is wrong"][0]


# ---- figures by value ----


def test_depth_draws_the_mean_of_the_records_of_each_model(page, populated):
    at = page(populated, "depth", **DEEP["depth"] | {"seed": "all"})
    rows = load_records(
        [populated / f"text-svformer-s{s}" for s in range(2)], "metric = 'importance_entropy' and control is null"
    )
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
    assert "the parts of each level sum to" in said(at)
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
    ("name", "address", "widget", "value"),
    [
        ("depth", {"metric": "importance_entropy"}, "w_metric", "importance_entropy"),
        ("depth", {"site": "v"}, "w_site", "v"),
        ("depth", {"seed": "1"}, "w_seed", "1"),
        ("depth", {"a": "text-svformer-s1"}, "w_a", "text-svformer-s1"),
        ("prompt", {"a": "text-resformer-s0", "show": "who", "layer": "0"}, "w_layer", 0),
        ("prompt", {"show": "layers", "quantity": "kl"}, "w_quantity", "kl"),
        ("intervene", {"sweep": "sink"}, "w_sweep", "sink"),
    ],
)
def test_deep_links_reach_the_widgets(page, populated, name, address, widget, value):
    at = page(populated, name, **address)
    assert at.selectbox(key=widget).value == value
    assert not ignored(at)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("depth", {"metric": "nonsense"}),
        ("depth", {"seed": "-1"}),
        ("depth", {"set": "<script>"}),
        ("prompt", {"a": "../../etc"}),
        ("prompt", {"show": "who", "layer": "99"}),
        ("prompt", {"step": "7"}),
        ("prompt", {"position": "99"}),
        ("prompt", {"stored": "../../etc/passwd"}),
        ("training", {"models": "gpt"}),
        ("training", {"colour": "red"}),
        ("intervene", {"over": "<b>"}),
    ],
)
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, name, address):
    at = page(populated, name, **address)
    assert ignored(at)
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


def test_an_edit_that_cannot_be_read_is_explained_and_the_rest_of_the_page_stands(page, populated):
    at = page(populated, "intervene", a="text-resformer-s0", prompt="return values", edits="velues:how=zero")
    assert "values" in " ".join(i.value for i in at.info)
    assert len(charts(at)) == 1  # the sweep


def test_a_folder_of_many_models_draws_the_first_and_says_so(page, tmp_path):
    for i, name in enumerate(("transformer", *(f"resformer_{k}" for k in ("constant", "learnable", "sparse", "dense")),
                              "resformer", "svformer", "neutreno", "denseformer", "mqa")):  # fmt: skip
        common = dashboard.run(tmp_path, f"text-{name}-s0", name, i, "text", steps=())
        dashboard.write_parquet(
            dashboard.records(dashboard.measured(common, "text")),
            tmp_path / f"text-{name}-s0" / "records" / "a.parquet",
        )
    at = page(tmp_path, "depth", metric="importance_entropy")
    assert "The first 8 of 10 models" in said(at)
    assert len(at.button_group(key="w_models").value) == 8
    assert (
        len({t["name"] for t in chart(at, "layers")["data"] if t.get("name") in map(plots.label, plots.COLOURS)}) == 8
    )


# ---- prompts ----


@pytest.mark.parametrize(
    ("text", "word"),
    [("   ", "empty"), ("x" * 100_000, "tokens"), ("def " * 2000, "tokens")],
)
@pytest.mark.parametrize("name", ["prompt", "intervene"])
def test_prompts_that_cannot_be_read_are_explained(page, populated, tmp_path, name, text, word):
    folder = dashboard.copied(populated, tmp_path / "runs")
    at = page(folder, name)
    at.text_area(key="w_prompt").set_value(text).run()
    assert not at.exception
    assert any(word in i.value for i in at.info)
    assert not charts(at)


TEXTS = {
    "markup": "<script>alert(1)</script> [x](javascript:alert(1)) $\\alpha$ :red[a] <b>",
    "right-to-left": "שלום \u202eabc\u202c عربى",
    "emoji": "👩‍👩‍👧 🏳️‍🌈 é",
    "control": "a\x00\x07\x1b[31mb\r\nc\u200b",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    ("name", "part"), [("prompt", "next"), ("prompt", "layers"), ("prompt", "who"), ("intervene", "")]
)
def test_hostile_text_stays_text(page, populated, name, part, text):
    at = page(populated, name, prompt=text, other=text, target="0", **({"show": part} if part else {}))
    assert len(charts(at)) == {"next": 2, "layers": 1, "who": 1, "": FIGURES["intervene"]}[part]
    specs = " ".join(c.spec for c in charts(at))
    shown = [m.value for m in (*at.markdown, *at.info, *at.caption)]
    assert "<script" not in specs + " ".join(shown)
    assert not re.search(r"\d:<b|&lt;<|\]\(javascript", specs)
    assert not any(re.search(r"(?<!\\):red\[|\]\(javascript", m) for m in shown)


def test_repeated_token_models_read_letters_twice(page, populated):
    at = page(populated, "prompt", a="race-svformer-s0", prompt="abc")
    assert "5:c" in charts(at)[1].spec
    assert "6:" not in charts(at)[1].spec
    at.text_area(key="w_prompt").set_value("a€b").run()
    assert any("€" in i.value for i in at.info)


def test_long_prompts_are_stored_and_linked_by_hash(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    text = "def f(x): return x\n" * 12
    at = page(folder, "prompt")
    at.text_area(key="w_prompt").set_value(text).run()
    name = address(at, "stored")
    assert "prompt" not in at.query_params
    assert (folder / ".prompts" / f"{name}.txt").read_text() == text
    assert page(folder, "prompt", stored=name).text_area(key="w_prompt").value == text


# ---- hostile addresses ----


def keys(name):
    return (*SELECTION, *PAGES[name])


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", DEEP)
def test_hostile_values_of_every_key_change_nothing(page, populated, name, value):
    at = page(populated, name, **dict.fromkeys(keys(name), value), unknown=value)
    shown = said(at) + " ".join(c.spec for c in charts(at))
    assert "Traceback" not in shown
    assert not re.search(r"(?<!\\)<script", shown)
    assert "root:" not in shown
    assert any("does not know" in i.value for i in at.info)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [(name, key) for name in DEEP for key in keys(name)])
def test_a_hostile_value_of_one_key_is_ignored_or_explained(page, populated, name, key):
    for value in (HOSTILE["markup"], HOSTILE["path"], HOSTILE["huge"]):
        at = page(populated, name, **{key: value})
        assert not re.search(r"(?<!\\)<script", said(at) + " ".join(c.spec for c in charts(at)))


@pytest.mark.parametrize("name", ["depth", "prompt"])
def test_a_repeated_key_counts_once(page, populated, name):
    at = page(populated, name, a=["text-svformer-s0", "text-resformer-s1"], step=["0", "20"])
    assert at.selectbox(key="w_a").value in ("text-svformer-s0", "text-resformer-s1")
    assert charts(at)


@pytest.mark.parametrize("path", ["../elsewhere/secret", "elsewhere/secret", "{}", "..%2Felsewhere%2Fsecret"])
def test_models_come_from_the_listing_of_the_folder_alone(page, populated, tmp_path, monkeypatch, path):
    secret = dashboard.copied(populated / "text-resformer-s0", tmp_path / "elsewhere" / "secret")
    folder = dashboard.copied(populated, tmp_path / "runs")
    opened = []
    monkeypatch.setattr(
        Run, "open", classmethod(lambda cls, p, real=Run.open.__func__: opened.append(str(p)) or real(cls, p))
    )
    asked = path.format(secret)
    at = page(folder, "prompt", a=asked, b=asked, compare="1", set=asked, stored=asked)
    assert ignored(at)
    assert opened
    assert all(Path(p).resolve().parent == folder.resolve() for p in opened)


# ---- several people ----


@pytest.fixture
def people(monkeypatch):
    """`people(name)` opens a page with a piece of long work for a person; and the work: begun, `end` lets it end."""
    import threading

    from streamlit.testing.v1 import AppTest

    from app import jobs

    begun, end = [], threading.Event()

    def work(progress):
        begun.append(1)
        for i in range(2000):
            progress(i, 2000)
            if end.wait(0.01):
                return "forty-two"
        raise AssertionError("nobody ended the work")

    def script():
        import contextlib

        import streamlit as st

        from app import jobs

        with contextlib.suppress(jobs.Running):
            st.text(jobs.run("the work", "Long work", jobs.work))

    class Person:
        def __init__(self, name):
            self.name, self.at = name, AppTest.from_function(script, default_timeout=20)

        def looks(self):
            monkeypatch.setattr(jobs, "_me", lambda: self.name)
            self.at.run()
            assert not self.at.exception
            return " ".join(e.value for e in (*self.at.text, *self.at.info))

        def presses(self, label):
            monkeypatch.setattr(jobs, "_me", lambda: self.name)
            next(b for b in self.at.button if b.label == label).click()
            return self.looks()

    jobs._jobs.clear()
    monkeypatch.setattr(jobs, "work", work, raising=False)
    monkeypatch.setattr(jobs, "EVERY", 0.05)
    yield Person, begun, end
    end.set()


def test_who_cancels_takes_the_work_from_nobody_else(people):
    person, begun, end = people
    one, two = person("one"), person("two")
    one.looks()
    two.looks()
    assert len(begun) == 1
    assert "cancelled" in one.presses("Cancel")
    assert "cancelled" not in two.looks()
    end.set()
    for _ in range(100):
        if "forty-two" in two.looks():
            break
    assert "forty-two" in two.looks()
    assert "forty-two" in one.looks()  # it is there after all
    assert len(begun) == 1


def test_work_whose_pages_were_closed_stops_and_is_begun_anew_by_whoever_comes_back(people, monkeypatch):
    from app import jobs

    person, begun, end = people
    monkeypatch.setattr(jobs, "ABANDONED", 0.3)
    one = person("one")
    one.looks()
    (job,) = jobs._jobs()[0].values()
    assert job.finished.wait(10)
    assert isinstance(job.error, jobs.Cancelled)
    monkeypatch.setattr(jobs, "ABANDONED", 100)
    end.set()
    for _ in range(100):
        if "forty-two" in one.looks():
            break
    assert len(begun) == 2


def test_work_that_all_cancelled_stops_and_is_begun_anew_by_whoever_asks_next(people):
    from app import jobs

    person, begun, end = people
    one, two = person("one"), person("two")
    one.looks()
    assert "cancelled" in one.presses("Cancel")
    (job,) = jobs._jobs()[0].values()
    assert job.finished.wait(5)
    assert isinstance(job.error, jobs.Cancelled)
    assert "cancelled" in one.looks()
    assert "cancelled" not in two.looks()
    assert len(begun) == 2
    end.set()
    for _ in range(100):
        if "forty-two" in one.presses("Start again") if "cancelled" in one.looks() else "forty-two" in one.looks():
            break
    assert "forty-two" in one.looks()
    assert len(begun) == 2


def test_a_model_in_use_is_let_go_without_keeping_anybody_waiting():
    import threading
    import time

    from app import source

    class Model:
        def __init__(self):
            self.lock, self.done = threading.RLock(), threading.Event()

        def reset_hooks(self):
            pass

        def to(self, device):
            self.done.set()

    model = Model()
    with model.lock:
        begin = time.perf_counter()
        source._release(model)
        assert time.perf_counter() - begin < 1
        assert not model.done.wait(0.05)
    assert model.done.wait(5)


@pytest.mark.parametrize("name", ["step_000020/model.safetensors", "tokenizer.json", "run.json"])
def test_files_replaced_by_older_ones_are_other_files(populated, tmp_path, name):
    from app.source import weights_stamp
    from workbench.views import Link, Source

    folder = dashboard.copied(populated, tmp_path / "runs")
    (subject,) = Source(folder).subjects(Link("prompt", {"a": "text-resformer-s0"}))
    before = weights_stamp(subject)
    assert weights_stamp(subject) == before
    path = folder / "text-resformer-s0" / name
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, 0))  # as tools do that keep times
    other.replace(path)
    assert weights_stamp(subject) != before


# ---- what pages are made of ----


def test_pages_that_only_show_tables_never_import_torch(populated):
    code = (  # in a process of its own
        "import sys; from streamlit.testing.v1 import AppTest; sys.argv = ['main.py'];"
        f"at = AppTest.from_file({str(APP / 'main.py')!r}, default_timeout=60);"
        "at.query_params['show'] = 'here'; at.run(); assert not at.exception; at.query_params.clear();"
        "[at.switch_page(f'views/{name}.py').run() for name in ('training', 'depth')]; assert len(at.get('plotly_chart'));"
        "print(sorted({'torch', 'transformer_lens'} & set(sys.modules)))"
    )
    environment = os.environ | {"WORKBENCH_RUNS": str(populated)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "[]"


def test_the_folder_can_be_given_after_the_double_dash(folders, monkeypatch):
    from app.source import root

    monkeypatch.setenv("WORKBENCH_RUNS", str(folders["empty"]))
    monkeypatch.setattr(sys, "argv", ["main.py", "--runs", str(folders["populated"])])
    assert root() == folders["populated"].resolve()


def test_no_page_writes_raw_html_and_pages_stay_short():
    for path in APP.rglob("*.py"):
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "st.html" not in source
    for path in (APP / "views").glob("*.py"):
        assert "import torch" not in path.read_text()
        assert len(path.read_text().splitlines()) <= 210
