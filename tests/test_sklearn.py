"""Activations as scikit-learn reads them: matrices, exact streamed PCA, probes, maps with their numbers, and groups of heads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import dashboard
import numpy as np
import pytest
import torch
from foreign import IDS
from sklearn.cluster import AgglomerativeClustering
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import silhouette_score
from test_differences import FAMILIES, FIVE, family_model

import workbench
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.metrics.token_probes import ClassSums, Discriminant, fitted
from workbench.models import build
from workbench.sklearn import (
    SoftmaxProbe,
    StreamedPCA,
    StreamedProbe,
    aligned,
    as_matrices,
    as_matrix,
    group_heads,
    head_features,
    neighbourhood_purity,
    separation,
    token_map,
)
from workbench.sklearn.token_maps import map_of
from workbench.views import Link, Source, maps

TOKENS = torch.randint(12, (6, 32), generator=torch.Generator().manual_seed(1))


def model_of(name):
    return build(name, dashboard.MODEL, seed=0).eval()


@pytest.mark.parametrize("name", FIVE)
def test_a_matrix_holds_the_cached_activations_of_our_models(name):
    model = model_of(name)
    _, cache = model.run_with_cache(TOKENS)
    X, y = as_matrix(model, "v", TOKENS, layer=1)
    assert np.allclose(X, cache["blocks.1.attn.hook_v"].flatten(2).flatten(0, 1).numpy(), atol=1e-6)
    assert np.array_equal(y, TOKENS.flatten().numpy())
    assert np.array_equal(as_matrix(model, "blocks.1.attn.hook_v", TOKENS)[0], X)
    assert np.allclose(
        as_matrix(model, "stream", TOKENS, layer=2)[0], cache["blocks.1.hook_resid_post"].flatten(0, 1).numpy()
    )
    every, _ = as_matrices(model, "v", TOKENS, batch=5)
    assert list(every) == [0, 1]
    assert np.allclose(every[1], X, atol=1e-6)


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_holds_the_cached_activations_of_observed_models(family):
    model = workbench.observe(family_model(family), IDS, quiet=True)
    _, cache = model.run_with_cache(IDS)
    for site, hook in (
        ("v", "blocks.1.attn.hook_v"),
        ("q", "blocks.1.attn.hook_q"),
        ("attn_out", "blocks.1.hook_attn_out"),
    ):
        X, y = as_matrix(model, site, IDS, layer=1)
        assert np.allclose(X, cache[hook].flatten(2).flatten(0, 1).numpy(), atol=1e-6)
        assert len(y) == IDS.numel()
    mass = cache["blocks.1.attn.hook_pattern"][:, :, 1:, 0].mean((0, 2)).numpy()
    features = head_features(model, IDS).query("layer == 1")
    assert features["first token"].to_numpy() == pytest.approx(mass, abs=1e-6)


def test_other_sites_layers_and_hook_points_are_refused_by_name():
    model = model_of("transformer")
    with pytest.raises(UnknownName, match="pattern"):
        as_matrix(model, "pattern", TOKENS, layer=0)
    with pytest.raises(BadData, match=r"layer 2 has no v; choose from \[0, 1\]"):
        as_matrix(model, "v", TOKENS, layer=2)
    with pytest.raises(BadData, match="leave out layer=1"):
        as_matrix(model, "blocks.0.attn.hook_v", TOKENS, layer=1)
    with pytest.raises(BadData, match="not a vector for each"):
        as_matrix(model, "blocks.0.attn.hook_pattern", TOKENS)


def test_streamed_components_equal_those_of_all_rows_and_two_by_two_by_hand():
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12)) + 1e3).astype(np.float32)  # far from 0
    streamed, whole = StreamedPCA(5), PCA(5, svd_solver="full").fit(X.astype(np.float64))
    for part in np.array_split(X, 7):
        streamed.partial_fit(part)
    assert np.allclose(streamed.components_, whole.components_, atol=1e-8)
    assert np.allclose(streamed.explained_variance_, whole.explained_variance_, rtol=1e-9)
    assert np.allclose(streamed.explained_variance_ratio_, whole.explained_variance_ratio_, rtol=1e-9)
    assert np.allclose(streamed.transform(X), whole.transform(X.astype(np.float64)), atol=1e-6)
    assert np.allclose(StreamedPCA(5).fit(X).transform(X), streamed.transform(X), atol=1e-8)
    hand = StreamedPCA().fit([[0.0, 0.0], [2.0, 2.0]])
    assert hand.explained_variance_ == pytest.approx([4.0, 0.0])  # (2^2 + 2^2) / 2 along the diagonal, n - 1 = 1
    assert hand.components_[0] == pytest.approx([0.5**0.5, 0.5**0.5])
    with pytest.raises(BadData, match="NaN"):
        StreamedPCA().fit([[np.nan, 1.0]])


def test_purity_by_hand_with_its_chance_level():
    X, y = np.array([[0.0], [1.0], [10.0], [11.5]]), np.array([1, 1, 2, 2])
    assert neighbourhood_purity(X, y, 1) == pytest.approx((1.0, 1 / 3))
    assert neighbourhood_purity(X, y, 3) == pytest.approx(
        (1.0, 1 / 3)
    )  # each token has one other: one neighbour counts
    assert neighbourhood_purity(X, np.array([1, 2, 1, 2]), 1) == pytest.approx((0.0, 1 / 3))
    assert np.isnan(neighbourhood_purity(np.ones((4, 1)), y, 1)[0]), "equal vectors have no nearest ones"
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(600, 8)), rng.integers(6, size=600)
    purity, chance = neighbourhood_purity(X, y, 10)
    assert purity == pytest.approx(chance, abs=0.02)
    table = separation(X, y).set_index("measure")
    assert table.loc["silhouette", "value"] == pytest.approx(silhouette_score(X, y))
    assert table.loc["token identity share", "value"] == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("method", ["pca", "lda"])
def test_lookups_separate_fully_and_noise_by_chance(method):
    rng = np.random.default_rng(0)
    y = rng.integers(8, size=600)
    lookup = map_of(rng.normal(size=(8, 6))[y].astype(np.float32), y, 20, method=method).numbers
    assert lookup.loc[lookup["space"] == "all dimensions", "value"].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    noise = map_of(rng.normal(size=(600, 6)).astype(np.float32), y, 20, method=method).numbers
    purity = noise[noise["measure"] == "neighbourhood purity"]
    assert purity["value"].to_numpy() == pytest.approx(purity["chance"].to_numpy(), abs=0.05)  # held out, also of LDA


def test_discriminants_span_the_plane_of_scikit_learn_on_other_documents():
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=4000)
    X = (4 * rng.normal(size=(3, 5))[y] + rng.normal(size=(4000, 5))).astype(np.float32)
    drawn = map_of(X, y, 40, method="lda", most=400)
    assert set(drawn.documents % 2) == {1}
    even = np.arange(4000) // 40 % 2 == 0
    theirs = LinearDiscriminantAnalysis().fit(X[even], y[even]).transform(X[drawn.documents * 40 + drawn.positions])
    ours = drawn.points - drawn.points.mean(0)
    fit = ours - theirs @ np.linalg.lstsq(theirs, ours, rcond=None)[0]
    assert np.square(fit).sum() < 0.01 * np.square(ours).sum()


def test_alignment_undoes_a_turn_and_names_what_is_left():
    model = model_of("resformer")
    a = token_map(model, "own_v", TOKENS, layer=1)
    width = a.vectors.shape[1]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(width + 3, width + 3)))[0][
        :width
    ]  # three dimensions more
    b = aligned(replace(a, vectors=3 * a.vectors @ turn + 5, points=a.points[::-1]), a)
    assert np.allclose(b.points, a.points), "a turn in all dimensions is undone, and A's plane is B's"
    assert b.disparity == pytest.approx(0, abs=1e-12)
    few = map_of(np.random.default_rng(3).normal(size=(90, 4)) * [4, 3, 2, 1], np.arange(90) % 5, 9, most=30)
    assert aligned(few, few).explained == pytest.approx(few.explained), (
        "one model beside itself: both of the drawn points"
    )
    assert few.explained == pytest.approx(few.points.var(0).sum() / few.vectors.var(0).sum())
    assert np.allclose(b.numbers[["value", "chance"]], a.numbers[["value", "chance"]])
    c = aligned(replace(a, vectors=np.random.default_rng(1).normal(size=a.vectors.shape)), a)
    assert c.disparity == pytest.approx(c.chance, abs=0.05), "what is unrelated is as by chance"
    assert b.disparity < b.chance
    wide = np.hstack([a.vectors @ turn[:, :width], 3 * np.random.default_rng(2).normal(size=(len(a.vectors), 2))])
    d = aligned(replace(a, vectors=wide), a)
    # the squares of B's scaled vectors, the dimensions that A lacks among them, are (1 - disparity) times A's
    assert d.explained == pytest.approx(d.points.var(0).sum() / ((1 - d.disparity) * a.vectors.var(0).sum()))
    with pytest.raises(BadData, match="other points"):
        aligned(token_map(model, "own_v", TOKENS[:4], layer=1), a)
    with pytest.raises(BadData, match="fewer than two repeat"):
        token_map(model, "v", torch.arange(20)[None], layer=0)
    with pytest.raises(UnknownName, match="tsne"):
        token_map(model, "v", TOKENS, layer=0, method="tsne")


def test_umap_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(WorkbenchError, match="pip install umap-learn"):
        token_map(model_of("transformer"), "v", TOKENS, layer=0, method="umap")


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize("name", [*FIVE, *FAMILIES])
def test_a_map_of_a_model_is_scikit_learns_and_its_share_is_the_measures(name):
    model = model_of(name) if name in FIVE else workbench.observe(family_model(name), IDS, quiet=True)
    X, y = as_matrix(model, "v", TOKENS, layer=1)
    drawn = token_map(model, "v", TOKENS, layer=1)
    rows = drawn.documents * TOKENS.shape[1] + drawn.positions
    assert np.array_equal(drawn.tokens, y[rows])
    expected = PCA(2, svd_solver="full").fit_transform(X.astype(np.float64))[rows]
    sign = np.sign((drawn.points * expected).sum(0))
    assert drawn.points == pytest.approx(sign * expected, abs=1e-4 * np.abs(expected).max())
    numbers = drawn.numbers.query("space == 'all dimensions'").set_index("measure")["value"]
    assert numbers["silhouette"] == pytest.approx(silhouette_score(X[rows], y[rows]), abs=1e-5)
    measured = workbench.measure(model, "token_identity_share", TOKENS, sites={"token_identity_share": ("v",)})
    measured = measured[(measured["layer"] == 1) & measured["control"].isna() & measured["variant"].isna()]["value"]
    assert numbers["token identity share"] == pytest.approx(measured.item(), abs=1e-5)


def test_probes_are_those_of_the_measures():
    rng = np.random.default_rng(0)
    y = rng.integers(5, size=500)
    X = (rng.normal(size=(5, 6))[y] + rng.normal(size=(500, 6))).astype(np.float32)
    probe = SoftmaxProbe(tol=1e-9).fit(X, y)
    sums = ClassSums()
    sums.add(torch.from_numpy(X), torch.from_numpy(y))
    basis = Discriminant.of(sums)
    inside = basis.coordinates(torch.from_numpy(X))
    weight = fitted(inside, torch.from_numpy(y), ridge=1e-3, iterations=500, tolerance=1e-9)
    ours = (inside @ weight.T).softmax(-1).numpy()
    assert probe.predict_proba(X) == pytest.approx(ours, abs=2e-3)
    assert probe.score(X, y) == pytest.approx((ours.argmax(1) == y).mean(), abs=0.01)
    streamed = StreamedProbe()
    for part in np.array_split(np.arange(500), 4):
        streamed.partial_fit(X[part], y[part])
    assert streamed.decision_function(X) == pytest.approx(basis.scores(torch.from_numpy(X)).numpy(), abs=1e-4)
    assert np.array_equal(streamed.predict(X), StreamedProbe().fit(X, y).predict(X))
    with pytest.raises(BadData, match="three or more"):
        SoftmaxProbe().fit(X, y % 2)


def test_groups_are_those_of_scikit_learn_in_the_order_of_the_tree():
    import pandas as pd

    features = pd.DataFrame(
        {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "a": [0.0, 1.0, 0.1, 1.1], "b": [3.0, 3.0, 3.0, 3.0]}
    )
    grouped = group_heads(features, 2)
    heads = list(zip(grouped.table["layer"], grouped.table["head"], strict=True))
    assert {frozenset(heads[:2]), frozenset(heads[2:])} == {frozenset({(0, 0), (1, 0)}), frozenset({(0, 1), (1, 1)})}
    assert grouped.table["group"].tolist() == [0, 0, 1, 1]
    assert grouped.scaled[:, 1].tolist() == [0.0] * 4  # a constant feature weighs nothing
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3))
    features = pd.DataFrame(x, columns=list("abc")).assign(layer=range(20), head=0)
    ours = group_heads(features, 5).table
    theirs = AgglomerativeClustering(5).fit_predict((x - x.mean(0)) / x.std(0))
    pairs = set(zip(ours["group"], theirs[ours["layer"]], strict=True))
    assert len(pairs) == 5
    assert ours["group"].is_monotonic_increasing  # a group is one stretch of the order


def test_views_draw_both_models_with_their_numbers(tmp_path):
    for name in ("transformer", "resformer"):
        dashboard.run(tmp_path, f"race-{name}-s0", name, 0, "repeated", steps=(20,))
    source = Source(tmp_path, cache=dashboard.Memory())
    link = Link.parse("maps?a=race-transformer-s0&compare=1&b=race-resformer-s0&layer=1&site=own_v")
    drawn = maps.tokens(source, link)
    assert "B's vectors turned onto A's" in drawn.figure.layout.title.subtitle.text.replace("<br>", " ")
    assert drawn.sentence.startswith("A: Token identity share")
    assert set(drawn.table["model"]) == {s.title for s in source.subjects(link)}
    assert len(maps.separation_by_layer(source, link).table) == 2 * 2 * 3
    assert len(maps.groups(source, link.but(groups=2)).table) == 4
    one = maps.tokens(source, Link.parse("maps?a=race-transformer-s0&layer=0&colour=position&prompt=KKqq77KKqq"))
    assert "the prompt" in one.figure.layout.title.subtitle.text
    assert one.figure.layout.coloraxis.colorbar.title.text == "position"


@pytest.mark.slow
def test_scikit_learn_is_imported_where_it_is_used_alone():
    code = "import sys, workbench, workbench.cli, workbench.views.maps, workbench.views.heads; print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
