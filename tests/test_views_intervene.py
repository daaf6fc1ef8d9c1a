"""The page Intervene and time-lapse: A beside B and less B, what one of them lacks, leaks that are said, scales that hold still."""

from __future__ import annotations

import contextlib
import html
import shlex

import dashboard
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from workbench import plots, prompts
from workbench.cli import main
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import edited
from workbench.models.hooked import next_token_loss
from workbench.prompts import patch_sweep
from workbench.runs.run import Run
from workbench.views import Drawing, Link, drawings
from workbench.views.intervene import LEAKS, effect, next_token
from workbench.views.registered_views import timelapse
from workbench.views.source import RunAtStep
from workbench.views.token_names import signed_number
from workbench.views.tuned_lens import documents_of
from workbench.views.writing import WRITERS

TEXT = "return values"
BOTH = {"compare": "1", "b": "text-transformer-s0"}


@pytest.fixture(scope="module")
def source(populated):
    return dashboard.kept(populated)


def link(**options):
    return Link("intervene", {"a": "text-resformer-s0", "prompt": TEXT} | {k: str(v) for k, v in options.items()})


def drawn(source, name, **options):
    ((_, drawing),) = drawings(source, link(**options), name)
    return drawing


def test_the_difference_of_two_effects_is_drawn_told_and_in_the_table(source):
    drawing = drawn(source, "effect", **BOTH)
    a, b, minus = (drawing.figure.data[i].y for i in range(3))
    assert np.asarray(a) - np.asarray(b) == pytest.approx(np.asarray(minus))
    rows = drawing.table[drawing.table["model"] == plots.MINUS]
    assert rows["change"].to_numpy() == pytest.approx(np.asarray(minus))
    assert f"{plots.MINUS}: {np.mean(minus):+.3g} nats" in drawing.sentence
    assert "above 0: a larger loss in A" in drawing.sentence


def test_next_tokens_of_a_and_b_are_the_same_tokens_and_their_difference(source):
    table = drawn(source, "next_token", edits="remove:layer=1", **BOTH).table
    a, b, minus = (table[table["model"] == name] for name in table["model"].unique())
    assert a["id"].tolist() == b["id"].tolist() == minus["id"].tolist()
    assert minus["after"].to_numpy() == pytest.approx(a["after"].to_numpy() - b["after"].to_numpy())
    model = Run.open(source.folder / "text-transformer-s0").load()
    with torch.no_grad():
        chances = model(torch.tensor([model.tokenizer.encode(TEXT)]))[0, -1].softmax(-1)
    assert b["before"].to_numpy() == pytest.approx(chances[b["id"].tolist()].numpy(), abs=1e-6)


def test_documents_show_the_mean_change_of_the_loss_and_its_interval(source):
    edit = "remove:layer=1"
    drawing = drawn(source, "on_documents", edits=edit, **BOTH)
    entry = next(e for e in source.catalogue().entries if e.name == "text-transformer-s0")
    ids, _ = documents_of(source, RunAtStep(entry, 20), None, None)
    ids, model = torch.tensor(ids[:32]), Run.open(entry.path).load()
    with torch.no_grad():
        plain = next_token_loss(model(ids), ids, per_token=True)
        with edited(model, edit, tokens=ids):
            changed = next_token_loss(model(ids), ids, per_token=True)
    expected = (changed - plain).double().mean(1).numpy()
    rows = drawing.table.groupby("model", sort=False)["change"].apply(np.asarray)
    assert rows.iloc[1] == pytest.approx(expected, abs=1e-5)
    assert rows[plots.MINUS] == pytest.approx(rows.iloc[0] - rows.iloc[1])
    assert f"mean change {signed_number(rows.iloc[1].mean())} nats (95 % interval" in drawing.sentence
    with pytest.raises(WorkbenchError, match="choose an edit"):
        drawn(source, "on_documents")


