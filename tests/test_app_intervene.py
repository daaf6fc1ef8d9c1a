"""The page Intervene as a person sees it."""

from __future__ import annotations

import pytest
from app_pages import said

from workbench.runs.run import Run


@pytest.mark.slow
def test_nothing_is_changed_until_a_change_is_made_and_a_chosen_edit_is_previewed(browse, populated):
    at = browse(populated, "intervene", a="text-resformer-s0")
    assert "Preview" not in said(at)
    assert [h.value for h in at.header] == ["Loss per token, no edit", "Next token"]
    assert "edits" not in at.query_params
    at.selectbox(key="w_kind").set_value("sink").run()
    assert "Preview of **sink**" in said(at)
    assert sum(c.value.startswith("preview, not added yet; ") for c in at.caption) == 2, "of both figures"
    assert [h.value for h in at.header] == ["Loss change per token", "Next token, before and after"]
    assert "edits" not in at.query_params
    at.button(key="edit_add").click().run()
    assert at.query_params["edits"] in ("sink", ["sink"])
    assert "preview" not in said(at).lower()
    at.multiselect(key="edit_layers").set_value([1]).run()
    at.button(key="edit_add").click().run()
    assert at.query_params["edits"] in ("sink;sink:layer=1", ["sink;sink:layer=1"])


def test_the_two_answers_that_are_patched_between_differ_unless_somebody_says_so(browse, populated):
    text, other = "qzx w", "qzj w"
    at = browse(populated, "intervene", a="text-resformer-s0", prompt=text, other=other, show="patching")
    assert not at.exception
    right, wrong = at.selectbox(key="w_target"), at.selectbox(key="w_against")
    assert right.value != wrong.value
    assert "5 tokens in the first text, 5 in the second" in said(at)
    assert "must lead by more than" in said(at), "this model has learned too little to tell the two apart"


@pytest.mark.slow
def test_a_prompt_longer_than_what_the_model_was_trained_on_is_cautioned(browse, populated):
    trained = Run.open(populated / "text-resformer-s0").train.T
    for words, cautioned in ((trained // 4, False), (trained + 1, True)):
        at = browse(populated, "intervene", a="text-resformer-s0", prompt="q " * words)
        assert (f"trained on {trained}:" in said(at)) == cautioned


def test_a_coefficient_edit_says_that_the_own_weight_stays_and_sets_it_to_one_if_asked(browse, populated):
    at = browse(populated, "intervene", a="text-resformer-s0", kind="coefficient:value=0")
    at.multiselect(key="edit_layers").set_value([1]).run()
    assert "This edit sets λ to a number" in said(at)
    assert "The own weight w stays 0.5" in said(at)
    at.button(key="edit_own").click().run()
    assert not at.exception
    edits = at.query_params["edits"]
    both = "coefficient:layer=1,value=0;coefficient:layer=1,source=own,value=1"
    assert edits in (both, [both])


def test_a_sweep_keeps_the_edit_from_which_it_is_opened(browse, populated):
    at = browse(populated, "intervene", a="text-resformer-s0", kind="coefficient:value=0")
    at.multiselect(key="edit_layers").set_value([1]).run()
    at.slider(key="edit_value").set_value(0.3).run()
    at.button_group(key="w_show").set_value("sweep").run()
    assert at.selectbox(key="w_sweep").value == "coefficient:value=0.3"
    assert not at.exception
    at.button_group(key="w_show").set_value("effect").run()
    assert at.multiselect(key="edit_layers").value == [1]


def test_symbols_are_not_offered_examples_of_text(browse, populated):
    at = browse(populated, "intervene", a="text-resformer-s0", show="patching")
    assert any("Use “" in b.label for b in at.button)
    at = browse(populated, "intervene", a="race-svformer-s0", show="patching")
    assert not any("Use “" in b.label for b in at.button)


@pytest.mark.slow
def test_one_movement_of_the_slider_sets_the_shortcut_of_all_layers(browse, populated):
    at = browse(populated, "intervene", a="text-resformer-s0")
    slider = at.slider(key="edit_value")
    assert slider.value == 0.5, "it opens at the trained coefficient"
    assert "Preview" not in said(at)
    slider.set_value(0.0).run()
    assert "Preview of **coefficient" in said(at)
    assert at.header[0].value == "Loss change per token"
    assert "other texts" in said(at)
    at.toggle(key="w_documents").set_value(True).run()
    while any(b.label == "Cancel" for b in at.button):
        at.run()
    assert "32 documents of" in said(at)
    transformer = browse(populated, "intervene", a="text-transformer-s0")
    assert transformer.selectbox(key="w_kind").value == "values:how=zero"
