"""Hook names are the same on every layer; `attn.first` is an alias of `attn.source.0` wherever a name is given or looked up."""

from __future__ import annotations

import pytest
import torch
from hooked import tokens

from workbench.errors import UnknownName
from workbench.interventions.ablation import branches
from workbench.models import ARCHITECTURES
from workbench.models.decomposition import decompose
from workbench.names import either_name, hook_name, path_name

NAME, ALIAS = "blocks.2.attn.source.0.hook_v", "blocks.2.attn.first.hook_v"


def test_a_source_has_one_name_on_every_layer(tiny):
    for model in map(tiny, ARCHITECTURES):
        assert not [name for name in model.hook_dict if ".first." in name]
        for layer, names in branches(model).items():
            for name in names:
                assert path_name(name).partition(".")[0] in ("first", "source", "table", "cross"), (layer, name)


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


@pytest.mark.parametrize("names", [ALIAS, [ALIAS], lambda name: name == ALIAS, NAME, None])
def test_a_cache_is_filled_and_read_by_either_name(tiny, names):
    _, cache = tiny("resformer").run_with_cache(tokens(5), names_filter=names, incl_bwd=True, return_type="loss")
    assert cache[ALIAS] is cache[NAME] is cache["v", 2, "first"] is cache["v", 2, "source.0"]
    assert cache[f"{ALIAS}_grad"] is cache[f"{NAME}_grad"]
    assert ALIAS in cache.cache_dict
    assert ALIAS not in set(cache.keys())


@pytest.mark.parametrize("point", ["hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k"])
def test_rebuilt_patterns_are_read_by_either_name(tiny, point):
    _, cache = tiny("residual_attention").run_with_cache(tokens(5))
    name, alias = f"blocks.1.attn.source.0.{point}", f"blocks.1.attn.first.{point}"
    assert torch.equal(cache[alias], cache[name])
    assert alias in cache.cache_dict


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


def test_gradients_and_parts_are_read_by_either_name(tiny):
    model = tiny("resformer")
    _, values, grads = model.run_with_grads(tokens(5), [ALIAS])
    assert list(grads) == [NAME]
    assert grads[ALIAS] is grads[NAME]
    assert values[ALIAS] is values[NAME]
    parts = decompose(model, tokens(5), by="value_path")
    assert torch.equal(parts["L2H1.source.0"], parts["L2H1.first"])
