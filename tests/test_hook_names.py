"""Hook names are the same on every layer; `attn.first` is an alias of `attn.source.0` wherever a name is given or looked up."""

from __future__ import annotations

import pytest
import torch
from hooked import tokens

from workbench.errors import UnknownName
from workbench.hook_names import either_name, hook_name

NAME, ALIAS = "blocks.2.attn.source.0.hook_v", "blocks.2.attn.first.hook_v"


def test_an_alias_is_the_same_hook_point(tiny):
    model = tiny("resformer_dense")
    assert hook_name(ALIAS) == hook_name(NAME) == NAME
    assert model.hook_dict[ALIAS] is model.hook_dict[NAME] is model.mod_dict[ALIAS]
    assert ALIAS in model.hook_dict
    assert model.hook_dict.get(ALIAS) is model.hook_dict[NAME]
    assert "blocks.0.attn.first.hook_v" not in model.hook_dict
    assert model.hook_dict.get("blocks.0.attn.first.hook_v") is None
    assert either_name(lambda name: "first" in name)(NAME)
    with pytest.raises(UnknownName):
        tiny().run_with_cache(tokens(4), names_filter=ALIAS)


@pytest.mark.parametrize("name", [ALIAS, NAME])
def test_hooks_act_under_either_name_and_see_the_one_they_were_given(tiny, name):
    model, seen = tiny("resformer"), []

    def double(v, hook):
        seen.append(hook.name)
        return 2 * v

    edited = model.run_with_hooks(tokens(5), fwd_hooks=[(name, double)])
    with model.hooks([(NAME, lambda v, hook: 2 * v)]):
        assert torch.equal(model(tokens(5)), edited)
    with model.hooks([(lambda n: n == name, lambda v, hook: 2 * v)]):
        assert torch.equal(model(tokens(5)), edited)
    model.add_hook(name, lambda v, hook: 2 * v)
    assert torch.equal(model(tokens(5)), edited)
    model.reset_hooks()
    assert seen == [name]
