"""Sinks at any position: patterns with known sinks, the rule's false positives, measures of found positions, padding."""

from __future__ import annotations

import math

import pytest
import test_padding
import torch

from workbench.data.data_sources import Sample
from workbench.errors import PaddingLeftOut
from workbench.interventions import INTERVENTIONS
from workbench.measurement.forward_pass import reductions_of
from workbench.measurement.measuring import _find, measure
from workbench.metrics import METRICS
from workbench.metrics.attention_patterns import sink_mass, sink_rate
from workbench.metrics.found_sinks import ColumnExcess, FoundSinks, column_excess, sink_positions
from workbench.metrics.values import value_drain
from workbench.plots import positions_of
from workbench.runs.records import facts


def resting(T, on, share):
    """A pattern whose rows give `share` to each visible position of `on`, and the rest evenly to all visible ones."""
    pattern = torch.zeros(T, T, dtype=torch.double)
    for i in range(T):
        at = [j for j in on if j <= i]
        pattern[i, : i + 1] = (1 - share * len(at)) / (i + 1)
        pattern[i, at] += share
    return pattern


def statistics(*patterns):
    """received, row_max and sink of one document with these heads."""
    pattern = torch.stack(patterns)[None]
    return pattern.sum(-2), pattern.amax(-1), pattern[..., 0]


def found(*patterns):
    return [at.nonzero().flatten().tolist() for at in sink_positions(*statistics(*patterns)[:2])[0]]


def test_sinks_are_found_where_heads_rest():
    T = 48
    local = torch.eye(T, dtype=torch.double).roll(1, 0).tril()
    local[0, 0] = 1
    patterns = [resting(T, [0, 1], 0.3), resting(T, [5], 0.5), resting(T, [0, 20], 0.35), resting(T, [], 0), local]
    assert found(*patterns) == [[0, 1], [5], [0, 20], [], []]
    itself = torch.eye(16, dtype=torch.double)
    assert found(itself) == [[]]
    assert ColumnExcess().result() == []
    assert found(resting(T, [44], 0.9)) == [[]], "fewer than a quarter of the queries see it"
    assert found(resting(T, [2], 0.05)) == [[]], "less than 0.1 above uniform attention"
    assert len(found(resting(60, [0, 1, 2, 3, 4], 0.19))[0]) == 4, "four at most"


def windowed(T, window, on, share):
    """As `resting`, where queries see the `window` latest keys."""
    pattern = torch.zeros(T, T, dtype=torch.double)
    for i in range(T):
        seen = range(max(0, i - window + 1), i + 1)
        at = [j for j in on if j in seen]
        pattern[i, seen] = (1 - share * len(at)) / len(seen)
        pattern[i, at] += share
    return pattern


def test_sinks_of_layers_with_a_sliding_window_are_of_the_queries_that_see_them():
    T, pattern = 48, windowed(48, 16, [20], 0.9)
    received, row_max, sink = statistics(pattern, windowed(48, 16, [], 0))
    excess, queries, tested = column_excess(received, 16)
    assert queries.tolist() == [min(T - j, 16) for j in range(T)]
    assert tested.tolist() == [min(T - j, 16) >= 12 for j in range(T)]
    assert float(excess[0, 0, 20]) == pytest.approx(16 * 0.9 + 16 * 0.1 / 16 - 1)
    torch.testing.assert_close(excess[0, 1], torch.zeros(T, dtype=torch.double), atol=1e-12, rtol=0)
    assert sink_positions(received, row_max, 16)[0].nonzero().tolist() == [[0, 20]]
    mass = sink_mass(sink, received, row_max, 16, positions="found")
    assert mass[0].tolist() == pytest.approx([float(pattern[:, 20].sum()) / (T - 1), 0])
    narrow = statistics(windowed(T, 8, [20], 1))[:2]
    assert not sink_positions(*narrow, 8).any(), "8 queries of 48 see it, fewer than a quarter"
    assert not sink_positions(*narrow, 0).any()
    assert torch.equal(sink_positions(received, row_max, T), sink_positions(received, row_max))


@pytest.mark.parametrize("T", [1, 2, 8])
def test_short_documents_show_none(T):
    assert found(resting(T, [0], 0.9), resting(T, [], 0)) == [[], []]


