"""The page Intervene as a person sees it."""

from __future__ import annotations

from app_pages import said


def test_the_two_answers_that_are_patched_between_differ_unless_somebody_says_so(browse, populated):
    text, other = "qzx w", "qzj w"
    at = browse(populated, "intervene", a="text-resformer-s0", prompt=text, other=other)
    assert not at.exception
    right, wrong = at.selectbox(key="w_target"), at.selectbox(key="w_against")
    assert right.value != wrong.value
    assert "5 tokens in the first text, 5 in the second" in said(at)
    assert "must lead by more than" in said(at), "this model has learned too little to tell the two apart"
