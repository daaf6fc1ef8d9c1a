"""Maps of tokens: vectors of a corpus sample in a plane, with the numbers that the picture must agree with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.linalg import orthogonal_procrustes
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.metrics.token_probes import ClassSums, Discriminant
from workbench.metrics.values import TokenIdentityShare
from workbench.sklearn.activation_matrices import as_ids, as_matrix
from workbench.sklearn.estimators import StreamedPCA

METHODS = {"pca": "principal components", "lda": "linear discriminants", "umap": "UMAP"}
NEIGHBOURS, MOST = 10, 1000
SHUFFLES = 3  # pairings at random, of the chance level of an alignment
ALL, PLANE = "all dimensions", "map"


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Vectors of tokens in a plane, a row for each point."""

    points: np.ndarray  # float64 [n, 2]
    tokens: np.ndarray  # int64 [n], ids
    documents: np.ndarray  # int64 [n]
    positions: np.ndarray  # int64 [n]
    method: str
    explained: float  # share of the variance of `vectors` within the plane; NaN for other methods than pca
    numbers: pd.DataFrame
    """measure, space (`all dimensions` or `map`), value, chance: `separation` of the vectors and of the points."""
    vectors: np.ndarray  # float64 [n, width], of the points
    project: Callable[[np.ndarray], np.ndarray]  # vectors [any, width] to points of this map
    disparity: float = math.nan
    """After `aligned`: share of the squared distances between the vectors that the alignment leaves: 0 for vectors that differ by a
    rotation, a scale and a shift."""
    chance: float = math.nan
    """The same for vectors that are paired at random: below 1 where there are few points for the width."""


def token_map(
    model: Any, site: str, tokens: Any, *, layer: int | None = None, method: str = "pca", neighbours: int = NEIGHBOURS,
    most: int = MOST, seed: int = 0, batch: int = 8,
) -> TokenMap:  # fmt: skip
    """Return vectors of a corpus sample in a plane, with how well they separate by token.

    PCA is fitted to all vectors. LDA is fitted to the even documents and maps the odd ones, because it separates anything on its
    own training data. UMAP (package `umap-learn`) is fitted to the drawn points.

    Args:
        model: A model of `load`, `build` or `observe`.
        site: As in `as_matrix`.
        tokens: Ids [documents, pos].
        layer: As in `as_matrix`.
        method: "pca", "lda" or "umap".
        neighbours: Neighbours of a point that count for the purity.
        most: Largest number of points. They are drawn at random, equally for every model and layer with the same tokens.
        seed: Seed of the draw and of UMAP.
        batch: Documents per forward pass.

    Returns:
        A `TokenMap` of points whose token is drawn at least twice. Costs one pass of the model and O(points^2 width).

    Raises:
        UnknownName: Another method.
        BadData: Fewer than two tokens occur twice, or too few documents for LDA.
        WorkbenchError: UMAP is not installed.
    """
    refuse_unknown("method", method, METHODS)
    ids = as_ids(model, tokens)
    X, y = as_matrix(model, site, ids, layer=layer, batch=batch)
    return map_of(X, y, ids.shape[1], method=method, neighbours=neighbours, most=most, seed=seed)


