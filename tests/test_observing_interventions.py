"""Interventions on foreign decoders run as if the module were rewritten; gradients are those of the module itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from observed import LAMBDAS, STRANGERS, see, stranger
from strangers import GPT, LAYERS, D, Inline, Looped, SharedValues, large

from workbench.errors import WorkbenchError
from workbench.interventions import replaced, token_means


@torch.no_grad()
def test_shared_values_are_changed_for_all_that_read_them_or_for_one_layer_and_it_is_said_which(ids):
    module = large(GPT(attention=SharedValues))
    observed = see(module, ids)
    assert "layers read another's values (1, 2 those of 0): a change of its own_v reaches them all" in repr(observed)
    first = module.transformer["h"][0].attn
    attend = first.attend

    def without(values_of):
        for block in module.transformer["h"]:
            layer = block.attn.layer
            block.attn.attend = lambda q, k, v, at=0, layer=layer: attend(q, k, v * (layer not in values_of))
        changed = module(ids)[0]
        for block in module.transformer["h"]:
            block.attn.attend = attend
        return changed

    for point, layers in (("own.hook_v", (0, 1, 2)), ("hook_v", (0,))):
        with observed.hooks([(f"blocks.0.attn.{point}", lambda v, hook: v * 0)]):
            found = observed(ids)
        torch.testing.assert_close(found, without(layers), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_token_means_replace_first_layer_values_exactly_without_positions(ids):
    """First-layer values are a function of the token where positions are only rotated in."""
    observed = see(large(Looped()), ids)
    means = token_means(observed, "own_v", [ids])
    plain = observed(ids, return_type="loss")
    with replaced(observed, ids, [0], "token_mean", means):
        assert observed(ids, return_type="loss").item() == pytest.approx(plain.item(), abs=1e-5)
    with replaced(observed, ids, [0, 1, 2], "zero", means):
        assert abs(observed(ids, return_type="loss").item() - plain.item()) > 1e-3


def test_what_is_only_computed_beside_the_module_cannot_be_replaced(ids):
    observed = stranger("hidden lambdas")[-1]
    for name in ("hook_received", "source.0.hook_v", "hook_v_mix"):
        with (
            observed.hooks([(f"blocks.1.attn.{name}", lambda x, hook: x * 0)]),
            pytest.raises(WorkbenchError, match="can be read, not replaced"),
        ):
            observed(ids)


@torch.no_grad()
def test_a_decoder_without_block_modules_is_read_by_the_numbers_of_its_parts(ids):
    module = large(Inline())
    observed = see(module, ids)
    assert observed.architecture == "resformer"
    seen = {}
    handles = [
        n.register_forward_pre_hook(lambda m, a, i=i: seen.update({i: a[0]})) for i, n in enumerate(module.norm_1)
    ]
    module(ids)
    for handle in handles:
        handle.remove()
    _, cache = observed.run_with_cache(ids)
    for i in range(LAYERS):
        assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], seen[i])
    with (
        observed.hooks([("blocks.1.hook_resid_pre", lambda x, hook: x * 0)]),
        pytest.raises(WorkbenchError, match="can be read, not replaced"),
    ):
        observed(ids)
    bare = see(large(Inline(norms=False)), ids)
    assert bare.options["lambda_v1"] == pytest.approx(0.2, abs=1e-6)
    with pytest.raises(WorkbenchError, match="no module in it reads the stream"):
        bare.run_with_cache(ids, names_filter="blocks.1.hook_resid_pre")


@pytest.mark.parametrize("name", ["hidden lambdas", "torch.softmax"])
def test_gradients_of_activations_equal_those_of_the_module_itself(name, ids):
    module = large(STRANGERS[name]())
    observed = see(module, ids)
    points = [
        "blocks.1.attn.own.hook_v",
        "blocks.1.attn.hook_v",
        "blocks.1.hook_resid_pre",
        "blocks.2.attn.hook_pattern",
    ]
    loss, _, grads = observed.run_with_grads(ids, points)
    kept = {}

    def keep(part, args, output):
        output.retain_grad()
        kept["out"] = output

    handle = module.transformer["h"][1].attn.c_attn.register_forward_hook(keep)
    stream = module.transformer["h"][1].register_forward_pre_hook(
        lambda m, a: a[0].retain_grad() or kept.update(stream=a[0])
    )
    logits = module(ids)[0]
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    plain.backward()
    handle.remove(), stream.remove()
    assert torch.equal(loss, plain.detach())
    own = kept["out"].grad[..., 2 * D :].unflatten(-1, (4, 8))
    torch.testing.assert_close(grads["blocks.1.attn.own.hook_v"], own, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(grads["blocks.1.attn.hook_v"] * LAMBDAS[1][1], own, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(grads["blocks.1.hook_resid_pre"], kept["stream"].grad, atol=1e-7, rtol=1e-4)
    assert grads["blocks.2.attn.hook_pattern"].abs().max() > 0
    with pytest.raises(WorkbenchError, match="carries no gradient"):
        observed.run_with_grads(ids, "blocks.1.attn.first.hook_v")
    _, _, every = observed.run_with_grads(ids, lambda name: ".attn." in name)
    assert "blocks.1.attn.hook_v" in every
    assert "blocks.1.attn.source.0.hook_v" not in every


ATTENDING = (
    "fused", "repeated heads", "grouped einsum", "ellipsis", "baddbmm",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENDING)
@torch.no_grad()
def test_each_activation_passes_its_hook_once_and_what_the_hook_returns_is_used_once(name, ids):
    """Every second head doubled (all keys' and values' heads differ, so that a group repeated wrongly is another)."""
    module, _, _, observed = stranger(name)
    _, cache = observed.run_with_cache(ids)
    fired = []

    def doubled(x, hook):
        fired.append(hook.name)
        x = x.clone()
        x[:, :, ::2] *= 2
        return x

    def seen(point):
        fired.clear()
        points = ["blocks.1.attn.hook_pattern", "blocks.1.attn.hook_z", "blocks.1.hook_attn_out"]
        with observed.hooks([(f"blocks.1.attn.hook_{point}", doubled)]):
            found = observed.run_with_cache(ids, names_filter=points)[1]
        assert fired == [f"blocks.1.attn.hook_{point}"]
        return [found[p].double() for p in points]

    own = {n: cache[f"blocks.1.attn.hook_{n}"].double() for n in ("rot_q", "rot_k", "v", "z")}
    twice = {n: x * torch.tensor([2.0, 1.0] * 4)[: x.shape[2], None] for n, x in own.items()}
    w_o = next(
        p
        for n, p in module.named_parameters()
        if n in ("transformer.h.1.attn.c_proj.weight", "transformer.h.1.attn.wo.weight")
    )
    bias = cache["blocks.1.hook_attn_out"].double() - own["z"].flatten(2) @ w_o.double().T
    for point in ("rot_q", "rot_k", "v", "z"):
        parts = own | {point: twice[point]}
        q, k, v = (parts[n] for n in ("rot_q", "rot_k", "v"))
        k, v = (x.repeat_interleave(4 // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        pattern = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        z = twice["z"] if point == "z" else torch.einsum("bhij,bjhd->bihd", pattern, v)
        found = seen(point)
        torch.testing.assert_close(found[0], pattern, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1], z, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[2], z.flatten(2) @ w_o.double().T + bias, atol=1e-4, rtol=1e-4)
