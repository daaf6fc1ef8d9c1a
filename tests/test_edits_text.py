"""Edits as texts, JSON and objects; what cannot be meant, or what a model or a prompt lacks, is refused by name."""

from __future__ import annotations

import json
import re

import pytest
from editing import hooks_standing, some_tokens

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import edited, token_means
from workbench.interventions.edits.kinds import KINDS, PRESETS, Coefficient, Remove, as_edits, from_dict, parse
from workbench.interventions.edits.sink import Sink

TEXTS = [
    "coefficient:layer=2,source=first,value=0.25", "coefficient:path=stream,value=-1.0",
    "values:layer=1..2,head=0/2,how=token_mean,site=own_v", "values:how=layer,from_layer=1", "values:how=shuffle,seed=3",
    "sink:layer=2,head=1", "sink:position=0/-1,how=keep", "remove:layer=2,part=mlp", "patch:layer=2,site=v,position=5",
    "patch:site=z,head=1,position=-2..-1,prompt=same,from_position=3..4", "head:layer=1,head=0/2,how=mean", "remove",
]  # fmt: skip


def test_every_kind_has_common_forms_in_words():
    assert {parse(text).kind for text in PRESETS} == KINDS.keys()
    assert all(str(parse(text)) for text in PRESETS)


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
        ("sink:layers=3", UnknownName, "did you mean layer"),
        ("sink:how=keeps", UnknownName, "did you mean keep"),
        ("values:how=token_men", UnknownName, "token_mean"),
        ("sink:layer", WorkbenchError, "write key=value"),
        ("sink:layer=1,layer=2", WorkbenchError, "gives layer twice"),
        ("sink:layer=a", BadData, "write numbers as"),
        ("sink:layer=5..2", BadData, "a range rises"),
        ("sink:layer=0..99999999999", BadData, "a range rises"),
        ("sink:layer=-1", WorkbenchError, "counted from 0"),
        ("sink:position=", WorkbenchError, "name the positions"),
        ("coefficient:layer=1", WorkbenchError, "needs value"),
        ("coefficient:value=nan", WorkbenchError, "finite"),
        ("coefficient:value=1e308", WorkbenchError, "at most 1e+30"),
        ("coefficient:value=x", WorkbenchError, "number, as 0.5"),
        ("values:from_layer=1", WorkbenchError, "goes with how=layer"),
        ("values:seed=1", WorkbenchError, "goes with how=shuffle"),
        ("values:how=token_mean,site=arriving", WorkbenchError, "no table of what arrives"),
        ("patch:prompt=same", WorkbenchError, "from which positions"),
        ("patch:site=stream,head=1", WorkbenchError, "stream has no heads"),
        ("patch:position=1/1", WorkbenchError, "named twice"),
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
        ("sink:head=4", "head 4 is beyond 0..3; nearest 3"),
        ("values:head=2", "key-value head 2 is beyond 0..1; nearest 1"),
        ("sink:position=16", "position 16 is beyond the 16 tokens; nearest 15"),
        ("values:how=layer,from_layer=3", "layer 3 is beyond 0..2"),
        ("coefficient:layer=0,value=0", "no coefficient of v at layer 0; it has at 1, 2"),
        ("coefficient:source=third,value=0", "first"),
        ("coefficient:path=stream,value=0", "no coefficient of stream; it has path=v"),
        ("values:layer=0,site=arriving", "no values that arrive from elsewhere at layer 0; it has at 1, 2"),
        ("patch", "give it as other="),
        ("values:how=prompt", "give it as other="),
        ("values:how=token_mean", "needs a table"),
    ],
)
def test_what_a_model_or_a_prompt_lacks_is_refused_before_anything_stands(tiny, text, message):
    model = tiny("resformer", config={"n_key_value_heads": 2})
    with pytest.raises(WorkbenchError, match=re.escape(message)), edited(model, ["remove", text], tokens=some_tokens()):
        pass
    assert not hooks_standing(model)


@pytest.mark.parametrize("layer", [[True], [1.0], ["1"]])
def test_numbers_that_are_not_whole_are_refused_in_objects_too(layer):
    with pytest.raises(BadData, match="must be whole numbers"):
        Sink(layer=layer)


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
