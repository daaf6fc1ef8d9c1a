"""Gradients of activations equal finite differences, and those of a source's values are each reader's own."""

from __future__ import annotations

import math

import pytest
import torch
from hooked import WIDE, grouped, listening, tokens

from workbench.data.data_sources import Sample
from workbench.errors import UnknownName, WorkbenchError
from workbench.hook_names import QUADRATIC, is_statistic
from workbench.interventions import INTERVENTIONS
from workbench.interventions.gradients import _gathered


def differences(model, ids, directions, *, step=1e-6):
    """Slope of the loss when what leaves each of the hook points moves along its direction, all at once."""
    losses = []
    for sign in (1, -1):
        moves = [(name, lambda x, hook, d=d, s=sign: x + s * step * d) for name, d in directions.items()]
        with torch.no_grad(), model.hooks(moves):
            losses.append(model(ids, return_type="loss"))
    return ((losses[0] - losses[1]) / (2 * step)).item()


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_activations_equal_finite_differences(tiny, some_architecture, alone):
    """Slopes add up: all points of one kind in one layer move together, or each alone."""
    model = tiny(some_architecture, dtype=WIDE, config=grouped(some_architecture))
    ids = tokens(6)
    loss, values, grads = model.run_with_grads(ids, None)
    assert loss.item() == pytest.approx(model(ids, return_type="loss").item(), abs=1e-12)
    assert set(grads) == {name for name in model.hook_dict if not is_statistic(name)}
    generator, directions = torch.Generator().manual_seed(1), {}
    for name, grad in grads.items():
        if name.endswith("hook_attn_scores"):
            continue  # the masked entries are infinite; its pattern is checked
        assert grad.shape == values[name].shape
        part = name if alone else (*name.split(".")[:2], name.endswith(QUADRATIC))
        direction = torch.randn(grad.shape, generator=generator, dtype=WIDE)
        directions.setdefault(part, {})[name] = direction
    for part, moved in directions.items():
        slope = differences(model, ids, moved)
        found = sum((grads[name] * direction).sum() for name, direction in moved.items()).item()
        assert found == pytest.approx(slope, abs=1e-7, rel=1e-5), part


@pytest.mark.parametrize("architecture", ["transformer", "resformer", "gated_attention"])
def test_what_an_attention_reads_has_the_sum_of_its_paths_gradients(tiny, architecture):
    model, at = tiny(architecture, dtype=WIDE), "blocks.1.attn."
    read = [f"{at}hook_in", *(f"{at}{x}_proj.hook_in" for x in "qkv"), "blocks.1.ln1.hook_in"]
    stream = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid"]
    _, values, grads = model.run_with_grads(tokens(7), [*read, *stream])
    gate = grads[read[0]] - sum(grads[name] for name in read[1:4])
    assert (gate.abs().max() > 1e-4) == (architecture == "gated_attention"), "what a gate reads is no projection's"
    torch.testing.assert_close(values[read[0]], model.blocks[1].ln1(values[stream[0]]))
    branch = grads[stream[0]] - grads[stream[1]]
    torch.testing.assert_close(grads[read[4]], branch, atol=1e-15, rtol=1e-10)
    with pytest.raises(UnknownName, match=r"blocks\.7\.attn\.hook_in"):
        model.run_with_grads(tokens(5), "blocks.7.attn.hook_in")
    with pytest.raises(WorkbenchError, match="the model does not call this module"):
        model.run_with_grads(tokens(5), "blocks.hook_in")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gradients_gather_by_hand():
    """Positions (3, 4), (0, 1), (1, 0), (0, 4): 5 over the mean of 1, 1 and 4."""
    whole = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0], [0.0, 4.0]])
    assert _gathered(whole, whole) == 2.5
    assert _gathered(torch.tensor([[0.0, 2.0], [9.0, 9.0]]), whole) == 1.0


def test_even_attention_over_three_positions_gathers_by_hand(tiny):
    """1 + 1/4 + 1/9 at the first position, 1/4 + 1/9 and 1/9 behind it; two documents have no error."""
    found = list(INTERVENTIONS["gradient_sink"].function(tiny(), Sample(tokens(3, batch=2), range(2), "x"), None, 2))
    power = [(1 + 1 / 4 + 1 / 9) ** 0.5, (1 / 4 + 1 / 9) ** 0.5, (1 / 9) ** 0.5]
    even = {row["value"] for row in found if row.get("control") == "uniform_causal"}
    assert list(even) == [pytest.approx(power[0] / ((power[1] + power[2]) / 2))]
    assert all(math.isnan(row["se"]) for row in found if "variant" in row)


def test_the_error_of_a_gradient_sink_is_that_of_leaving_documents_out(tiny):
    model, ids = tiny(dtype=WIDE), tokens(9, batch=4)
    rows = lambda ids, batch=2: {  # noqa: E731
        (r["layer"], r["variant"]): r
        for r in INTERVENTIONS["gradient_sink"].function(model, Sample(ids, range(len(ids)), "x"), None, batch)
        if "variant" in r
    }
    whole, left = rows(ids), [rows(ids[[i for i in range(4) if i != out]], 3) for out in range(4)]
    for at, row in whole.items():
        each = torch.tensor([one[at]["value"] for one in left], dtype=WIDE)
        jackknife = float((3 / 4 * (each - each.mean()).square().sum()).sqrt())
        assert row["se"] == pytest.approx(jackknife, rel=1e-6, abs=1e-12)
        assert row["n"] == 4


def test_a_gradient_passes_a_silent_sublayer_unchanged_and_a_norm_in_inverse_proportion(tiny):
    """Without an output matrix nothing comes back through an attention; a norm that reads twice as much lets half through."""
    model = tiny(dtype=WIDE)
    with torch.no_grad():
        model.blocks[1].attn.o_proj.weight.zero_()
    flow = lambda: {  # noqa: E731
        (r["part"], r["layer"], r["variant"]): r["value"]
        for r in INTERVENTIONS["gradient_flow"].function(model, Sample(tokens(9), range(2), "x"), None, 2)
    }
    once = flow()
    assert once["attention", 1, None] == once["attention", 1, "first_position"] == 1
    model.blocks[2].ln1.register_forward_pre_hook(lambda norm, read: (2 * read[0],))
    twice = flow()
    for kind in ("compress", "compress_first_position"):
        assert twice["attention", 2, kind] == pytest.approx(once["attention", 2, kind] / 2, rel=1e-3)  # but for epsilon


def test_transformer_lens_backward_caching_works(some_architecture, tiny):
    model = tiny(some_architecture, dtype=WIDE)
    ids = tokens(6)
    _loss, cache = model.run_with_cache(ids, incl_bwd=True, return_type="loss")
    _, _, grads = model.run_with_grads(ids, None)
    for name in ("blocks.0.attn.hook_v", "blocks.1.attn.hook_z", "blocks.2.hook_resid_mid", "blocks.1.mlp.hook_post"):
        torch.testing.assert_close(cache[f"{name}_grad"], grads[name], atol=1e-12, rtol=1e-9)
    assert model.embed.weight.grad is not None
    assert listening(model) == []