@pytest.mark.parametrize("name", ["effect", "next_token", "sweep"])
def test_an_edit_that_b_lacks_is_shown_of_a_and_said_of_b(source, name):
    edit = "coefficient:value=0"
    drawing = drawn(source, name, edits=edit, sweep=edit, **BOTH)
    assert drawing.table["model"].nunique() == 1
    assert "B: Transformer · s0, step 20 is left out: " in drawing.sentence
    assert "has no coefficient" in drawing.sentence
    with pytest.raises(WorkbenchError, match="has no coefficient"):
        drawn(source, name, edits=edit, sweep=edit, a="text-transformer-s0", compare=1, b="text-transformer-s1")


@pytest.mark.parametrize("edit", ["values:how=shuffle"])
def test_edits_through_which_later_tokens_flow_say_so(source, edit):
    assert LEAKS in drawn(source, "effect", edits=edit).figure.layout.title.subtitle.text
    assert LEAKS in drawn(source, "sweep", sweep=edit).figure.layout.title.text
    assert LEAKS not in drawn(source, "effect").figure.layout.title.subtitle.text


@pytest.mark.parametrize(("edit", "words"), [
    ("coefficient:layer=1,value=0.3", "set the shortcut's coefficient to 0.3, layer 1"),
    ("sink:layer=0,head=0;remove:layer=1,part=mlp", "cut attention to the first token, layer 0, head 0 and remove an MLP, layer 1"),
])  # fmt: skip
def test_captions_have_edits_in_words(source, edit, words):
    assert f"{words};" in drawn(source, "effect", edits=edit).figure.layout.title.subtitle.text.replace("<br>", " ")


@pytest.mark.parametrize("over", ["layer", "layer x head"])
def test_a_sweeps_difference_is_in_its_table(source, over):
    table = drawn(source, "sweep", over=over, **BOTH).table
    a, b, minus = (table[table["model"] == name]["nats"].to_numpy() for name in table["model"].unique())
    assert a - b == pytest.approx(minus, abs=1e-7)


def test_prompts_of_unequal_length_are_named_in_the_order_of_the_page(source):
    model = Run.open(source.folder / "text-resformer-s0").load()
    with pytest.raises(BadData, match="first prompt has 3 tokens and the second 2"):
        patch_sweep(model, torch.tensor([1, 2, 3]), torch.tensor([1, 2]), (4, 5))


def test_tokens_of_a_prompt_are_no_markup(source):
    drawing = drawn(source, "effect", prompt="<b>x</b> <i>y</i>")
    assert not any("<" in str(tick) for tick in drawing.figure.data[0].x)


@pytest.mark.parametrize("switch", ["depth?compare=yes", "training?log=true"])
def test_a_switch_is_0_or_1(switch):
    with pytest.raises(UnknownName, match="choose from 0, 1"):
        Link.parse(switch)


def test_the_command_inside_a_written_page_names_the_folder_of_runs(source, tmp_path, monkeypatch):
    out = tmp_path / "a page.html"
    asked = ["workbench", "view", str(link()), "--only", "sweep", "--out", str(out), "--runs", str(source.folder)]
    monkeypatch.setattr("sys.argv", asked)
    with contextlib.suppress(SystemExit):
        main()
    told = html.unescape(out.read_text().rpartition("<code>")[2].partition("</code>")[0])
    assert shlex.split(told) == asked


def test_small_numbers_survive_every_table_that_is_written(tmp_path):
    value = 1.234567890123e-12
    made = {"one": Drawing(go.Figure(), pd.DataFrame({"loss": [value]}))}
    for ending, read in {".csv": pd.read_csv, ".json": pd.read_json, ".parquet": pd.read_parquet}.items():
        out = tmp_path / f"table{ending}"
        WRITERS[ending](made, out)
        assert read(out)["loss"][0] == pytest.approx(value, rel=1e-3)


# ---- time-lapse ----


@pytest.mark.slow
@pytest.mark.parametrize("view", [effect, next_token])
def test_each_frame_is_the_view_at_its_step_and_bars_have_one_scale(source, view):
    played = timelapse(view, source, link(**BOTH)).figure
    for step, frame in zip((0, 8, 20), played.frames, strict=True):
        single = view(source, link(step=step, step_b=step, **BOTH)).figure
        letter = "x" if view is next_token else "y"
        for now, then in zip(frame.data, single.data, strict=False):
            assert list(now[letter]) == list(then[letter])
        low, high = played.layout[f"{letter}axis"].range
        shared = [v for t in single.data if t.name != plots.MINUS for v in t[letter]]
        if view is not next_token:
            assert low <= min(0, np.nanmin(shared))
            assert np.nanmax(shared) <= high


