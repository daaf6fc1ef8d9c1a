"""`equal` names the first site at which two models differ."""

from __future__ import annotations

import pytest
import torch
from observed import LAMBDAS, see
from strangers import GPT, large

import workbench
from workbench.errors import WorkbenchError


def test_the_first_difference_is_where_the_module_was_changed(ids):
    one, other = large(GPT(LAMBDAS)), large(GPT(LAMBDAS))
    seen = see(one, ids)
    assert workbench.equal(seen, other, ids, tolerance=0)
    with torch.no_grad():
        other.transformer["h"][1].mlp[2].bias[3] += 0.25
    found = workbench.equal(seen, see(other, ids), ids)
    assert not found
    assert (found.site, found.layer) == ("blocks.1.hook_mlp_out", 1)
    assert found.difference == pytest.approx(0.25, abs=1e-5)
    before = found.table.set_index("site").loc["blocks.1.attn.hook_z", "difference"]
    assert before == 0
    assert "blocks.1.hook_mlp_out" in str(found)
    changed = workbench.equal(one, large(GPT([(1, 1), (0.3141592, 0.7), (-0.125, 1.75)])), ids)
    assert changed.site == "blocks.2.attn.hook_v_mix"


@pytest.mark.slow
def test_own_models_observed_ones_and_mixtures_compare(tiny, ids):
    model = tiny("resformer")
    assert workbench.equal(model, tiny("resformer"), ids, tolerance=0)
    assert workbench.equal(model, see(model, ids), ids)
    other = workbench.equal(model, see(tiny("transformer"), ids), ids)
    assert other.site == "blocks.1.attn.hook_v"
    assert other.position is not None
    with pytest.raises(WorkbenchError, match="3 layers against 2"):
        workbench.equal(model, tiny("resformer", config={"n_layers": 2}), ids)
