"""A logit taken apart: every level sums to what the model computed."""

from __future__ import annotations

import pytest
import torch
from prompt_ids import some_ids

from workbench.errors import BadData
from workbench.models.decomposition import decompose
from workbench.prompts import logit_attribution, score_attribution


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_differences_that_cancel_are_no_change_by_a_hook(awake, dtype):
    """Half precision rounds logits of alike tokens, and scores of nearly orthogonal vectors, by sizes that cancel in the result."""
    model, ids = awake("transformer", dtype=dtype), some_ids()
    with torch.no_grad():
        model.unembed.weight[3] = model.unembed.weight[9] = 8 * model.unembed.weight[9]
        model.unembed.weight[3, 0] += 1e-3
    exact = awake("transformer", dtype=dtype)
    exact.load_state_dict(model.state_dict())
    exact = exact.double()
    for at in (0, 5, 9):
        parts = decompose(model, ids, to="logits", tokens=3, against=9, pos=at)
        assert float(parts.parts.sum()) == pytest.approx(
            logit_attribution(model, ids, at, 3, 9).totals["layer"], abs=1e-4
        )
        for head in range(model.config.n_heads):
            score, right = (score_attribution(m, ids, 0, head, at, at) for m in (model, exact))
            assert score.matrix.loc["embed", "embed"] == pytest.approx(right.score, abs=0.1)