def map_of(
    X: np.ndarray,
    y: np.ndarray,
    T: int,
    *,
    method: str = "pca",
    neighbours: int = NEIGHBOURS,
    most: int = MOST,
    seed: int = 0,
) -> TokenMap:
    """Return `token_map` of vectors X [documents * T, width] and token ids y, as `as_matrix` gives them."""
    documents = np.arange(len(y)) // T
    shown = drawn_rows(y, most, seed, documents % 2 == 1 if method == "lda" else None)
    seen = np.asarray(X[shown], dtype=np.float64)
    project: Callable[[np.ndarray], np.ndarray]
    if method == "pca":
        project = StreamedPCA(2).fit(X).transform
    elif method == "lda":
        sums, fit = ClassSums(), documents % 2 == 0
        sums.add(torch.from_numpy(X[fit]), torch.from_numpy(y[fit]))
        if len(sums.ids) < 3:
            raise BadData("LDA needs three tokens or more in the even documents")
        discriminant = Discriminant.of(sums)

        def on_discriminants(x: np.ndarray) -> np.ndarray:
            coordinates = discriminant.coordinates(torch.from_numpy(np.asarray(x, dtype=X.dtype)))
            return coordinates[:, [-2, -3]].double().numpy()  # the last column is 1, before it the largest spreads

        project = on_discriminants
    else:
        try:
            import umap
        except ImportError:
            raise WorkbenchError("UMAP is not installed. Run pip install umap-learn, or choose PCA or LDA.") from None
        reducer = umap.UMAP(n_components=2, n_neighbors=min(15, len(shown) - 1), random_state=seed, n_jobs=1)
        project = reducer.fit(X[shown]).transform
    points = in_plane(project, seen)
    explained = float(points.var(0).sum()) / (float(seen.var(0).sum()) or math.nan) if method == "pca" else math.nan
    numbers = pd.concat(
        [separation(x, y[shown], neighbours, seed).assign(space=s) for s, x in {ALL: seen, PLANE: points}.items()],
        ignore_index=True,
    )[["measure", "space", "value", "chance"]]
    return TokenMap(points, y[shown], documents[shown], shown % T, method, explained, numbers, seen, project)


def in_plane(project: Callable[[np.ndarray], np.ndarray], vectors: np.ndarray) -> np.ndarray:
    """Return points [n, 2] of vectors, float64; vectors of width 1 get a second coordinate 0."""
    points = np.asarray(project(vectors), dtype=np.float64)
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def drawn_rows(y: np.ndarray, most: int, seed: int = 0, among: np.ndarray | None = None) -> np.ndarray:
    """Return at most `most` rows drawn at random, ascending, of tokens that are drawn at least twice.

    Raises `BadData` if fewer than two tokens are.
    """
    rows = np.arange(len(y)) if among is None else np.flatnonzero(among)
    rows = np.sort(np.random.default_rng(seed).permutation(rows)[:most])
    _, inverse, counts = np.unique(y[rows], return_inverse=True, return_counts=True)
    if (counts > 1).sum() < 2:
        raise BadData(
            f"{len(rows)} tokens of which fewer than two repeat: give more text, so that a token has neighbours of its kind"
        )
    return np.asarray(rows[counts[inverse] > 1])


def separation(X: np.ndarray, y: np.ndarray, neighbours: int = NEIGHBOURS, seed: int = 0) -> pd.DataFrame:
    """Return how well vectors separate by token.

    Args:
        X: Vectors [n, width].
        y: Token ids [n]; at least two occur twice.
        neighbours: Number of neighbours for the purity.
        seed: Seed of the shuffled ids, the silhouette's chance level.

    Returns:
        Rows `token identity share` (the measure `token_identity_share`, chance 0), `neighbourhood purity` with its chance level,
        and `silhouette` (mean over tokens' points, -1..1) with that of shuffled ids.
    """
    share = TokenIdentityShare()
    share.update(torch.from_numpy(np.ascontiguousarray(X))[None], torch.from_numpy(y)[None])
    purity, chance = neighbourhood_purity(X, y, neighbours)
    shuffled = np.random.default_rng(seed).permutation(y)
    can = 1 < len(np.unique(y)) < len(y)
    silhouette = [float(silhouette_score(X, labels)) if can else math.nan for labels in (y, shuffled)]
    rows = [
        ("token identity share", share.result(), 0.0),
        ("neighbourhood purity", purity, chance),
        ("silhouette", *silhouette),
    ]
    return pd.DataFrame(rows, columns=["measure", "value", "chance"])


