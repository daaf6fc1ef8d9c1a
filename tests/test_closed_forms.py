"""Fast forms from second moments: equal to what they stand for, also in float32 and far from the origin."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.interventions.similarity import CrossMoments
from workbench.metrics.spectrum import head_rank


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gram_cka(x, y):
    """As Kornblith et al. define it: HKH, from the tokens' products."""
    h = torch.eye(len(x), dtype=x.dtype) - 1 / len(x)
    k, m = h @ x @ x.T @ h, h @ y @ y.T @ h
    return float((k * m).sum() / (k.norm() * m.norm()))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_cka_of_float32_parts_equals_the_gram_form_in_float64(offset):
    x = seeded(300, 12) + offset * seeded(12)
    y = (x @ seeded(12, 9) + 3 * seeded(300, 9)).float()
    moments = CrossMoments()
    for part in (slice(0, 7), slice(7, 150), slice(150, 300)):
        moments.add({0: x[part], 3: y[part]})
    found = moments.cka()
    assert set(found) == {(0, 0), (3, 0), (3, 3)}
    assert found[3, 0] == pytest.approx(gram_cka(x.double(), y.double()), abs=1e-5)
    assert [found[0, 0], found[3, 3]] == pytest.approx([1, 1], abs=1e-6)


def test_rank_of_a_head_by_hand():
    """Squared lengths 3 and 1 along two axes: shares 3/4 and 1/4. The other head repeats one direction."""
    v = torch.zeros(1, 4, 2, 3)
    v[0, :, 0] = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    v[0, :, 1] = torch.tensor([1.0, 2, 3])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert head_rank(v)[0].tolist() == pytest.approx([math.exp(entropy), 1], abs=1e-5)
    assert head_rank(v, top=True)[0].tolist() == pytest.approx([0.75, 1], abs=1e-6)
    assert head_rank(torch.eye(5)[None, :, None]).item() == pytest.approx(5)


def test_a_head_that_is_not_finite_or_writes_nothing_has_no_rank():
    v = seeded(2, 5, 3, 4)
    v[0, 2, 1, 0], v[1, :, 2] = math.inf, 0
    found = head_rank(v)
    assert found.isnan().nonzero().tolist() == [[0, 1], [1, 2]]
