"""Each metric: a number worked by hand, an extreme, the invariances it promises; and the register they stand in."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import UnknownName
from workbench.kernels.attention import attention_reference, attention_statistics
from workbench.metrics import METRICS, find, metric
from workbench.metrics.attention import (
    ConcentrationParts,
    effective_keys,
    importance_entropy,
    induction_score,
    received_ratio,
    row_entropy,
    sink_mass,
    sink_rate,
    token_importance,
    top_importance,
    uniform_entropy,
    uniform_importance,
    value_weighted_importance,
)
from workbench.metrics.base import harmonic
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
from workbench.metrics.values import TokenIdentityShare, value_drain, value_norm
from workbench.metrics.weights import cache_bytes, cache_traffic, gradient_norm, part_of


def seeded(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs)


def uniform_pattern(T):
    """Every query attends to all it may see alike."""
    return torch.ones(T, T, dtype=torch.double).tril() / torch.arange(1, T + 1)[:, None]


def received(pattern):
    return pattern.sum(-2)[None, None]


# ---- the register ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_says_what_it_is(name):
    entry = METRICS[name]
    assert all((entry.unit, entry.range, entry.reading, entry.source))
    assert entry.summary.endswith(".")
    assert entry.form == "derived" or entry.arguments
    text = inspect.getdoc(entry.function)
    assert entry.form != "accumulated" or "Caution" in text
    assert set(entry.units) <= set(entry.variants), "a unit belongs to a variant"


def test_names_are_found_or_the_nearest_is_named():
    assert find("sink_mass").function is sink_mass
    assert METRICS["token_identity_share"].form == "accumulated"
    with pytest.raises(UnknownName, match="token_similarity"):
        find("token_similarty")


def register(function, **changes):
    fields = {"unit": "u", "range": "r", "reading": "higher", "source": "s"}
    return metric(**(fields | changes))(function)


def test_a_name_registers_once():
    def sink_mass(sink: Float[Tensor, "batch head pos"]) -> Float[Tensor, "batch head"]:
        """Again."""

    with pytest.raises(ValueError, match="registered already"):
        register(sink_mass)


def test_unknown_arguments_sites_and_axes_are_refused():
    def reads_nonsense(vlaue: Float[Tensor, "batch pos"]) -> Float[Tensor, "batch"]:
        """Nothing."""

    def lacks_site(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "batch"]:
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


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "entropy"), [(20, 2.6233), (64, 3.7539), (128, 4.4386), (256, 5.1273), (2048, 7.2025)])
def test_entropy_of_uniform_causal_attention(T, entropy):
    assert uniform_entropy(T) == pytest.approx(entropy, abs=5e-5)
    assert float(uniform_importance(T)[0]) == pytest.approx(harmonic(T) / T, rel=1e-12)
    if T <= 256:
        flat = received(uniform_pattern(T))
        torch.testing.assert_close(token_importance(flat)[0], uniform_importance(T))
        assert float(importance_entropy(flat)) == pytest.approx(entropy, abs=5e-5)
        assert abs(float(importance_entropy(flat, deficit=True))) < 1e-12


def test_token_importance_by_hand():
    pattern = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    torch.testing.assert_close(token_importance(received(pattern))[0], torch.tensor([1.75, 0.75, 0.5]) / 3)


def test_importance_entropy_of_its_extremes_and_of_heads():
    first, itself = torch.zeros(4), torch.ones(4)
    first[0] = 4.0
    both = torch.stack([first, itself])[None]
    assert float(importance_entropy(first[None, None])) == 0.0
    assert float(importance_entropy(itself[None, None])) == pytest.approx(math.log(4))
    torch.testing.assert_close(
        importance_entropy(both, per_head=True)[0], torch.tensor([0.0, math.log(4)], dtype=torch.double)
    )
    mean = torch.tensor([2.5, 0.5, 0.5, 0.5]) / 4
    assert float(importance_entropy(both)) == pytest.approx(float(torch.special.entr(mean).sum()), rel=1e-6)
    shuffled = both[:, :, torch.tensor([2, 0, 3, 1])]
    torch.testing.assert_close(importance_entropy(shuffled), importance_entropy(both))


def test_row_entropy_by_hand():
    T = 64
    rows = torch.arange(1, T + 1).double().log()[None, None]
    assert float(row_entropy(rows)) == pytest.approx(3.2058, abs=5e-5)
    assert METRICS["row_entropy"].controls["uniform_causal"](T) == pytest.approx(float(row_entropy(rows)))
    assert float(row_entropy(rows, normalised=True)) == pytest.approx(1.0)
    assert float(row_entropy(torch.zeros(1, 1, 5), normalised=True)) == 0.0


def test_sinks_by_hand():
    uniform = (1 / torch.arange(1, 65).double())[None, None]
    assert float(uniform.mean()) == pytest.approx(0.0741, abs=5e-5)
    full = torch.ones_like(uniform)
    assert sink_rate(torch.cat([uniform, full, full, uniform], 1)).tolist() == [0.5]
    assert float(sink_mass(full)) == 1.0
    assert float(sink_mass(uniform)) == pytest.approx((harmonic(64) - 1) / 63)
    assert METRICS["sink_mass"].controls["uniform_causal"](64) == pytest.approx(float(sink_mass(uniform)))
    later = torch.cat([full, torch.zeros(1, 1, 200)], -1)
    assert float(sink_rate(later)) == 1.0, "only the first 64 positions count"
    assert METRICS["sink_rate"].min_length == 64


def test_a_head_without_numbers_is_not_a_head_without_a_sink():
    assert sink_rate(torch.full((1, 2, 64), math.nan)).isnan().all()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_stripes_equal_the_dense_pattern(kv_heads):
    T, period = 24, 12
    q, k, v = (seeded(2, T, h, 8, seed=s) for s, h in ((1, 4), (2, kv_heads), (3, kv_heads)))
    lse = attention_statistics(q, k, v)[1].lse
    pattern = attention_reference(q, k, v)[1]
    rows = torch.arange(period, T)
    tokens = torch.zeros(2, T, dtype=torch.long)
    for previous, offset in ((False, period - 1), (True, 1)):
        dense = pattern[..., rows, rows - offset].mean(-1)
        torch.testing.assert_close(induction_score(q, k, lse, tokens, previous=previous), dense)


def test_induction_of_a_perfect_copier_and_of_uniform_attention():
    T, width = 16, 32
    q, k = torch.zeros(1, T, 1, width), torch.zeros(1, T, 1, width)
    for t in range(T):
        k[0, t, 0, t] = 1.0
        if t >= 8:
            q[0, t, 0, t - 7] = 500.0
    lse = attention_statistics(q, k, k)[1].lse
    tokens = torch.zeros(1, T, dtype=torch.long)
    assert float(induction_score(q, k, lse, tokens)) == pytest.approx(1.0, abs=1e-4)
    assert float(induction_score(q, k, lse, tokens, previous=True)) == pytest.approx(0.0, abs=1e-6)
    flat = attention_statistics(q * 0, k, k)[1].lse
    expected = METRICS["induction_score"].controls["uniform_causal"](T)
    assert float(induction_score(q * 0, k, flat, tokens)) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(sum(1 / t for t in range(9, 17)) / 8)


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
@pytest.mark.parametrize("T", [3, 127, 600])
def test_closed_form_similarity_is_the_mean_over_pairs(T, kind):
    x = seeded(T, 64)
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


def test_identity_share_merges_to_a_single_pass():
    tokens = torch.randint(15, (7, 30), generator=torch.Generator().manual_seed(4))
    x = seeded(15, 4, seed=5)[tokens] + seeded(7, 30, 4)
    whole = share(x, tokens)
    for cuts in ([1, 6], [3, 3, 1], [7]):
        total = TokenIdentityShare()
        for ids, vectors in zip(tokens.split(cuts), x.split(cuts), strict=True):
            part = TokenIdentityShare()
            part.update(vectors, ids)
            total.merge(part)
        assert total.result() == pytest.approx(whole, abs=1e-12)


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


# ---- concentration in three parts ------------------------------------------------------------------------------------


def parts_of(*importances):
    """Parts for sequences with these importances (each sums to 1)."""
    accumulator = ConcentrationParts()
    for p in importances:
        accumulator.update((torch.tensor(p, dtype=torch.double) * len(p))[None, None])
    return accumulator.result()


def test_uniform_causal_attention_has_no_concentration():
    assert parts_of(uniform_importance(7).tolist()) == pytest.approx(
        {"": 0, "first_position": 0, "profile": 0, "content": 0}, abs=1e-12
    )


def test_concentration_parts_by_hand():
    """T = 2: u = (3/4, 1/4). Sequences (1/2, 1/2) and (1, 0): mean m = u, so only the content part is left."""
    found = parts_of([0.5, 0.5], [1.0, 0.0])
    content = (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25) + math.log(1 / 0.75)) / 2
    assert found == pytest.approx({"": content, "first_position": 0, "profile": 0, "content": content}, abs=1e-12)


def test_a_sink_is_all_first_position_and_local_attention_all_profile():
    u = uniform_importance(4)
    rest = u[1:] / u[1:].sum()
    sink = parts_of([0.9, *(0.1 * rest).tolist()])
    assert sink["first_position"] == pytest.approx(sink[""], abs=1e-12)
    assert sink["first_position"] == pytest.approx(
        0.9 * math.log(0.9 / float(u[0])) + 0.1 * math.log(0.1 / (1 - float(u[0]))), abs=1e-12
    )
    local = parts_of([float(u[0]), *((1 - u[0]) * torch.tensor([0.05, 0.05, 0.9], dtype=torch.double)).tolist()])
    assert local["profile"] == pytest.approx(local[""], abs=1e-12)
    assert local[""] > 0.05


def test_concentration_parts_add_up_and_do_not_depend_on_the_batches():
    sums = seeded(6, 3, 9, seed=4).double().exp()
    sums = sums / sums.sum(-1, keepdim=True) * 9
    whole, halves, other = ConcentrationParts(), ConcentrationParts(), ConcentrationParts()
    whole.update(sums)
    halves.update(sums[:2])
    other.update(sums[2:])
    halves.merge(other)
    found = whole.result()
    assert found[""] == pytest.approx(found["first_position"] + found["profile"] + found["content"], abs=1e-12)
    assert halves.result() == pytest.approx(found, abs=1e-12)
    p = (sums / 9).mean(1)
    assert found[""] == pytest.approx(float((p * (p / uniform_importance(9)).log()).sum(-1).mean()), abs=1e-12)


# ---- effective keys, ranks, what is received -------------------------------------------------------------------------


def test_effective_keys_count_evenly_attended_keys():
    """Uniform rows of 1, 2, 3, 4 keys: their mean is 2.5, all keys in sight; a peaked head has 1."""
    rows = torch.arange(1, 5, dtype=torch.double).log()[None, None]
    assert effective_keys(rows).item() == pytest.approx(2.5)
    assert effective_keys(rows, share=True).item() == pytest.approx(1)
    assert effective_keys(rows * 0).item() == 1
    assert METRICS["effective_keys"].controls["uniform_causal"](4) == 2.5


def test_top_importance_is_ranked_and_its_cumulative_form_adds_up():
    pattern = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.1, 0.1, 0.8]], dtype=torch.double)
    p = [1.6 / 3, 0.8 / 3, 0.6 / 3]
    assert top_importance(received(pattern))[0].tolist() == pytest.approx(p)
    assert top_importance(received(pattern), cumulative=True)[0].tolist() == pytest.approx([p[0], p[0] + p[1], 1])
    assert top_importance(torch.ones(2, 3, 50)).shape == (2, 10)


def test_received_ratio_is_one_for_uniform_attention_and_2_for_twice_as_much():
    uniform = received(uniform_pattern(5))
    assert received_ratio(uniform)[0].tolist() == pytest.approx([1] * 5)
    assert received_ratio(2 * uniform)[0].tolist() == pytest.approx([2] * 5)


def test_value_weighted_importance_ignores_positions_without_value():
    v = torch.tensor([[[[0.0, 0]], [[3.0, -1]], [[1.0, 1]]]])  # 1-norms 0, 4, 2
    sums = torch.tensor([[[2.0, 0.5, 0.5], [2.5, 0.25, 0.25]]])
    expected = [0, 0.75 * 4 / (0.75 * 6), 0.75 * 2 / (0.75 * 6)]
    assert value_weighted_importance(sums, v)[0].tolist() == pytest.approx(expected)


# ---- collapse, massive entries, spectra ------------------------------------------------------------------------------


def test_collapse_residual_by_hand_and_against_similarity():
    same, orthogonal = torch.ones(1, 4, 3), torch.eye(4)[None]
    assert collapse_residual(same).item() == 0
    assert collapse_residual(orthogonal).item() == pytest.approx(math.sqrt(3 / 4))
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


def test_a_version_changes_with_the_helpers_a_metric_uses(monkeypatch):
    from workbench.metrics import base, probing

    before = METRICS["token_probe"].version(), METRICS["sink_mass"].version()
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda thing: source(thing) + ("#" if thing is probing else ""))
    base._sources.cache_clear()
    after = METRICS["token_probe"].version(), METRICS["sink_mass"].version()
    base._sources.cache_clear()
    assert before[0] != after[0]
    assert before[1] == after[1]
