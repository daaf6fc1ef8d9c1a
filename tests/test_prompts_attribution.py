"""A logit taken apart: every level sums to what the model computed."""

from __future__ import annotations

import pytest
from prompt_ids import some_ids

from workbench.errors import BadData
from workbench.models.decomposition import decompose
from workbench.prompts import logit_attribution


def test_parts_of_a_logit_are_those_of_decompose(awake):
    model, ids = awake("resformer"), some_ids()
    found = logit_attribution(model, ids, 9, 5, 11)
    parts = decompose(model, ids, to="logits", by="value_path", tokens=5, against=11)
    paths = found.frame[found.frame["level"] == "value_path"].set_index(["layer", "head", "path"])["value"]
    for label, key in {"L2H3.first": (2, 3, "first"), "L1H0.own": (1, 0, "own")}.items():
        assert paths[key] == pytest.approx(float(parts[label][0, 9]), abs=1e-5)
    mlp = found.frame.query("level == 'layer' and part == 'mlp' and layer == 1")["value"].item()
    assert mlp == pytest.approx(float(parts["1_mlp_out"][0, 9]), abs=1e-5)
    with pytest.raises(BadData, match="token id 61 leaves"):
        logit_attribution(model, ids, 9, 61)
    with pytest.raises(BadData, match="position 40"):
        logit_attribution(model, ids, 40, 5)
