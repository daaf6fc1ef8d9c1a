"""Each metric: a number worked by hand, an extreme, the invariances it promises; and the register they stand in."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import Float
from tensors import seeded
from torch import Tensor

from workbench.errors import UnknownName
from workbench.metrics import METRICS, metric
from workbench.metrics.residual import (
    collapse_residual,
    hidden_norm,
    hidden_peak,
    loss,
    massive_activations,
    repetition_floor,
    token_similarity,
)
from workbench.metrics.spectrum import EffectiveRank, Spectrum
from workbench.metrics.values import TokenIdentityShare, returning, value_drain, value_norm
from workbench.metrics.weights import cache_bytes, cache_traffic, gradient_norm, part_of

# ---- the register ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METRICS if "_probe" in name])
def test_a_probe_sees_all_documents_at_once_and_tells_its_own_errors(name):
    """On parts of them, as a jackknife takes, it would be fitted on less and judged on less."""
    assert METRICS[name].folds == 1


def register(function, **changes):
    fields = {"unit": "u", "range": "r", "reading": "higher", "source": "s"}
    return metric(**(fields | changes))(function)


def test_unknown_arguments_sites_and_axes_are_refused():
    def reads_nonsense(vlaue: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """Nothing."""

    def lacks_site(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, " batch"]:
        """Nothing."""

    def odd_axis(sink: Float[Tensor, "batch head pos"]) -> Float[Tensor, "batch moon"]:
        """Nothing."""

    with pytest.raises(UnknownName, match="vlaue"):
        register(reads_nonsense)
    with pytest.raises(UnknownName, match="own_values"):
        register(lacks_site, sites=("own_values",))
    with pytest.raises(UnknownName, match="moon"):
        register(odd_axis)
    assert not {"reads_nonsense", "lacks_site", "odd_axis"} & METRICS.keys()


# ---- norms and similarity --------------------------------------------------------------------------------------------


def test_norms_and_ratios_by_hand():
    x = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [4.0, 0.0]]])
    for norm in (hidden_norm, value_norm):
        assert norm(x)[0].tolist() == [5.0, 1.0, 2.0, 3.0, 4.0]
    assert float(hidden_peak(x)) == 2.0
    assert float(value_drain(x)) == 2.0, "the median of an even count lies between the middle two"


@pytest.mark.parametrize("measure", [hidden_peak, value_drain, token_similarity])
def test_ratios_and_cosines_do_not_see_scale_or_rotation(measure):
    x = seeded(2, 40, 16, dtype=torch.double)
    rotation = torch.linalg.qr(seeded(16, 16, seed=1, dtype=torch.double)).Q
    torch.testing.assert_close(measure(7.0 * x @ rotation), measure(x))


def naive_similarity(x):
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    return float((unit @ unit.T)[~torch.eye(len(x), dtype=torch.bool)].mean())


@pytest.mark.parametrize("kind", ["random", "alike", "massive", "uneven"])
def test_closed_form_similarity_is_the_mean_over_pairs(kind):
    T, x = 127, seeded(127, 64)
    x = {
        "random": x,
        "alike": seeded(64, seed=1) + 0.01 * x,
        "massive": x + 1000 * torch.eye(64)[3],
        "uneven": x * torch.logspace(-4, 4, T)[:, None],
    }[kind]
    assert abs(float(token_similarity(x[None])) - naive_similarity(x)) < 1e-7
    assert abs(float(token_similarity(x[None], skip=1)) - naive_similarity(x[1:])) < 1e-7
    order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
    assert abs(float(token_similarity(x[None, order])) - float(token_similarity(x[None]))) < 1e-12


def test_similarity_of_vectors_wider_than_the_parts_it_is_summed_in():
    x = seeded(9, 300)
    assert abs(float(token_similarity(x[None])) - naive_similarity(x)) < 1e-7


def test_similarity_of_its_extremes():
    assert float(token_similarity(seeded(1, 8).expand(1, 9, 8))) == pytest.approx(1.0, abs=1e-12)
    assert float(token_similarity(torch.eye(5)[None])) == 0.0
    opposite = torch.tensor([[[1.0, 0], [-1, 0], [0, 1], [0, -1]]])
    assert float(token_similarity(opposite)) == pytest.approx(-1 / 3), "the least there is: -1/(T-1)"
    assert token_similarity(torch.zeros(1, 4, 3)).isfinite().all()


def test_repetition_floor_by_hand():
    assert repetition_floor(torch.tensor([[1, 1, 1], [1, 2, 3], [1, 1, 2]])).tolist() == pytest.approx([1, 0, 1 / 3])
    ids = torch.tensor([[4, 4, 2, 7, 2, 4]])
    assert float(token_similarity(torch.eye(8)[ids])) == pytest.approx(float(repetition_floor(ids)))


def test_loss_by_hand():
    tokens = torch.tensor([[0, 1, 2]])
    assert float(loss(torch.zeros(1, 3, 5), tokens)) == pytest.approx(math.log(5))
    certain = torch.full((1, 3, 5), -1e9)
    certain[0, 0, 1] = certain[0, 1, 2] = 0.0
    assert float(loss(certain, tokens)) == 0.0
    assert float(loss(-certain * 1e3, tokens)) > 1e11, "no overflow"
    torch.testing.assert_close(loss(seeded(1, 3, 5) + 100, tokens), loss(seeded(1, 3, 5), tokens), rtol=1e-4, atol=0)


# ---- token identity --------------------------------------------------------------------------------------------------


def share(vectors, tokens, **options):
    accumulator = TokenIdentityShare(**options)
    accumulator.update(vectors, tokens)
    return accumulator.result()


def test_identity_share_by_hand():
    tokens = torch.tensor([[0, 0, 1, 1]])
    x = torch.tensor([[[0.0], [2.0], [10.0], [12.0]]])
    # type means 1 and 11, grand mean 6: SSB = 4 * 25 = 100, SSW = 4, MSW = 4 / (4 - 2) = 2
    assert share(x, tokens) == pytest.approx((100 - 2) / (100 + 4 + 2))


def test_identity_share_of_its_extremes():
    tokens = torch.randint(12, (4, 50), generator=torch.Generator().manual_seed(0))
    table = seeded(12, 3, 8, seed=1)
    assert share(table[tokens], tokens) == pytest.approx(1.0, abs=1e-12)
    assert abs(share(seeded(4, 50, 3, 8), tokens)) < 0.05
    assert abs(share(table[tokens], tokens, shuffle=True)) < 0.05
    assert math.isnan(share(torch.ones(1, 4, 2), torch.tensor([[0, 0, 1, 1]])))
    assert math.isnan(share(seeded(1, 4, 2), torch.tensor([[0, 1, 2, 3]])))
    assert math.isnan(TokenIdentityShare().result())


def test_identity_share_is_corrected_for_many_types():
    """Pure noise, half as many types as tokens: the raw ratio would be about 1/2."""
    tokens = torch.arange(200).repeat(2)[None]
    assert abs(share(seeded(1, 400, 16), tokens)) < 0.1


def test_identity_share_does_not_see_scale_rotation_or_order():
    tokens = torch.randint(9, (3, 40), generator=torch.Generator().manual_seed(1))
    x = seeded(9, 8, seed=3)[tokens] + seeded(3, 40, 8)
    rotation = torch.linalg.qr(seeded(8, 8, seed=2)).Q
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert share(5 * x @ rotation, tokens) == pytest.approx(share(x, tokens), abs=1e-6)
    assert share(x[:, order], tokens[:, order]) == pytest.approx(share(x, tokens), abs=1e-12)


@pytest.mark.parametrize("known", [False, True])
def test_identity_share_merges_to_a_single_pass(known):
    """Also where it is known ahead which ids come twice, and sums of no others are kept."""
    tokens = torch.randint(90, (7, 30), generator=torch.Generator().manual_seed(4))
    x = seeded(90, 4, seed=5)[tokens] + seeded(7, 30, 4)
    whole, options = share(x, tokens), returning(tokens) if known else {}
    assert 0 < len(returning(tokens)["among"]) < len(tokens.unique())
    for cuts in ([1, 6], [3, 3, 1], [7]):
        total = TokenIdentityShare(**options)
        for ids, vectors in zip(tokens.split(cuts), x.split(cuts), strict=True):
            part = TokenIdentityShare(**options)
            part.update(vectors, ids)
            total.merge(part)
        assert total.result() == pytest.approx(whole, abs=1e-8)


# ---- weights and gradients -------------------------------------------------------------------------------------------


def test_gradient_norms_by_hand():
    gradients = {"blocks.1.attn.v_proj.weight": torch.tensor([[3.0, 4.0]]), "embed.weight": torch.zeros(2, 2)}
    weights = {name: torch.full_like(g, 2.0) for name, g in gradients.items()}
    assert gradient_norm(gradients, weights) == [("W_V", 1, 5.0), ("W_E", None, 0.0)]
    assert gradient_norm(gradients, weights, relative=True)[0].value == pytest.approx(5 * math.sqrt(8))
    half = {name: g.bfloat16() for name, g in gradients.items()}
    assert gradient_norm(half, weights)[0].value == 5.0
    assert part_of("ln_final.weight") == ("ln_final", None)


class FilledCache:
    """Of two sequences and five tokens: 960 bytes held, 2,400 read by the last pass."""

    batch, length = 2, 5
    nbytes, traffic = (lambda self: 960), (lambda self: 2400)


def test_cache_bytes_and_traffic_by_hand():
    weights = {
        f"blocks.{i}.attn.{p}_proj.weight": torch.zeros(8, 32) for i, p in ((0, "k"), (0, "v"), (1, "k"), (1, "q"))
    }
    weights["bank_of_values.tables.1"] = torch.zeros(61, 8)
    assert cache_bytes(FilledCache(), weights) == [("all", None, 96.0)]
    assert cache_bytes(FilledCache(), weights, formula=True) == [("all", None, 2.0 * (8 + 8 + 8 + 8))]
    assert cache_traffic(FilledCache()) == [("all", None, 240.0)]
    assert cache_traffic(FilledCache(), capacity=True) == [("all", None, 96.0)]


# ---- collapse, massive entries, spectra ------------------------------------------------------------------------------


def test_collapse_residual_by_hand_and_against_similarity():
    same, orthogonal = torch.ones(1, 4, 3), torch.eye(4)[None]
    assert collapse_residual(same).item() == 0
    assert collapse_residual(orthogonal).item() == pytest.approx(math.sqrt(3 / 4))
    shortest = seeded(1, METRICS["collapse_residual"].min_length, 3)
    assert collapse_residual(shortest, skip=1).item() > 0, "one vector alone would be called collapsed"
    assert METRICS["collapse_residual"].controls["orthogonal"](4) == pytest.approx(math.sqrt(3 / 4))
    unit = torch.nn.functional.normalize(seeded(2, 9, 5).double(), dim=-1)
    T, r = 9, collapse_residual(unit)
    torch.testing.assert_close((T * (1 - r**2) - 1) / (T - 1), token_similarity(unit))
    assert collapse_residual(torch.cat((5 * seeded(1, 1, 3), same), 1), skip=1).item() == 0


def test_massive_activations_by_the_published_criterion():
    x = torch.ones(1, 4, 5) * 0.1
    x[0, 2, 3] = -150
    assert massive_activations(x).item() == pytest.approx(1500)
    assert massive_activations(x, count=True).item() == 1
    assert massive_activations(x / 2, count=True).item() == 0  # 75 is not above 100
    x[0, 0] = 150  # six of twenty entries
    assert massive_activations(x * 2, count=True).item() == 6


def test_effective_rank_of_equal_and_of_single_directions():
    """Four orthogonal vectors of one length use 4 directions; one repeated uses 1, and has no centred variance."""
    spread, single = EffectiveRank(), EffectiveRank()
    spread.update(torch.eye(4)[None] * 3)
    single.update(torch.ones(1, 6, 4))
    found = spread.result()
    assert found == pytest.approx({"": 4, "participation": 4, "pcs_99": 3, "top_share": 0.25, "trace": 9})
    assert single.result() == pytest.approx({"": 1, "participation": 1, "pcs_99": 0, "top_share": 1, "trace": 4})


def test_effective_rank_by_hand_for_shares_one_and_three_quarters():
    accumulator = EffectiveRank()
    accumulator.update(torch.tensor([[[3.0**0.5, 0], [0, 1]]]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    found = accumulator.result()
    assert found[""] == pytest.approx(math.exp(entropy))
    assert found["participation"] == pytest.approx(1 / (0.75**2 + 0.25**2))


def test_spectra_are_free_of_scale_rotation_and_batches():
    x = seeded(3, 7, 2, 3).double()
    turn = torch.linalg.qr(seeded(6, 6).double())[0]
    turned = (x.flatten(2) @ turn * 5).view_as(x)
    for kind in (EffectiveRank, Spectrum):
        whole, other, parts, rest = kind(), kind(), kind(), kind()
        whole.update(x)
        other.update(turned)
        parts.update(x[:1])
        rest.update(x[1:])
        parts.merge(rest)
        for key, value in whole.result().items():
            if key != "trace":
                assert other.result()[key] == pytest.approx(value, abs=1e-9)
            assert parts.result()[key] == pytest.approx(value, abs=1e-9)
    shares = whole.result()[""]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
