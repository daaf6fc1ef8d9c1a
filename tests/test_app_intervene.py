"""The page Intervene as a person sees it."""

from __future__ import annotations


def test_the_two_answers_that_are_patched_between_differ_unless_somebody_says_so(browse, populated):
    text, other = "qzx w", "qzj w"
    at = browse(populated, "intervene", a="text-resformer-s0", prompt=text, other=other)
    assert not at.exception
    right, wrong = at.selectbox(key="w_target"), at.selectbox(key="w_against")
    assert right.value != wrong.value
    assert any("patching" in c.proto.id for c in at.get("plotly_chart"))