def test_two_steps_of_one_run_play_against_the_step_that_was_chosen(source):
    played = timelapse(effect, source, link(compare=1, b="text-resformer-s0", step_b=0))
    assert "B stays at step 0" in played.sentence
    minus = {f.name: np.abs(f.data[2].y).max() for f in played.figure.frames}
    assert minus["step 0"] == 0
    assert minus["step 20"] > 0
    assert {t.name for f in played.figure.frames for t in f.data[1:2]} == {"B: ResFormer · s0, step 0"}


def test_checkpoints_left_out_are_named_with_the_reason(source):
    def partly(source, at):
        if at.text("step") == "8":
            raise WorkbenchError("not measured")
        return drawn(source, "effect", step=at.text("step"))

    said = timelapse(partly, source, link()).sentence
    assert said == "1 of 3 checkpoints cannot be drawn and are left out: step 8: not measured"


def test_the_effect_is_the_loss_after_minus_before(source):
    drawing = drawn(source, "effect", edits="remove")
    table = drawing.table
    assert list(drawing.figure.data[0].y) == pytest.approx(list(table["after"] - table["before"]))
    assert f"{(table['after'] - table['before']).mean():+.3g}" in drawing.sentence
    assert f"the {len(table)} tokens" in drawing.sentence
    same = drawn(source, "effect", edits="coefficient:layer=1,source=first,value=0.5", a="text-resformer-s0")
    assert same.table["after"].to_numpy() == pytest.approx(
        same.table["before"].to_numpy(), abs=1e-6
    )  # it is 0.5 already


def test_patching_everything_at_the_last_stream_brings_the_answer_back(source, monkeypatch):
    text, other, figures = "qzx w", "qzj w", []
    monkeypatch.setattr(prompts, "patch_sweep", lambda *args, **options: patch_sweep(*args, apart=0, **options))
    for target, against in ((5, 9), (9, 5)):
        with contextlib.suppress(BadData):
            pair = {"prompt": text, "other": other, "target": target, "against": against}
            figures.append((drawn(source, "patching", **pair).figure, pair))
    ((figure, pair),) = figures  # the other way round there is nothing to bring back
    restored = np.asarray(figure.data[0].z)
    assert restored[-1, -1] == pytest.approx(1, abs=1e-4)
    assert "logit difference" in figure.layout.title.subtitle.text.replace("<br>", " ")
    layers, last = len(restored) - 1, restored.shape[1] - 1
    whole = drawn(source, "patched", **pair, layer=layers, position=last).table.set_index("id")
    first = drawn(source, "next_token", prompt=text).table.set_index("id")["before"]
    common = whole.index.intersection(first.index)
    assert list(whole["after"][common]) == pytest.approx(list(first[common]), abs=1e-5), "what follows the first text"
    nothing = drawn(source, "patched", **pair, layer=0, position=0).table  # both begin alike
    assert list(nothing["after"]) == pytest.approx(list(nothing["before"]), abs=1e-6)
    (frame,) = drawn(source, "patching", **pair, layer=1, position=2).figure.layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (1.5, 2.5, 0.5, 1.5), "the chosen cell is framed"
    with pytest.raises(BadData, match="layer 9, position 0: there are"):
        drawn(source, "patched", **pair, layer=9, position=0)


@pytest.mark.parametrize(
    ("name", "options", "error", "word"),
    [
        ("effect", {"edits": "values:layer=9"}, WorkbenchError, "layer"),
        ("effect", {"edits": "coefficient:value=0", "a": "text-transformer-s0"}, WorkbenchError, "transformer|no "),
        ("sweep", {"of": "logit"}, BadData, "choose one"),
        ("patching", {}, BadData, "second prompt"),
    ],
)
def test_edits_that_cannot_be_made_are_refused_in_words(source, name, options, error, word):
    with pytest.raises(error, match=word):
        drawn(source, name, **options)
