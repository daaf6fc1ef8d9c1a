"""Probes: a lookup reaches the ceiling, controls find nothing, bounded memory, and the same documents in any order."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import seeded

from workbench.hook_names import ACTIVATIONS
from workbench.metrics.token_probes import (
    ClassSums,
    Discriminant,
    PreviousTokenProbe,
    PreviousTokenProbeStreamed,
    Prior,
    TokenProbe,
    TokenProbeStreamed,
    _means,
    key_of,
    random_labels,
)

PROBES = [TokenProbe, TokenProbeStreamed]
EVERY_PROBE = [*PROBES, PreviousTokenProbe, PreviousTokenProbeStreamed]


def zipf(n, T, vocabulary, seed=0):
    p = 1 / torch.arange(1, vocabulary + 1).double()
    return p.multinomial(n * T, True, generator=torch.Generator().manual_seed(seed)).view(n, T)


def accumulated(kind, vectors, tokens, parts=5, **options):
    accumulator = kind(**options)
    for x, ids in zip(vectors.split(parts), tokens.split(parts), strict=True):
        accumulator.update(x, ids)
    return accumulator


def probe(vectors, tokens, kind=TokenProbe, **options):
    return accumulated(kind, vectors, tokens, **options).result()


def ceiling(tokens):
    """Bits of a probe that knows every token it has fitted on: others keep their unigram probability."""
    rows = sorted(tokens, key=key_of)
    found = []
    for split in range(3):
        sides = [
            torch.cat([row for i, row in enumerate(rows) if (i + split) % 8 in side])
            for side in ((0, 1, 2, 4, 5), (6,), (3, 7))
        ]
        counts = torch.cat(sides[:2]).bincount(minlength=int(tokens.max()) + 1).double() + 1
        prior = (counts / counts.sum()).log()
        known = torch.isin(sides[2], sides[0])
        mass = prior.exp()[sides[0].unique()].sum().log()
        best = torch.where(known, mass, prior[sides[2]])
        found.append(float((best - prior[sides[2]]).mean() / math.log(2)))
    return sum(found) / 3


# ---- what they find --------------------------------------------------------------------------------------------------


def test_probe_reaches_its_ceiling_on_a_lookup():
    """32 documents of 64 tokens, 256 ids, values of width 96, channels of unequal size."""
    tokens = zipf(32, 64, 256)
    values = (seeded(256, 4, 24, seed=6) @ torch.diag(torch.logspace(-2, 1, 24)))[tokens]
    found, look = probe(values, tokens), probe(values, tokens, TokenProbeStreamed)
    assert found["ceiling"] == pytest.approx(ceiling(tokens), abs=1e-5)
    assert found[""] >= 0.99 * found["ceiling"]
    assert found["of_ceiling"] == pytest.approx(found[""] / found["ceiling"])
    assert look["of_ceiling"] >= 0.99
    assert found["accuracy"] > 0.9
    assert look["accuracy"] > 0.9
    assert found["fraction"] <= 1.0


@pytest.mark.parametrize("architecture", ["resformer", "svformer"])
@pytest.mark.parametrize("kind", PROBES)
def test_own_values_of_the_first_layer_reach_the_ceiling(awake, architecture, kind):
    """They are exact lookups; so are all of SVFormer's values."""
    tokens = zipf(16, 48, 61, seed=2)
    model, names = awake(architecture), [ACTIVATIONS["own_v"].hook.format(layer=0)]
    if architecture == "svformer":
        names.append(ACTIVATIONS["v"].hook.format(layer=2))
    _, cache = model.run_with_cache(tokens, names_filter=names)
    for name in names:
        assert probe(cache[name], tokens, kind)["of_ceiling"] >= 0.99, name


@pytest.mark.parametrize("kind", PROBES)
def test_probe_controls_find_nothing(kind):
    tokens = zipf(32, 64, 100)
    values = seeded(100, 24, seed=6)[tokens]
    assert abs(probe(values, tokens, kind, shifted=True)[""]) < 0.1
    assert abs(probe(seeded(32, 64, 24), tokens, kind)[""]) < 0.1
    assert probe(values, tokens, kind)[""] > 3.0


