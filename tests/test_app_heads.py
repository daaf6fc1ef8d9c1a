"""The page Heads: the address names a head, its row is selected, and a passage leads to Attention with its query held."""

from __future__ import annotations

from urllib.parse import parse_qs

import pytest
from app_pages import charts, ignored, said

from workbench.views import Link, Source, heads

RUN = {"a": "race-svformer-s0", "layer": "0", "head": "1"}
TABLE = "all_heads_induction_score_plain"


@pytest.fixture
def page(browse):
    return lambda folder, **address: browse(folder, "heads", **address)


def selected(at, key):
    return at.session_state[key]["selection"]["rows"]


def link_to_attention(at):
    """The words and the address of the way to Attention on the chosen head."""
    (found,) = [e.proto for e in at.get("page_link") if "in Attention" in e.proto.label]
    return found.label, {key: value[0] for key, value in parse_qs(found.query_string).items()}


@pytest.mark.slow
def test_the_named_head_is_selected_and_followed(page, populated):
    at = page(populated, **RUN)
    assert len(charts(at)) == 3
    assert not ignored(at)
    (row,) = selected(at, TABLE)
    assert at.dataframe[0].value["head"][row] == "SVFormer · s0 · L0 H1"
    assert any(h.value.startswith("SVFormer · s0 · L0 H1") for h in at.header)
    label, asked = link_to_attention(at)
    assert "current prompt" in label
    assert asked.items() >= RUN.items()


@pytest.mark.slow
def test_a_chosen_passage_leads_to_attention_with_its_query_held(page, populated):
    found = heads.passages(Source(populated), Link("heads", RUN)).table
    at = page(populated, **RUN, prompt=found["prompt"][3], lock=str(found["lock"][3]))
    assert selected(at, "passages") == [3]
    assert at.dataframe[1].value["text"][3] == found["prompt"][3]
    label, asked = link_to_attention(at)
    assert "selected passage" in label
    assert asked.items() >= (RUN | {"prompt": found["prompt"][3], "lock": str(found["lock"][3])}).items()


@pytest.mark.slow
def test_a_measure_of_layers_that_comes_from_depth_is_named_and_not_called_ignored(page, populated):
    at = page(populated, a="text-resformer-s0", metric="token_identity_share")
    assert not ignored(at)
    assert "Token identity share is not measured per head; ranked by" in said(at)
    assert charts(at)
    assert ignored(page(populated, a="text-resformer-s0", metric="token_identity"))