@pytest.mark.parametrize("window", [None, 20])
def test_rows_in_random_order_have_less_false_sinks_than_the_rule_allows(window):
    generator, T = torch.Generator().manual_seed(0), 64
    visible = torch.arange(1, T + 1).clamp(max=window or T)
    for keys in (1, 3):  # each row rests on so many random keys
        pattern = torch.zeros(500, T, T, dtype=torch.double)
        for _ in range(keys):
            at = torch.arange(T) - (torch.rand(500, T, generator=generator) * visible).long()
            pattern.scatter_add_(-1, at[..., None], torch.full((500, T, 1), 1 / keys, dtype=torch.double))
        rate = sink_positions(pattern.sum(-2)[None], pattern.amax(-1)[None], window).any(-1).double().mean()
        assert rate <= 0.01


def test_measures_of_found_positions_by_hand():
    T = 48
    received, row_max, sink = statistics(resting(T, [0], 0.6), resting(T, [0, 1], 0.3), resting(T, [7], 0.5))
    mass = sink_mass(sink, received, row_max, positions="found")[0]
    assert mass[0] == pytest.approx(float(sink_mass(sink)[0, 0]))
    assert float(sink_mass(sink)[0, 1]) < 0.4 < float(mass[1]), "the first position holds less than both"
    seven = 41 * 0.5 + sum(0.5 / (i + 1) for i in range(7, T))
    assert float(mass[2]) == pytest.approx(seven / (T - 1))
    assert sink_rate(sink, received, row_max, positions="found").tolist() == [1.0]
    norms = torch.full((1, T, 1, 2), 2.0)
    norms[0, [0, 1]], norms[0, 7] = 0.2, 1.1
    drain = value_drain(norms, received, row_max, positions="found")
    assert float(drain) == pytest.approx((0.1 + 0.1 + 0.55) / 3)
    none = [x[:, :1] for x in statistics(resting(T, [], 0))[:2]]
    assert math.isnan(value_drain(norms, *none, positions="found"))


def test_found_sinks_say_which_tokens_and_positions():
    T, sinks = 48, FoundSinks()
    tokens = torch.arange(100, 100 + T)[None].repeat(2, 1)
    tokens[:, 20] = 100  # the first token again
    sinks.update(*statistics(resting(T, [0, 1], 0.3), resting(T, [20], 0.6))[:2], tokens[:1])
    other = FoundSinks()
    other.update(*statistics(resting(T, [0, 1], 0.3), resting(T, [], 0))[:2], tokens[1:])
    sinks.merge(other)
    result = sinks.result()
    assert set(result) == {
        "",
        *("position 0", "position 1", "position 20"),
        "first token 100",
        "first token 101",
        "token 100",
    }
    assert result[""][0] == pytest.approx(result["position 0"][0] + result["position 1"][0])
    assert result["position 20"][0] == 0
    assert result["token 100"][1] == pytest.approx(result[""][1]) == pytest.approx(result["position 20"][1])
    assert FoundSinks().result() == {}


@pytest.fixture
def spread(tiny):
    """A model whose heads rest on the tokens 1 and 2, wherever they are, with a share of 0.28 for each of two."""
    model = tiny("transformer", config={"n_layers": 2, "d_model": 32, "n_heads": 2, "n_ctx": 64}, std=0.02)
    with torch.no_grad():
        model.embed.weight[:, :2] = torch.tensor([3.0, 0.0])
        model.embed.weight[1:3, 1] = 3.0
        for block in model.blocks:
            for name, column, size in (("q_proj", 0, 0.5), ("k_proj", 1, 1.0)):
                weight = getattr(block.attn, name).weight.zero_()
                for head in (0, 1):  # in the channel that rotates least
                    weight[16 * head + 7, column] = size
    return model


