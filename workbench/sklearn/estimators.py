"""Estimators with scikit-learn's interface: exact PCA from streamed moments, and the linear probes of the measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.linear_model import LogisticRegression

from workbench.errors import BadData
from workbench.metrics.token_probes import ClassSums, Discriminant


class StreamedPCA(TransformerMixin, BaseEstimator):
    """Principal components from second moments in float64: `partial_fit` on batches equals `sklearn.decomposition.PCA` on all rows.

    Memory is one matrix [width, width] for any number of rows. Components have scikit-learn's signs.

    Args:
        n_components: Number of components; all by default.
    """

    def __init__(self, n_components: int | None = None) -> None:
        self.n_components = n_components

    def fit(self, X: Any, y: Any = None) -> StreamedPCA:
        """Fit to the rows of X [n, width] alone."""
        self.n_samples_seen_ = 0
        return self.partial_fit(X)

    def partial_fit(self, X: Any, y: Any = None) -> StreamedPCA:
        """Add the rows of X [n, width]."""
        x = np.asarray(X, dtype=np.float64)
        if not np.isfinite(x).all():
            raise BadData("a vector holds NaN or an infinite number")
        if not getattr(self, "n_samples_seen_", 0):  # moments around the first mean do not cancel
            self.n_samples_seen_, self._around = 0, x.mean(0)
            self._sum, self._second = np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[1]))
        x = x - self._around
        self.n_samples_seen_ += len(x)
        self._sum, self._second = self._sum + x.sum(0), self._second + x.T @ x
        self._solved: tuple[np.ndarray, np.ndarray] | None = None
        return self

    def _solve(self) -> tuple[np.ndarray, np.ndarray]:
        if self._solved is None:
            n = self.n_samples_seen_
            values, directions = np.linalg.eigh((self._second - np.outer(self._sum, self._sum) / n) / max(n - 1, 1))
            components = directions[:, ::-1].T
            components *= np.sign(np.take_along_axis(components, np.abs(components).argmax(1)[:, None], 1))
            self._solved = values[::-1].clip(0), components
        return self._solved

    @property
    def mean_(self) -> np.ndarray:
        """Mean of all rows [width]."""
        return np.asarray(self._around + self._sum / self.n_samples_seen_)

    @property
    def components_(self) -> np.ndarray:
        """Orthonormal directions [components, width], by falling variance."""
        return self._solve()[1][: self.n_components]

    @property
    def explained_variance_(self) -> np.ndarray:
        """Variance along each component, with n - 1 in the denominator."""
        return self._solve()[0][: self.n_components]

    @property
    def explained_variance_ratio_(self) -> np.ndarray:
        """Share of the total variance along each component; NaN where nothing varies."""
        values = self._solve()[0]
        return (
            self.explained_variance_ / values.sum() if values.sum() else np.full_like(self.explained_variance_, np.nan)
        )

    def transform(self, X: Any) -> np.ndarray:
        """Return coordinates [n, components]."""
        return np.asarray((np.asarray(X, dtype=np.float64) - self.mean_) @ self.components_.T)


class SoftmaxProbe(ClassifierMixin, BaseEstimator):
    """Softmax regression on vectors whitened within tokens: the probe of the measure `token_probe`, run to convergence.

    Minimises the mean cross-entropy plus ridge / 2 times the squared weights, biases excluded, with scikit-learn's
    `LogisticRegression`. It needs at least three tokens: two are fitted by scikit-learn with half the ridge.

    Args:
        ridge: Weight decay.
        tol: Tolerance of L-BFGS.
        max_iter: Largest number of iterations.
    """

    def __init__(self, ridge: float = 1e-3, tol: float = 1e-6, max_iter: int = 5000) -> None:
        self.ridge, self.tol, self.max_iter = ridge, tol, max_iter

    def fit(self, X: Any, y: Any) -> SoftmaxProbe:
        """Fit to vectors X [n, width] and token ids y [n]."""
        sums = StreamedProbe().fit(X, y).sums_
        if len(sums.ids) < 3:
            raise BadData(f"{len(sums.ids)} tokens: a softmax probe needs three or more")
        self.basis_ = Discriminant.of(sums)
        regression = LogisticRegression(C=1 / (self.ridge * len(y)), tol=self.tol, max_iter=self.max_iter)
        self.regression_ = regression.fit(self._coordinates(X), np.asarray(y))
        self.classes_ = self.regression_.classes_
        return self

    def _coordinates(self, X: Any) -> np.ndarray:
        return self.basis_.coordinates(_tensor(X)).numpy()[:, :-1].astype(np.float64)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return scores [n, tokens]."""
        return np.asarray(self.regression_.decision_function(self._coordinates(X)))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities [n, tokens] in the order of `classes_`."""
        return np.asarray(self.regression_.predict_proba(self._coordinates(X)))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable token ids [n]."""
        return np.asarray(self.classes_[self.decision_function(X).argmax(1)])


class StreamedProbe(ClassifierMixin, BaseEstimator):
    """Linear discriminant analysis from sums: the probe of the measure `token_probe_streamed`, for any number of rows.

    `partial_fit` on batches equals `fit` on all rows. No class list is needed: a token is known once it was seen.
    """

    def fit(self, X: Any, y: Any) -> StreamedProbe:
        """Fit to vectors X [n, width] and token ids y [n] alone."""
        self.sums_ = ClassSums()
        return self.partial_fit(X, y)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> StreamedProbe:
        """Add vectors X [n, width] and token ids y [n]."""
        self.sums_ = getattr(self, "sums_", ClassSums())
        self.sums_.add(_tensor(X), torch.as_tensor(np.asarray(y)))
        self.basis_: Discriminant | None = None
        return self

    @property
    def classes_(self) -> np.ndarray:
        """Token ids in the order of the scores."""
        return np.asarray(self.sums_.ascending()[0].numpy())

    def decision_function(self, X: Any) -> np.ndarray:
        """Return scores [n, tokens]: ln(count) minus half the squared distance to the token's centre."""
        self.basis_ = self.basis_ or Discriminant.of(self.sums_)
        return self.basis_.scores(_tensor(X)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the token ids [n] with the largest scores."""
        return np.asarray(self.classes_[self.decision_function(X).argmax(1)])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities [n, tokens] in the order of `classes_`."""
        return torch.from_numpy(self.decision_function(X)).softmax(-1).numpy()


def _tensor(X: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(X, dtype=np.float32))
