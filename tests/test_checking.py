"""The self-check holds for every kind of architecture, and notices a model that does not hold together."""

from __future__ import annotations

import odd_stacks
import torch

from workbench.models import build
from workbench.prompts.self_check import ROUNDING, check_model

SHAPE = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 64, "n_ctx": 64}
IDS = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))


def test_every_kind_of_architecture_holds_together(any_architecture):
    found = check_model(build(any_architecture, SHAPE, seed=0), IDS)
    assert found["holds"].tolist() == [True] * 5, found.to_string()  # None would not count for `all`


def test_a_look_into_the_future_is_noticed():
    model = build("transformer", SHAPE, seed=0)
    with model.hooks([("blocks.1.hook_resid_post", lambda x, hook: x + x.mean(1, keepdim=True))]):
        found = check_model(model, IDS).set_index("check")
    assert found.loc["causality", "error"] > ROUNDING
    assert not found.loc["causality", "holds"]


def test_a_stream_that_is_more_than_its_parts_does_not_hold():
    model = build("resformer", SHAPE, seed=0)
    with model.hooks([("blocks.1.hook_resid_post", lambda x, hook: x + 1)]):
        found = check_model(model, IDS).set_index("check")
    for name in ("parts of the stream", "value paths"):
        assert found.loc[name, "holds"] is not None
        assert not found.loc[name, "holds"], found.loc[name]
        assert "does not apply" not in found.loc[name, "meaning"]


def test_what_an_observed_model_has_no_parts_for_does_not_apply():
    import workbench

    torch.manual_seed(0)
    observed = workbench.observe(odd_stacks.Outside().eval(), IDS % 61, quiet=True)
    found = check_model(observed, IDS % 61).set_index("check")
    assert found.loc["parts of the stream", "holds"] is None
    assert found.loc["causality", "holds"]
    assert found.loc["repeatability", "holds"]
