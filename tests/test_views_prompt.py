"""What the page Prompt draws: the numbers of the model, A beside B, and the parts that add up."""

from __future__ import annotations

import dashboard
import numpy as np
import pytest
import torch

from workbench import plots
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.runs.run import Run
from workbench.views import Link, attention, drawings
from workbench.views.token_names import number, signed_number

TEXT = "return values"


@pytest.fixture(scope="module")
def source(populated):
    return dashboard.kept(populated)


def drawn(source, name, **options):
    chosen = {"a": "text-resformer-s0", "prompt": TEXT} | {k: str(v) for k, v in options.items()}
    ((_, drawing),) = drawings(source, Link("prompt", chosen), name)
    return drawing


def test_what_comes_next_of_a_and_b_is_of_the_same_tokens_and_their_difference(source):
    drawing = drawn(source, "predictions", compare=1, b="text-transformer-s0")
    a, b, minus = (drawing.table[drawing.table["model"] == name] for name in drawing.table["model"].unique())
    assert a["id"].tolist() == b["id"].tolist() == minus["id"].tolist()
    assert minus["probability"].to_numpy() == pytest.approx(a["probability"].to_numpy() - b["probability"].to_numpy())
    for name, rows in (("text-resformer-s0", a), ("text-transformer-s0", b)):
        model = Run.open(source.folder / name).load()
        with torch.no_grad():
            chances = model(torch.tensor([model.tokenizer.encode(TEXT)]))[0, -1].softmax(-1)
        assert rows["probability"].to_numpy() == pytest.approx(chances[rows["id"].tolist()].numpy(), abs=1e-6)
        assert set(chances.topk(5).indices.tolist()) <= set(rows["id"])
    figure = drawing.figure
    assert [a.text for a in figure.layout.annotations][-1] == plots.MINUS
    low, high = figure.layout.xaxis3.range
    assert low == -high < -np.abs(np.asarray(figure.data[2].x)).max()


def test_values_are_told_apart_and_the_token_is_found_in_the_first_layer(source):
    own, effective = (np.asarray(drawn(source, "values", site=s).figure.data[0].z) for s in ("own", "effective"))
    assert own[0] == pytest.approx(effective[0], rel=1e-5)
    assert not np.allclose(own[1], effective[1])
    identity = drawn(source, "identity", site="own")
    assert np.asarray(identity.figure.data[0].z)[0] == pytest.approx(1)
    assert "by construction" in identity.sentence


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["lens", "values", "identity"])
def test_maps_of_two_models_share_a_scale_and_subtract(source, name):
    figure = drawn(source, name, compare=1, b="text-transformer-s0").figure
    a, b, minus = (np.asarray(t.z, dtype=float) for t in figure.data[:3])
    assert figure.data[0].coloraxis == figure.data[1].coloraxis != figure.data[2].coloraxis
    assert np.nan_to_num(minus) == pytest.approx(np.nan_to_num(a - b), abs=1e-5)


def letters(source, name, **options):
    """A view of A, which reads letters twice, beside B, which reads text."""
    return drawn(source, name, a="race-svformer-s0", b="text-resformer-s0", compare=1, prompt="qvz", **options)


@pytest.mark.slow
def test_a_model_with_other_tokens_is_asked_after_the_same_text_or_left_out(source):
    table = letters(source, "predictions", position=1).table  # both have read "qv"
    a = drawn(source, "predictions", prompt="qv").table  # B alone, after its own last token
    assert table.loc[table["model"].str.startswith("B"), "probability"].tolist() == pytest.approx(
        a["probability"].tolist(), abs=1e-5
    )
    drawing = letters(source, "predictions")  # A has read "qvzqvz", B never does
    assert set(drawing.table["model"]) == {"A: SVFormer · s0, step 20"}
    assert "left out: none of its tokens ends" in drawing.sentence


def test_ids_of_another_tokenizer_are_no_logit_of_the_same_token(source):
    drawing = letters(source, "attribution", position=1, target=5)
    assert set(drawing.table["model"]) == {"A: SVFormer · s0, step 20"}
    assert "B: ResFormer · s0, step 20 is left out" in drawing.sentence
    assert len(drawing.figure.data) == 1


