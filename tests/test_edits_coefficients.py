"""Coefficients as edits: what each architecture has, what setting them does, and that nothing of it stays."""

from __future__ import annotations

import re

import equations
import pytest
import torch
from editing import hooks_standing, some_tokens

from workbench.errors import WorkbenchError
from workbench.interventions import coefficients, edited

WITHOUT_COEFFICIENTS = {
    "transformer", "attention_residuals", "svformer", "gqa", "mqa", "cla", "share_q", "share_k", "share_v", "cross_layer",
    "cross_layer_all", "gated_attention", "exclusive_attention", "value_scale", "value_gate", "value_gate_query", "skip_v1",
    "sink_logit", "held_start", "cut_skip", "sandwich_norm", "post_norm", "dyt", "hyper_connections", "mhc",
}  # fmt: skip
BY_TOKEN = {"satformer", "gated_value_embedding"}  # no one number stands for their coefficients


@torch.no_grad()
def test_a_coefficient_set_to_what_it_is_changes_nothing(awake, some_architecture):
    model, ids = awake(some_architecture), some_tokens()
    present, plain = coefficients(model), model(ids)
    parts = set(some_architecture.split("+"))
    if equations.written(some_architecture):  # of a newcomer this list knows nothing
        assert (not present) == (parts <= WITHOUT_COEFFICIENTS | BY_TOKEN)
    for edit in present:
        with edited(model, edit):
            torch.testing.assert_close(model(ids), plain, rtol=0, atol=2e-5)
        with edited(model, f"coefficient:layer={edit.layer[0]},source={edit.source},path={edit.path},value=3.5"):
            assert (model(ids) - plain).abs().max() > 1e-3, edit
    if parts & BY_TOKEN:
        with edited(model, "coefficient:value=0"):
            assert (model(ids) - plain).abs().max() > 1e-3
    elif not present:
        with pytest.raises(WorkbenchError, match=re.escape(f"{some_architecture} has no coefficient")):
            edited(model, "coefficient:value=0").__enter__()
    assert torch.equal(model(ids), plain)


def test_present_coefficients_are_those_of_the_papers(tiny):
    told = {name: [str(c) for c in coefficients(tiny(name)) if c.layer == (2,)] for name in ("resformer", "neutreno")}
    half = "coefficient:layer=2,source={},path=v,value=0.5"
    assert told["resformer"] == [half.format("first"), half.format("own")]
    assert told["neutreno"] == ["coefficient:layer=2,source=first,path=output,value=0.4"]
    dense = [c.source for c in coefficients(tiny("resformer_dense")) if c.layer == (2,)]
    assert dense == ["first", "source.1", "own"]


@pytest.mark.fast(7)
@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "edits"),
    [
        ("resformer", "coefficient:value=0;coefficient:source=own,value=1"),
        ("resformer_learnable", "coefficient:value=0;coefficient:source=own,value=1"),
        ("resformer_dense", "coefficient:value=0;coefficient:source=own,value=1"),
        ("value_embedding", "coefficient:layer=0/2,source=table,value=0;coefficient:source=own,value=1"),
        ("same_key", "coefficient:value=0;coefficient:source=own,value=1"),
        ("neutreno", "coefficient:value=0"),
        ("identity_map", "coefficient:value=0"),
        ("satformer", "coefficient:value=0"),
        ("residual_q", "coefficient:path=q,value=0;coefficient:path=q,source=own,value=1"),
        ("residual_k", "coefficient:path=k,value=0;coefficient:path=k,source=own,value=1"),
        ("residual_attention", "coefficient:path=pattern,value=0;coefficient:path=pattern,source=own,value=1"),
        ("residual_hidden", "coefficient:path=stream,source=embed,value=0"),
        ("denseformer", "coefficient:path=stream,value=0;coefficient:path=stream,source=own,value=1"),
    ],
)
def test_without_its_coefficients_a_model_is_the_vanilla_decoder(tiny, architecture, edits):
    """Equal-named weights are equal over architectures of one seed."""
    model, ids = tiny(architecture), some_tokens()
    with edited(model, edits):
        torch.testing.assert_close(model(ids), tiny()(ids), rtol=0, atol=2e-5)


@torch.no_grad()
def test_what_arrives_is_exchanged_for_the_effective_values_of_another_layer(tiny):
    model, ids = tiny("resformer"), some_tokens()
    alone = model(ids)
    for layer, same in ((0, True), (1, False)):  # what arrives at layer 2 are the values of layer 0
        with edited(model, f"values:layer=2,site=arriving,how=layer,from_layer={layer}", tokens=ids):
            assert torch.allclose(model(ids), alone, rtol=0, atol=1e-6) == same


def test_a_coefficient_holds_at_its_layer_and_after_errors(tiny):
    """NeuTRENO has one number for all layers: it is set at the hook point of each, and never stays."""
    model, ids = tiny("neutreno"), some_tokens()
    names = [f"blocks.{n}.attn.hook_output_mix" for n in (1, 2)]
    with edited(model, "coefficient:layer=1,value=2;coefficient:layer=1,value=3"):
        _, cache = model.run_with_cache(ids, names_filter=names)
    assert [cache[name].tolist() for name in names] == [[3.0], [pytest.approx(0.4)]]

    def fail(z, hook):
        raise RuntimeError("stop")

    with (
        pytest.raises(RuntimeError, match="stop"),
        edited(model, "coefficient:value=2"),
        model.hooks([("blocks.1.attn.hook_z", fail)]),
    ):
        model(ids)
    assert [c.value for c in coefficients(model)] == [0.4, 0.4]
    assert not hooks_standing(model)
