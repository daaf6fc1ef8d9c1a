"""Edits as texts, JSON and objects; what cannot be meant, or what a model or a prompt lacks, is refused by name."""

from __future__ import annotations

import json
import re

import pytest
from editing import hooks_standing, some_tokens

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import edited, token_means
from workbench.interventions.edits.kinds import Coefficient, Remove, as_edits, from_dict, parse
from workbench.interventions.edits.sink import Sink

TEXTS = [
    "coefficient:layer=2,source=first,value=0.25", "coefficient:path=stream,value=-1.0",
    "values:layer=1..2,head=0/2,how=token_mean,site=own_v", "values:how=layer,from_layer=1", "values:how=shuffle,seed=3",
    "sink:layer=2,head=1", "sink:position=0/-1,how=keep", "remove:layer=2,part=mlp", "patch:layer=2,site=v,position=5",
    "patch:site=z,head=1,position=-2..-1,prompt=same,from_position=3..4", "head:layer=1,head=0/2,how=mean", "remove",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_json_and_object_are_one(text):
    edit = parse(text)
    assert str(edit) == text
    assert from_dict(json.loads(json.dumps(edit.to_dict()))) == edit
    assert as_edits([text, edit, edit.to_dict()]) == [edit] * 3
    assert hash(edit) == hash(parse(text))


def test_numbers_are_lists_however_they_are_written():
    assert Sink(layer=3) == Sink(layer=(3,)) == Sink(layer=[3]) == parse("sink:layer=3")
    assert parse("sink:layer=0/2..4").layer == (0, 2, 3, 4)
    assert parse("sink:layer=2/0").layer == (0, 2)
    assert parse("patch:position=5/2").position == (5, 2), "what is read goes to positions in their order"
    assert as_edits("sink; remove:part=mlp;") == [Sink(), Remove(part="mlp")]
    assert Coefficient(source="source.0", value=1) == Coefficient(source="first", value=1)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("skin:layer=3", UnknownName, "did you mean sink"),
        ("sink:layer", WorkbenchError, "write key=value"),
        ("sink:layer=5..2", BadData, "a range rises"),
        ("sink:position=", WorkbenchError, "name the positions"),
        ("coefficient:value=x", WorkbenchError, "number, as 0.5"),
        ("patch:prompt=same", WorkbenchError, "from which positions"),
        ("patch:position=1..3,from_position=1..2", WorkbenchError, "as many, or one"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sink:layer=3", "layer 3 is beyond 0..2; nearest 2"),
        ("values:head=2", "key-value head 2 is beyond 0..1; nearest 1"),
        ("values:how=layer,from_layer=3", "layer 3 is beyond 0..2"),
        ("coefficient:path=stream,value=0", "no coefficient of stream; it has path=v"),
        ("patch", "give it as other="),
        ("values:how=token_mean", "needs a table"),
    ],
)
def test_what_a_model_or_a_prompt_lacks_is_refused_before_anything_stands(tiny, text, message):
    model = tiny("resformer", config={"n_key_value_heads": 2})
    with pytest.raises(WorkbenchError, match=re.escape(message)), edited(model, ["remove", text], tokens=some_tokens()):
        pass
    assert not hooks_standing(model)


def test_prompts_that_do_not_fit_are_refused(tiny):
    model = tiny()
    with pytest.raises(BadData, match="16 and 9 tokens"), edited(model, "patch", tokens=some_tokens(), other=[1] * 9):
        pass
    with pytest.raises(BadData, match="3 second prompts for 2"):
        edited(model, "patch", tokens=some_tokens(), other=some_tokens(3)).__enter__()
    with pytest.raises(BadData, match="position -10 is beyond the 9"):
        edited(model, "patch:position=3,from_position=-10", tokens=some_tokens(), other=[1] * 9).__enter__()
    with pytest.raises(BadData, match="reads the prompt"):
        edited(model, "patch").__enter__()
    with (
        edited(model, "patch:prompt=same,position=3,from_position=1", tokens=some_tokens()),
        pytest.raises(BadData, match=re.escape("stands for a prompt of (2, 16)")),
    ):
        model(some_tokens(T=8))
    means = token_means(tiny(config={"d_vocab": 80}), "v", [some_tokens()])
    with pytest.raises(BadData, match="another model's"):
        edited(model, "values:how=token_mean", tokens=some_tokens(), means=means).__enter__()
