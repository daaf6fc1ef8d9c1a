"""What every view draws and says is what it drew and said before: `python tests/figure_outputs.py` writes it down anew."""

from __future__ import annotations

import dashboard
import figure_outputs
import pytest


@pytest.fixture(scope="module")
def source(populated):
    return dashboard.kept(populated)


def test_every_link_is_kept():
    assert list(figure_outputs.kept()) == list(figure_outputs.LINKS)


@pytest.mark.fast(6)
@pytest.mark.parametrize("link", figure_outputs.LINKS)
def test_views_draw_and_say_what_they_did(source, link):
    found, kept = figure_outputs.drawn(source, link), figure_outputs.kept()[link]
    assert list(found) == list(kept)
    for name, parts in kept.items():
        if isinstance(parts, str):
            assert found[name] == parts, (name, figure_outputs.ANEW)
            continue
        assert [words for words, *_ in found[name]] == [words for words, *_ in parts], (name, figure_outputs.ANEW)
        for (words, *numbers), (_, *before) in zip(found[name], parts, strict=True):
            for now, then in zip(numbers, before, strict=True):
                assert now == pytest.approx(then, rel=2e-3, abs=1e-5), (name, words, figure_outputs.ANEW)