def test_a_sink_spread_over_two_positions_is_found_and_said_beside_the_first(spread):
    ids = torch.randint(3, 61, (6, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, 1] = 1, 2
    frame = measure(spread, ["sink_mass", "found_sinks"], ids)
    first = frame[(frame["metric"] == "sink_mass") & frame["control"].isna()]["value"]
    rows = frame[frame["metric"] == "found_sinks"]
    names = rows[rows["value"] > 0.05].groupby("variant", dropna=False)["value"].max()
    assert first.max() < 0.3 < names[names.index.isna()].iloc[0]
    assert {"position 0", "position 1", "first token 1", "first token 2"} <= set(names.index.dropna())
    ids[:, [0, 1, 20]] = ids[:, [20, 21, 0]]  # a sink that is not first
    frame = measure(spread, "sink_mass", ids)
    doubts = [facts(text)["doubt"] for text in frame["provenance"].unique()]
    assert positions_of(frame) == ", first position only", "titles of figures"
    assert positions_of(measure(spread, "sink_mass", ids, positions="found")) == ""
    assert len(doubts) == 1
    assert "position 20" in doubts[0] or "position 1 " in doubts[0]


def test_experiments_at_found_positions(spread):
    ids = torch.randint(3, 61, (6, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 5] = 1
    sample = Sample(ids, range(6), "x")
    frame = measure(spread, ["sink_output", "first_token_norm", "gradient_sink"], ids, positions="found")
    assert frame["variant"].str.endswith("found").all()
    assert frame["value"].notna().all()
    output = frame[(frame["metric"] == "sink_output") & (frame["variant"] == "mass_found")]["value"]
    pattern = spread.run_with_cache(ids)[1]["blocks.0.attn.hook_pattern"]
    assert output.iloc[0] == pytest.approx(float(pattern[:, 0, 1:, 5].mean()), abs=1e-5)
    norm = frame[(frame["metric"] == "first_token_norm") & (frame["site"] == "stream") & (frame["layer"] == 0)]
    stream = spread.run_with_cache(ids)[1]["blocks.0.hook_resid_pre"].double().norm(dim=-1)
    others = (stream.sum(1) - stream[:, 5]) / 63
    assert norm[norm["control"].isna()]["value"].iloc[0] == pytest.approx(float((stream[:, 5] / others).mean()))
    uniform = INTERVENTIONS["gradient_sink"].function(spread, sample, None, 8)
    assert {row["layer"] for row in uniform} == {0, 1}


@pytest.mark.slow
def test_padding_changes_nothing():
    """Documents of one row are judged alone, with positions of their own."""
    ids = [torch.randint(2, 23, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 30)]
    ids[0][3] = ids[1][5] = 1
    module = test_padding.decoder()
    with torch.no_grad():
        module.embed.weight[:, :2] = torch.tensor([5.0, 0.0])
        module.embed.weight[1, 1] = 10
        for block in module.blocks:
            block.q.weight[:], block.k.weight[:] = 0, 0
            block.q.weight[:, 0], block.k.weight[:, 1] = 1, 0.5
    model = test_padding.observed(module, ids[0][None])
    alone = [measure(model, ["found_sinks", "sink_mass"], row[None]) for row in ids]
    rows = test_padding.padded(ids, "left", 44)
    masked = test_padding.observed(module, rows, call=test_padding.with_mask)
    with pytest.warns(PaddingLeftOut):
        together = measure(masked, "found_sinks", rows)
    one, other, both = (
        f[(f["metric"] == "found_sinks") & f["variant"].isna()]["value"].to_numpy() for f in (*alone, together)
    )
    assert max(one.max(), other.max()) > 0.1, "there is something to find"
    assert both == pytest.approx((one + other) / 2, abs=1e-5)


def test_the_excess_of_columns_is_a_mean_over_documents_of_any_length():
    one, other = ColumnExcess(), ColumnExcess()
    for T, into in ((48, one), (32, other)):
        into.update(statistics(resting(T, [3], 0.5))[0])
    one.merge(other)
    excess = torch.tensor(one.result())
    assert excess.shape == (1, 37)
    assert excess.argmax() == 3
    assert float(excess[0, 3]) == pytest.approx(0.5, abs=0.1)


def test_the_default_is_what_it_was():
    for name in ("sink_mass", "sink_rate", "value_drain"):
        assert METRICS[name].optional == ()
        assert _find(name) is METRICS[name]
        assert reductions_of(_find(name, "found"), torch.zeros(1, 16))[-1].variant == "found"