@pytest.mark.parametrize("kind", PROBES)
def test_probe_reads_half_the_bits_of_half_the_code(kind):
    """Four equally likely tokens in two binary channels; with one channel gone exactly 1 of 2 bits is left."""
    tokens = torch.randint(4, (32, 64), generator=torch.Generator().manual_seed(7))
    code = torch.stack([tokens // 2, tokens % 2], -1).float()
    assert probe(code, tokens, kind)[""] == pytest.approx(2.0, abs=0.02)
    assert probe(code[..., :1], tokens, kind)[""] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("kind", PROBES)
def test_probe_does_not_see_linear_maps(kind):
    tokens = zipf(16, 40, 20)
    x = seeded(20, 6, seed=8)[tokens] + 0.5 * seeded(16, 40, 6)
    mixing = seeded(6, 6, seed=9)
    assert probe(x @ mixing + 3, tokens, kind)[""] == pytest.approx(probe(x, tokens, kind)[""], abs=0.02)


@pytest.mark.parametrize("kind", EVERY_PROBE)
def test_probe_refuses_to_guess(kind):
    tokens = zipf(6, 10, 5)
    assert all(math.isnan(v) for v in probe(seeded(6, 10, 3), tokens, kind).values())
    broken, tokens = seeded(16, 10, 3), zipf(16, 10, 5)
    assert all(math.isfinite(probe(broken, tokens, kind)[v]) for v in ("", "accuracy", "fraction"))
    broken[3, 2] = math.nan
    assert all(math.isnan(v) for v in probe(broken, tokens, kind).values())


@pytest.mark.parametrize("kind", [TokenProbe])
def test_equal_documents_are_one(kind):
    found = probe(seeded(16, 10, 3), torch.zeros(16, 10, dtype=torch.long), kind)
    assert all(math.isnan(v) for v in found.values())


def test_shifted_control_is_no_rotation_onto_itself():
    accumulator = TokenProbe(shifted=True)
    accumulator.update(torch.arange(16.0)[None, :, None], torch.arange(16)[None])
    ((x, y),) = accumulator.reservoir.sorted()
    assert ((x[:, 0].long() - y) % 16 == 8).all()


@pytest.mark.parametrize("kinds", [(PreviousTokenProbe, TokenProbe), (PreviousTokenProbeStreamed, TokenProbeStreamed)])
def test_the_previous_token_is_read_only_where_it_was_mixed_in(kinds):
    """Vectors that are a code of the previous token: the one probe reads it, the other finds nothing of the present one."""
    tokens = torch.randint(7, (24, 40), generator=torch.Generator().manual_seed(0))
    vectors = seeded(7, 12, seed=1)[tokens.roll(1, 1)]
    before, now = (probe(vectors, tokens, kind) for kind in kinds)
    assert before["accuracy"] > 0.99
    assert before["fraction"] > 0.9
    assert abs(now["fraction"]) < 0.1


# ---- splits and random labels ----------------------------------------------------------------------------------------


def test_three_splits_hold_out_different_documents_and_their_spread_is_told():
    tokens = zipf(24, 32, 20)
    accumulator = accumulated(TokenProbe, seeded(20, 6, seed=8)[tokens] + seeded(24, 32, 6), tokens)
    each = [accumulator.held_out_results(split)[:, 0] for split in range(3)]
    found = accumulator.result()
    assert [len(bits) for bits in each] == [6, 6, 6]
    assert found[""] == pytest.approx(float(torch.cat(each).mean()))
    assert found["spread"] == pytest.approx(float(torch.stack([bits.mean() for bits in each]).std()))
    assert found["spread"] > 0


def test_random_labels_are_what_the_probe_can_learn_by_heart():
    """Two tokens on a line: any labels can be learnt. Eight on a line: only labels that lie in order."""
    seen = torch.tensor([3, 3, 3, 5])
    label = random_labels(seen, 8, 0)
    assert set(label[[3, 5]].tolist()) <= {3, 5}
    assert label[[0, 1, 2, 4, 6, 7]].tolist() == [0, 1, 2, 4, 6, 7], "a token not seen keeps its own"
    tokens = torch.randint(40, (32, 64), generator=torch.Generator().manual_seed(3))
    wide, narrow = seeded(40, 64, seed=1)[tokens], seeded(40, 3, seed=1)[tokens]
    assert probe(wide, tokens, random_labels=True)["accuracy"] > 0.99
    assert probe(narrow, tokens, random_labels=True)["accuracy"] < probe(narrow, tokens)["accuracy"] - 0.2


# ---- what they keep --------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", EVERY_PROBE[::2])
def test_probes_do_not_depend_on_order_batches_or_merging(kind):
    tokens = zipf(100, 20, 30)
    vectors = seeded(30, 8)[tokens] + seeded(100, 20, 8, seed=1)
    whole = probe(vectors, tokens, kind)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    shuffled = probe(vectors[order], tokens[order], kind, parts=33)
    merged = accumulated(kind, vectors[60:], tokens[60:])
    merged.merge(accumulated(kind, vectors[:60], tokens[:60]))
    twice = accumulated(kind, vectors, tokens)
    twice.merge(kind())
    for other in (shuffled, merged.result(), twice.result()):
        assert other == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_a_document_that_comes_twice_is_on_no_two_sides():
    tokens = zipf(20, 30, 25)
    vectors = seeded(25, 6)[tokens] + seeded(20, 30, 6, seed=1)
    again = torch.cat((tokens, tokens[:7]))
    assert probe(torch.cat((vectors, vectors[:7])), again) == probe(vectors, tokens)


# ---- the closed form -------------------------------------------------------------------------------------------------


def test_class_sums_by_hand_and_merged():
    one, two = ClassSums(), ClassSums()
    one.add(torch.tensor([[1.0, 0.0], [3.0, 2.0]]), torch.tensor([4, 4]))
    two.add(torch.tensor([[5.0, 1.0], [1.0, 1.0]]), torch.tensor([2, 4]))
    one.merge(two)
    ids, counts, sums = one.ascending()
    assert ids.tolist() == [2, 4]
    assert counts.tolist() == [1.0, 3.0]
    assert sums.tolist() == [[5.0, 1.0], [5.0, 3.0]]
    assert one.second.tolist() == [[36.0, 12.0], [12.0, 6.0]]


def test_discriminant_equals_the_naive_bayes_rule_of_two_gaussians():
    """Many vectors of two tokens, covariance 1 within: log odds (m1 - m0) x - (m1^2 - m0^2) / 2 + log(n1 / n0)."""
    y = (torch.arange(40_000) % 4 == 0).long()
    x = seeded(40_000, 1).double()
    x = torch.where(y[:, None] == 1, x + 2, x)
    sums = ClassSums()
    sums.add(x, y)
    rule = Discriminant.of(sums)
    points = torch.tensor([[-1.0], [0.0], [1.0], [2.5]])
    scores = rule.scores(points)
    # 3 % of the whole variance, 1 + 4 * 3/16, is added to the variance within
    expected = (2 * points[:, 0] - 2) / (1 + 0.03 * 1.75) + math.log(1 / 3)
    torch.testing.assert_close(scores[:, 1] - scores[:, 0], expected, rtol=0.05, atol=0.05)


def test_means_of_a_probe_are_over_documents_and_a_share_needs_a_ceiling():
    """Two documents: bits, accuracy, unigram, ceiling."""
    means, errors = _means(torch.tensor([[0.1, 0.5, 2.0, 0.4], [0.3, 0.5, 2.0, 0.6]]))
    assert means == pytest.approx({"": 0.2, "accuracy": 0.5, "fraction": 0.1, "ceiling": 0.5, "of_ceiling": 0.4})
    assert errors == pytest.approx({"": 0.1, "accuracy": 0.0, "ceiling": 0.1})
    assert math.isnan(_means(torch.tensor([[0.1, 0.5, 2.0, 0.0]]))[0]["of_ceiling"])


def test_bits_of_a_perfect_and_of_a_useless_probe_by_hand():
    """Counts 3 and 1 of the tokens seen, one token of three unseen: add-one gives 4/7, 2/7 and 1/7."""
    prior = Prior.of(torch.tensor([3, 1, 0]), torch.tensor([0, 1]))
    y = torch.tensor([0, 1, 2])
    certain = torch.tensor([[50.0, 0.0], [0.0, 50.0], [50.0, 0.0]])
    bits, accuracy, unigram, best = prior.judged((certain, y), [(certain, y)])[0].tolist()
    assert unigram == pytest.approx((math.log2(7 / 4) + math.log2(7 / 2) + math.log2(7)) / 3)
    assert best == pytest.approx((math.log2(6 / 4) + math.log2(6 / 2) + 0) / 3)
    assert bits == pytest.approx(best, abs=1e-4)
    assert accuracy == pytest.approx(2 / 3)
    misled, said = torch.tensor([[0.0, 50.0], [50.0, 0.0]]), torch.tensor([0, 1])
    assert prior.judged((misled, said), [(misled, said)])[0, 0] == 0, "scores that mislead are not listened to"
    nothing = prior.log_p[:2].expand(3, 2)
    assert prior.judged((nothing, y), [(nothing, y)])[0, 0] == pytest.approx(0.0, abs=1e-6)