def test_losses_of_other_tokens_are_drawn_apart_and_never_subtracted(source):
    drawing = letters(source, "surprise")
    assert [len(t.x) for t in drawing.figure.data] == [6, 3]
    assert drawing.figure.data[0].xaxis != drawing.figure.data[1].xaxis
    assert "not drawn" in drawing.sentence


def test_every_vocabulary_has_its_own_chance(source):
    said = letters(source, "identity").sentence
    a, b = (sum(1 / n for n in range(1, d + 1)) / d for d in (64, 270))
    assert f"has {a:.3g} in A, {b:.3g} in B on average." in said


def test_what_a_model_has_not_is_said_and_leaves_no_blank_map(source):
    drawing = drawn(source, "values", site="first_part", compare=1, b="text-transformer-s0")
    assert [t.name for t in drawing.figure.data] == ["A: ResFormer · s0, step 20"]
    assert "B: Transformer · s0, step 20 has no such values" in drawing.sentence
    with pytest.raises(WorkbenchError, match="nothing to draw: Transformer"):
        drawn(source, "values", site="first_part", a="text-transformer-s0")


def test_a_part_that_one_model_lacks_counts_as_nothing(source):
    drawing = drawn(source, "attribution", target=65, layer=1, head=0, compare=1, b="text-transformer-s0")
    minus, b, a = drawing.figure.data
    assert list(a.y) == list(minus.y) == ["the first layer's values", "own values"]
    assert sum(minus.x) == pytest.approx(sum(a.x) - sum(b.x), abs=1e-5)
    assert f"the bars sum to {number(sum(a.x))}" in drawing.sentence


@pytest.mark.parametrize(
    ("name", "options", "error", "word"),
    [
        ("lens", {"prompt": " "}, BadData, "empty"),
        ("values", {"site": "soul"}, UnknownName, "site"),
        ("lens", {"prompt": "x" * 5000}, BadData, "exceed the model's context"),
        ("attribution", {"target": 100000}, BadData, "leaves the vocabulary"),
        ("lens", {"stored": "../../etc/passwd"}, BadData, "not stored"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(source, name, options, error, word):
    with pytest.raises(error, match=word):
        drawn(source, name, **options)


def test_hostile_tokens_stay_text(source):
    figure = drawn(source, "lens", prompt="<script>alert(1)</script> <b>").figure
    assert "<script" not in figure.to_json().replace("\\u003c", "<")


def test_the_next_tokens_after_two_texts_are_the_same_tokens_and_subtracted(source):
    drawing = drawn(source, "two_texts", prompt="return sum(values)", other="def mean(")
    first, second, minus = (
        rows.set_index("id")["probability"] for _, rows in drawing.table.groupby("text", sort=False)
    )
    assert list(first.index) == list(second.index) == list(minus.index)
    assert minus.to_numpy() == pytest.approx(first.to_numpy() - second.to_numpy())
    alone = drawn(source, "predictions", prompt="def mean(").table.set_index("id")["probability"]
    assert second[alone.index.intersection(second.index)].to_numpy() == pytest.approx(
        alone[second.index.intersection(alone.index)].to_numpy()
    )
    assert drawing.table["text"].unique().tolist() == ["first text", "second text", "first − second"]


def test_sources_and_readers_are_drawn_where_the_path_to_a_logit_is_refused(source, monkeypatch):
    whole = drawn(source, "follow", position=1, layer=1)
    assert whole.figure.layout.title.text.startswith("From the score of")
    added = whole.table.query("kind == 'logit'")["amount"].sum()
    assert f"the value adds {signed_number(added)} to the logit of" in whole.sentence

    def refused(*_):
        raise WorkbenchError("a norm without a divisor")

    monkeypatch.setattr(attention, "path", refused)
    drawing = drawn(source, "follow", position=1, layer=1)
    assert "The path to a logit is left out: a norm without a divisor." in drawing.sentence
    assert drawing.figure.layout.title.text == "Sources and readers of a value"
    rows = whole.table[whole.table["kind"].isin(drawing.table["kind"].unique())]
    assert drawing.table["amount"].to_numpy() == pytest.approx(rows["amount"].to_numpy())