def neighbourhood_purity(X: np.ndarray, y: np.ndarray, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Return the mean share of a vector's nearest neighbours that have its token, and its expectation by chance.

    Args:
        X: Vectors [n, width].
        y: Token ids [n]. A token with fewer other vectors than `neighbours` is compared with as many neighbours as it has others.
        neighbours: Number k of neighbours by Euclidean distance, the vector itself excluded.

    Returns:
        (purity, chance) in 0..1. Chance is the mean of (n_t - 1) / (n - 1), n_t the vectors of the token. Vectors whose token
        occurs once do not count; NaN if all are such. The purity of vectors that are all equal is NaN.
    """
    n = len(y)
    _, inverse, counts = np.unique(y, return_inverse=True, return_counts=True)
    others = counts[inverse] - 1
    k = min(neighbours, n - 1)
    near = NearestNeighbors(n_neighbors=k).fit(X).kneighbors(return_distance=False)
    same = (y[near] == y[:, None]) & (np.arange(k) < others[:, None])
    counted = others > 0
    if not counted.any():
        return math.nan, math.nan
    purity = same[counted].sum(1) / np.minimum(others, k)[counted]
    varies = bool(np.ptp(X, axis=0).any())  # the nearest of equal vectors would be the first ones
    return float(purity.mean()) if varies else math.nan, float((others[counted] / (n - 1)).mean())


def aligned(map_b: TokenMap, map_a: TokenMap, *, neighbours: int = NEIGHBOURS, seed: int = 0) -> TokenMap:
    """Return B's map in A's plane, after B's vectors are turned, reflected, scaled and moved onto A's in all dimensions.

    The alignment is orthogonal Procrustes of the vectors, the narrower ones padded with zeros. Then A's map projects both.

    Args:
        map_b: Map of B.
        map_a: Map of A, with the same points.
        neighbours: As in `token_map`, for the numbers of the new points.
        seed: Seed of the pairs at random.

    Returns:
        B's map with the points in A's plane, their numbers, and the `disparity` that the alignment leaves beside its `chance`.

    Raises:
        BadData: The maps have other points, so nothing pairs them, or all vectors of one are equal.
    """
    same = [np.array_equal(getattr(map_a, c), getattr(map_b, c)) for c in ("tokens", "documents", "positions")]
    if not all(same):
        raise BadData("A and B have other points; draw both maps of the same tokens")
    widths = [m.vectors.shape[1] for m in (map_a, map_b)]
    a, b = (
        np.pad(m.vectors - m.vectors.mean(0), ((0, 0), (0, max(widths) - width)))
        for m, width in zip((map_a, map_b), widths, strict=True)
    )
    sizes = float(np.square(a).sum()), float(np.square(b).sum())
    if not all(sizes):
        raise BadData("all points of a map are equal, so it cannot be aligned")
    turn, total = orthogonal_procrustes(b, a)
    moved = b @ turn * (total / sizes[1])  # around 0, with the dimensions that A lacks
    points = in_plane(map_a.project, moved[:, : widths[0]] + map_a.vectors.mean(0))
    draw = np.random.default_rng(seed)
    by_chance = [orthogonal_procrustes(draw.permutation(b), a)[1] for _ in range(SHUFFLES)]
    disparity, *others = (max(0.0, 1 - x**2 / (sizes[0] * sizes[1])) for x in (total, *by_chance))
    numbers = map_b.numbers.copy()
    plane = separation(points, map_b.tokens, neighbours, seed)
    numbers.loc[numbers["space"] == PLANE, ["value", "chance"]] = plane[["value", "chance"]].to_numpy()
    varied = map_a.method == "pca"
    explained = float(points.var(0).sum() / moved.var(0).sum()) if varied else math.nan
    return replace(
        map_b, points=points, numbers=numbers, explained=explained, disparity=disparity, chance=float(np.mean(others)),
    )  # fmt: skip


def by_layer_separation(
    matrices: dict[int, np.ndarray], y: np.ndarray, *, neighbours: int = NEIGHBOURS, most: int = MOST, seed: int = 0
) -> pd.DataFrame:
    """Return `separation` of each layer's vectors {layer: X}, on one draw of points, with a column `layer`."""
    shown = drawn_rows(y, most, seed)
    parts: Sequence[pd.DataFrame] = [
        separation(X[shown], y[shown], neighbours, seed).assign(layer=n) for n, X in matrices.items()
    ]
    return pd.concat(parts, ignore_index=True)
