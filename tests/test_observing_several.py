"""Several attentions in a block: each has hook points of its own, all stand beside each other, and what W_O reads of them is found."""

from __future__ import annotations

import pytest
import torch
from observed import see
from odd_attentions import Differential, Groups, TwoAttentions, softmax
from strangers import GPT, HEADS, LAYERS, D, ListOfHeads, large, split

import workbench
from workbench.errors import WorkbenchError
from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of
from workbench.models.decomposition import decompose

FORMS = ["calls", "one softmax", "two softmaxes", "halves of values"]


def run(observed, ids):
    """Names of layer 1's attention -> tensors of one run, whose logits are the plain run's."""
    logits, cache = observed.run_with_cache(ids, lambda name: name.startswith("blocks.1.attn."))
    assert torch.equal(logits, observed.foreign(ids)[0])
    return {name.removeprefix("blocks.1.attn.").replace("hook_", ""): x for name, x in cache.items()}


def projected(module, ids, *names):
    """What these parts of block 1's attention make in a plain run."""
    kept = {}
    attn = module.transformer.h[1].attn
    handles = [attn.get_submodule(n).register_forward_hook(lambda m, a, out, n=n: kept.update({n: out})) for n in names]
    module(ids)
    [handle.remove() for handle in handles]
    return [kept[n] for n in names]


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_both_attentions_of_a_difference_and_the_difference_itself(form, ids):
    module = large(GPT(attention=lambda i: Differential(i, form))).double()
    observed = see(module, ids)
    found = run(observed, ids)
    q, k, v = (
        split(x, n) for x, n in zip(projected(module, ids, "wq", "wk", "wv"), (HEADS, HEADS, HEADS // 2), strict=True)
    )
    patterns = [softmax(q[:, i::2], k[:, i::2]) for i in range(2)]
    halves = list(v.chunk(2, -1)) if form == "halves of values" else [v]
    parts = [(pattern, half) for pattern in patterns for half in halves]
    for n, (pattern, half) in enumerate(parts):
        torch.testing.assert_close(found[f"{n}.pattern"], pattern)
        torch.testing.assert_close(found[f"{n}.v"], half.transpose(1, 2))
        true = statistics_of(pattern.log(), pattern)  # but for the log-sum-exp, which the scores' size is in
        for name in set(STATISTICS) - {"lse"}:
            torch.testing.assert_close(found[f"{n}.{name}"], getattr(true, name))
    for name in ("pattern", *STATISTICS):
        torch.testing.assert_close(found[name], torch.cat([found[f"{n}.{name}"] for n in range(len(parts))], 1))
    (read,) = projected(module, ids, "norm")
    torch.testing.assert_close(found["z"], 0.8 * read.transpose(1, 2))
    paths = observed.value_paths().query("into == 'output'").set_index(["layer", "source"])["coefficient"]
    for layer in range(LAYERS):
        assert sorted(paths[layer]) == pytest.approx([-0.3 - 0.1 * layer, 1.0], abs=1e-6)
    assert observed.architecture == "unknown"
    assert "combines (differential attention)" in repr(observed)
    assert workbench.measure(observed, "row_entropy", ids)["head"].max() == len(parts) * HEADS // 2 - 1
    assert decompose(observed, ids, "logits", "head").error < 1e-9


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("make", [Groups, ListOfHeads])
@torch.no_grad()
def test_heads_in_groups_or_modules_of_their_own_are_heads_of_one_attention(make, ids):
    module = large(GPT(attention=make)).double()
    observed = see(module, ids)
    found = run(observed, ids)
    assert (observed.architecture, observed.config.n_heads, found["v"].shape[2]) == ("transformer", HEADS, HEADS)
    z = torch.einsum("bhij,bjhd->bihd", found["pattern"], found["v"])
    torch.testing.assert_close(found["z"], z)
    assert torch.equal(found["v"], found["own.v"])
    torch.testing.assert_close(found["row_max"], found["pattern"].amax(-1))
    assert decompose(observed, ids, "logits", "head").error < 1e-9
    first = workbench.measure(observed, ["sink_mass", "value_norm"], ids)
    assert set(first["layer"].dropna()) == {0, 1, 2}
    if make is Groups:
        assert not found["0.pattern"][:, :, 10, :7].any(), "the first two heads see a window"
        assert found["1.pattern"].shape[1] == 2


@torch.no_grad()
def test_attentions_that_tokens_weigh_are_a_sum_with_a_mean_and_a_spread(ids):
    module = large(GPT(attention=lambda i: Groups(i, gated=True))).double()
    observed = see(module, ids)
    (gate,) = projected(module, ids, "gate")
    share = gate.sigmoid().unflatten(-1, (2, HEADS))[:, 4:]  # at the first positions both see the same
    paths = observed.value_paths().query("into == 'output' and layer == 1")
    for row in paths.to_dict("records"):
        true = share[:, :, int(row["source"][-1]), row["head"]]
        assert row["coefficient"] == pytest.approx(float(true.mean()), abs=0.1)
        assert row["spread"] > 0
    assert paths["residual"].max() < 1e-10
    assert "weighs by token (gates) attn.0 and attn.1" in repr(observed)


@torch.no_grad()
def test_two_attentions_with_a_matrix_each_are_one_block_with_a_stream(ids):
    module = large(GPT(block=TwoAttentions))
    observed = see(module, ids)
    found = run(observed, ids)
    assert (len(observed.structure.layers), observed.config.n_heads) == (LAYERS, 2 * HEADS)
    torch.testing.assert_close(found["z"], torch.cat((found["0.z"], found["1.z"]), 2))
    assert "block 0 has 2 attentions, each with its own W_O" in repr(observed)
    assert workbench.measure(observed, "hidden_norm", ids)["layer"].nunique() == LAYERS + 1


@pytest.mark.fast(1)
@pytest.mark.parametrize("form", ["two softmaxes", "halves of values"])
@torch.no_grad()
def test_each_attention_can_be_changed_and_all_together_only_read(form, ids):
    module = large(GPT(attention=lambda i: Differential(i, form))).double()
    observed, plain = see(module, ids), module(ids)[0]
    with observed.hooks([("blocks.1.attn.1.hook_pattern", lambda x, hook: 0 * x)]):
        changed = observed(ids)
    module.transformer.h[1].attn.share = 0.0
    if form == "halves of values":  # of four the second is the other half of the first
        assert not torch.equal(changed, plain)
    else:
        torch.testing.assert_close(changed, module(ids)[0])
    with (
        observed.hooks([("blocks.1.attn.hook_v", lambda x, hook: 2 * x)]),
        pytest.raises(WorkbenchError, match=r"blocks\.1\.attn\.hook_v can be read, not replaced"),
    ):
        observed(ids)


@torch.no_grad()
def test_attentions_of_other_widths_are_refused(ids):
    class Uneven(Groups):
        def forward(self, x, memory):
            q, k, v = (split(y, 2) for y in self.c_attn(x).split(D, dim=2))
            wide = torch.nn.functional.scaled_dot_product_attention(q[:, :1], k[:, :1], v[:, :1], is_causal=True)
            narrow = [y[:, 1:].unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for y in (q, k, v)]
            y = torch.nn.functional.scaled_dot_product_attention(*narrow, is_causal=True)
            return self.c_proj(torch.cat((wide.transpose(1, 2).flatten(2), y.transpose(1, 2).flatten(2)), -1))

    with pytest.raises(WorkbenchError, match="have heads of 8 and 16 numbers: only heads of one width can be joined"):
        see(large(GPT(attention=Uneven)), ids)
