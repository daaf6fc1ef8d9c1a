"""scikit-learn on activations: matrices of vectors, exact streamed PCA, maps of tokens, probes and groups of heads.

    from workbench.sklearn import as_matrix

    X, y = as_matrix(model, "v", tokens, layer=3)

scikit-learn takes a second to import, so nothing else of the package imports this one before it is used.
"""

from workbench.sklearn.activation_matrices import as_matrices, as_matrix, site_hooks
from workbench.sklearn.estimators import SoftmaxProbe, StreamedPCA, StreamedProbe
from workbench.sklearn.head_groups import FEATURES, HeadGroups, group_heads, head_features
from workbench.sklearn.token_maps import METHODS, TokenMap, aligned, neighbourhood_purity, separation, token_map

__all__ = [
    "FEATURES", "METHODS", "HeadGroups", "SoftmaxProbe", "StreamedPCA", "StreamedProbe", "TokenMap", "aligned", "as_matrices",
    "as_matrix", "group_heads", "head_features", "neighbourhood_purity", "separation", "site_hooks", "token_map",
]  # fmt: skip
