"""Ablations: exact where theory says so, at the layers that have the site, and over the same positions in all three ways."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from workbench.data.data_sources import RepeatedData, Sample
from workbench.interventions import replaced, token_means, value_ablation
from workbench.interventions.ablation import deep_value_ablation


@pytest.fixture(autouse=True)
def small_table(monkeypatch):
    """Means of few training tokens: every id of forty is still among them."""
    monkeypatch.setattr("workbench.interventions.ablation.TABLE_TOKENS", 1024)


def some_tokens(n=6, T=24, high=40, seed=0):
    return torch.randint(high, (n, T), generator=torch.Generator().manual_seed(seed))


def ablate(model, ids=None, sites=("own_v",)):
    sample = Sample(some_tokens() if ids is None else ids, range(6), "ids")
    return pd.DataFrame(value_ablation(model, sample, RepeatedData(40), 4, sites=sites))


def test_token_means_by_hand(tiny):
    model, ids = tiny(), torch.tensor([[3, 5, 3, 3]])
    means = token_means(model, "own_v", [ids])
    values = model.run_with_cache(ids)[1]["blocks.1.attn.own.hook_v"][0].double()
    assert means.counts[[3, 5, 0]].tolist() == [3, 1, 0]
    assert {len(sums) for sums in means.sums.values()} == {2}, "rows of ids that occur, not of the vocabulary"
    found = means.replacement(1, torch.tensor([[3, 5]]), "token_mean")[0]
    torch.testing.assert_close(found, torch.stack([values[[0, 2, 3]].mean(0), values[1]]), rtol=0, atol=1e-5)
    torch.testing.assert_close(means.replacement(1, ids, "mean"), values.mean(0), rtol=0, atol=1e-5)
    assert not means.replacement(1, ids, "zero").any()
    assert means.seen(torch.tensor([[3, 4, 5]])).tolist() == [[True, False, True]]


@pytest.mark.fast(2)
@pytest.mark.parametrize("architecture", ["transformer", "neutreno", "denseformer", "svformer"])
def test_rows_stand_where_the_site_is(tiny, architecture):
    frame = ablate(tiny(architecture))
    layers = frame["layer"].dropna().unique().tolist()
    assert layers == ([0] if architecture == "svformer" else [0, 1, 2])
    joint = frame[frame["layer"].isna()]
    assert joint["variant"].tolist() == ([] if architecture == "svformer" else ["token_mean", "mean", "zero", "kept"])
    assert (frame["n"] == 6).all()
    kept, se = (
        frame.dropna(subset="layer").pivot(index="layer", columns="variant", values=name) for name in ("value", "se")
    )
    expected = (1 - kept["token_mean"] / kept["zero"]).where(kept["zero"] > 2 * se["zero"]).dropna()
    assert kept["kept"].dropna().to_dict() == pytest.approx(expected.to_dict())
    assert (kept["zero"].abs() < 1).all(), "changes of the loss, not losses"


@pytest.mark.parametrize(("zero", "kept"), [((0.4, 0.5, 0.6), 0.8), ((-0.4, 0.5, 0.6), math.nan)])
def test_a_share_of_an_effect_within_its_noise_is_unknown(tiny, monkeypatch, zero, kept):
    losses = iter([torch.zeros(3), torch.full((3,), 0.1), torch.tensor(zero)])  # plain, token means and zero
    monkeypatch.setattr("workbench.interventions.ablation.losses", lambda *_: next(losses).double())
    sample = Sample(some_tokens(3), range(3), "ids")
    frame = pd.DataFrame(deep_value_ablation(tiny(), sample, RepeatedData(40), 4)).set_index("variant")
    assert frame.loc["kept", "value"] == pytest.approx(kept, nan_ok=True)


def test_replacement_is_what_it_says_and_leaves_no_hooks(tiny):
    model, ids = tiny(), torch.tensor([[3, 5, 3, 9]])
    means = token_means(model, "own_v", [torch.tensor([[3, 5]])])
    seen = {}
    with (
        replaced(model, ids, [1], "zero", means),
        model.hooks([("blocks.1.attn.hook_v", lambda x, hook: seen.update(v=x))]),
    ):
        model(ids)
    assert not seen["v"][0, :3].any()
    assert seen["v"][0, 3].any(), "token 9 is not in the table"
    assert not any(point._forward_hooks for point in model.hook_dict.values())
