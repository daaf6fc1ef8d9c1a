"""What is asked for and is not there is told: layers that do not run, loops beyond the example's, a module's own methods, data by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from observed import see
from strangers import GPT, VOCABULARY, large
from torch import nn

import workbench
from workbench.errors import NotMeasured, WorkbenchError


class Chosen(nn.Module):
    """Runs the blocks that `runs` gives for a number of tokens."""

    def __init__(self, runs):
        super().__init__()
        self.gpt, self.runs = large(GPT()), runs

    def forward(self, ids):
        parts = self.gpt.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1]))
        for number in self.runs(ids.shape[1]):
            x = parts.h[number](x, {})
        return self.gpt.lm_head(x)


def tokens(rows, length, seed=0):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_hooks_of_layers_that_do_not_run_are_told_with_their_layers():
    model, long = see(Chosen(lambda T: [0, 1, 2] if T < 16 else [0, 2]).eval(), tokens(2, 12)), tokens(2, 20)
    told = pytest.warns(NotMeasured, match=r"layer 1 did not run on these tokens .*blocks\.1\.attn\.hook_v")
    with told as warned:
        _, cache = model.run_with_cache(long, ["blocks.1.attn.hook_v", "blocks.2.attn.hook_v"])
    assert list(cache) == ["blocks.2.attn.hook_v"]
    assert warned[0].filename == __file__  # the caller's line, not PyTorch's
    with told, model.hooks([("blocks.1.attn.hook_v", lambda v, hook: v * 0)]):
        model(long)
    with pytest.warns(NotMeasured, match="layer 1 did not run"):
        assert set(workbench.measure(model, "row_entropy", long)["layer"]) == {0, 2}


def test_layers_that_run_on_some_sequences_only_are_refused():
    class Half(Chosen):
        def forward(self, ids):
            self.runs = lambda T: [0, 1, 2] if int(ids[0, 0]) else [0, 2]
            return super().forward(ids)

    ids = tokens(2, 12)
    ids[:, 0] = torch.tensor([1, 0])
    model = see(Half(None).eval(), ids[:1])
    with pytest.raises(WorkbenchError, match="layer 1 ran on 1 of 2 sequences"), pytest.warns(NotMeasured):
        workbench.measure(model, "row_entropy", ids, batch=1)


def test_more_loops_than_on_the_example_are_refused():
    model = see(Chosen(lambda T: [0] * (3 if T < 16 else 5)).eval(), tokens(2, 12))
    with pytest.raises(WorkbenchError, match="runs more than the 3 times that it ran on the example"):
        model.run_with_cache(tokens(2, 20), ["blocks.2.hook_resid_post"])


def test_module_methods_of_an_observed_model_act_on_the_module():
    module = large(GPT())
    model = see(module, tokens(2, 12))
    assert not model.training
    assert model.train() is model
    assert module.training
    assert model.training
    assert not model.eval().training
    assert model.half() is model
    assert next(module.parameters()).dtype == torch.float16
    assert model.to(torch.float64).embed.weight.dtype == torch.float64
    assert model.state_dict().keys() == module.state_dict().keys()
    model.load_state_dict({name: torch.zeros_like(x) for name, x in module.state_dict().items()})
    assert all(not p.any() for p in module.parameters())
    with pytest.raises(WorkbenchError, match="cannot be pickled"):
        pickle.dumps(model)
    assert copy.deepcopy(model).foreign is not module
