"""Heads in groups of similar patterns: agglomerative clustering of features that the measures give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.cluster import AgglomerativeClustering

from workbench.errors import BadData
from workbench.measurement.measuring import measure
from workbench.sklearn.activation_matrices import as_ids

FEATURES = {
    "first token": ("sink_mass", None), "evenness": ("row_entropy", "normalised"), "previous token": ("induction_score", "previous"),
    "induction": ("induction_score", None),
}  # fmt: skip
"""Features of a head's pattern: metric and variant. The last two are measured on documents whose first half is repeated."""


@dataclass(frozen=True, eq=False)
class HeadGroups:
    """Heads in the order of their tree. `table`: layer, head, group (0 is the first), and the features."""

    table: pd.DataFrame
    scaled: np.ndarray  # [head, feature], features with mean 0 and standard deviation 1 over the heads


def head_features(model: Any, tokens: Any, *, batch: int = 8) -> pd.DataFrame:
    """Return features of every head's attention pattern on a corpus sample.

    Args:
        model: A model of `load`, `build` or `observe`.
        tokens: Ids [documents, pos], at least 4 positions.
        batch: Documents per forward pass.

    Returns:
        A row for each head: layer, head and the columns of `FEATURES`, each a share in 0..1. `evenness`: entropy of a row over
        its largest possible entropy.

    Raises:
        BadData: No head has all features.
    """
    ids = as_ids(model, tokens)
    half = ids[:, : ids.shape[1] // 2]
    repeated = torch.cat([half, half], 1)
    parts = []
    for sample, metrics in ((ids, ["sink_mass", "row_entropy"]), (repeated, ["induction_score"])):
        rows = measure(model, metrics, sample, batch=batch)
        rows = rows[rows["control"].isna() & rows["head"].notna()].astype({"variant": object})
        rows = rows.assign(variant=rows["variant"].where(rows["variant"].notna(), None))
        for name, (metric, variant) in FEATURES.items():
            own = rows[
                (rows["metric"] == metric) & (rows["variant"].isna() if variant is None else rows["variant"] == variant)
            ]
            if metric in metrics:
                parts.append(own.set_index(["layer", "head"])["value"].astype(float).rename(name))
    table = pd.concat(parts, axis=1)[list(FEATURES)].dropna().reset_index()
    if table.empty:
        raise BadData("no head of this model shows its attention, so no pattern has features")
    return table.astype({"layer": int, "head": int})


def group_heads(features: pd.DataFrame, groups: int = 4) -> HeadGroups:
    """Return heads in groups of similar features: Ward's agglomerative clustering of features scaled over the heads.

    Args:
        features: layer, head and further columns, the features.
        groups: Number of groups, at most the number of heads.

    Returns:
        The heads in the order of the tree, in which neighbours merge early. Groups are numbered in that order.

    Raises:
        BadData: Fewer than two heads.
    """
    columns = [c for c in features.columns if c not in ("layer", "head")]
    x = features[columns].to_numpy(dtype=float)
    if len(x) < 2:
        raise BadData("one head alone has no groups")
    spread = x.std(0)
    scaled = (x - x.mean(0)) / np.where(spread > 1e-12, spread, 1)
    tree = AgglomerativeClustering(n_clusters=min(groups, len(x)), compute_full_tree=True).fit(scaled)
    leaves: dict[int, list[int]] = {i: [i] for i in range(len(x))}
    for i, (left, right) in enumerate(tree.children_):
        leaves[len(x) + i] = leaves.pop(int(left)) + leaves.pop(int(right))
    (order,) = leaves.values()
    labels = tree.labels_[order]
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels.tolist()))}
    table = features.iloc[order].reset_index(drop=True)
    table.insert(2, "group", [numbers[label] for label in labels.tolist()])
    return HeadGroups(table, scaled[order])
