"""FlexAttention whose BlockMask leaves out blocks: compiled code applies its lists, eager code ignores them; read as the module runs."""

from __future__ import annotations

import pytest
import torch
from observed import see
from strangers import GPT, large

from workbench.errors import WorkbenchError
from workbench.observing.interception.sdpa_and_flex_attention import APPLIED, COMPLETE, IGNORED, flex_call

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
LENGTH, BLOCK = 40, 16  # the last block is not full
PLACE = torch.arange(LENGTH)
WITHIN, EARLIER = PLACE[:, None] // BLOCK == PLACE // BLOCK, PLACE[:, None] // BLOCK - PLACE // BLOCK
DOCUMENTS = PLACE // 10


def same_document(b, h, i, j):
    return (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])


def causal(b, h, i, j):
    return i >= j


def listed(blocks, mask_mod=causal, heads=1, length=LENGTH, block=BLOCK):
    """Each block of queries sees its own (a partial one) and so many whole ones before it; of later heads one more each."""
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-length // block)
    q, k = torch.arange(n)[:, None], torch.arange(n)
    more = torch.arange(heads)[:, None, None]
    partial, full = (q == k).expand(heads, n, n), (k < q) & (k >= q - blocks - more)
    lists = []
    for table in (partial, full):
        lists += [
            table.sum(-1, dtype=torch.int32)[None],
            table.int().argsort(dim=-1, descending=True, stable=True).int()[None],
        ]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(length, length))


def called(block_mask):
    q, k, v = torch.zeros(3, 1, 4, LENGTH, 8)
    return flex_call(lambda *args: args, (q, k, v, None, block_mask.as_tuple(), 1.0), {})


@pytest.mark.parametrize("mask_mod", [causal, same_document])
@pytest.mark.parametrize("heads", [1, 4])
def test_listed_blocks_are_seen_whole_or_by_their_mask_and_no_others(mask_mod, heads):
    form = called(listed(1, mask_mod, heads)).of_listed_blocks().flex
    more = torch.arange(heads)[:, None, None]
    wanted = (WITHIN & mask_mod(0, 0, PLACE[:, None], PLACE)) | ((EARLIER > 0) & (1 + more >= EARLIER))
    assert torch.equal(form.mask(LENGTH, LENGTH, torch.device("cpu"))[0], wanted)


def test_lists_that_leave_out_more_than_on_the_example_are_refused_and_double_ones_too():
    assert called(listed(5)).as_in_own_runs(COMPLETE).flex.mask_mod is causal
    short = called(listed(0))
    assert short.as_in_own_runs(IGNORED) is short
    with pytest.raises(
        WorkbenchError, match="left none out on the example tokens, so observe the module on sequences as long"
    ):
        short.as_in_own_runs(COMPLETE)
    twice = listed(1)
    twice.full_kv_num_blocks[:], twice.full_kv_indices[:] = 2, 0
    with pytest.raises(WorkbenchError, match="lists a block of keys twice"):
        called(twice).of_listed_blocks()


@pytest.mark.slow  # it goes through the compiler, which other tests should not share a process with
@torch.no_grad()
@pytest.mark.parametrize("mask_mod", [causal, same_document])
def test_an_eager_module_ignores_block_lists_and_so_does_a_listened_run(mask_mod, ids):
    from torch.nn.attention.flex_attention import flex_attention

    module = large(GPT(attend=lambda q, k, v, layer=0: flex_attention(q, k, v, block_mask=listed(1, mask_mod))))
    own, observed = module(ids)[0], see(module, ids)
    names = [f"blocks.1.attn.hook_{x}" for x in ("q", "k", "pattern", "row_entropy")]
    for asked in (names, ["blocks.2.hook_resid_post"]):
        logits, cache = observed.run_with_cache(ids, asked)
        torch.testing.assert_close(logits, own, atol=1e-4, rtol=1e-4)
        if asked is names:
            q, k, pattern, entropy = (cache[name].double() for name in names)
    seen = mask_mod(0, 0, PLACE[:, None], PLACE)
    wanted = (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(pattern, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(entropy, torch.special.entr(wanted).sum(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler
@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_module_applies_block_lists_and_so_does_a_listened_run(whole, monkeypatch):
    """Compiled is the attention alone, or the whole module, which makes its mask anew in each forward pass."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("strangers.CONTEXT", 256)
    attend, mask = torch.compile(flex_attention), listed(0, length=256, block=128)  # compiled code takes blocks of 128
    module = large(GPT(attend=lambda q, k, v, layer=0: attend(q, k, v, block_mask=mask)))
    if whole:
        made = lambda q, k, v, layer=0: flex_attention(q, k, v, block_mask=listed(0, length=q.shape[2], block=128))  # noqa: E731
        module = torch.compile(large(GPT(attend=made)))
    ids = torch.randint(61, (2, 256), generator=torch.Generator().manual_seed(0))
    own, observed, at = module(ids)[0], see(module, ids), "blocks.1.attn.hook_"
    assert observed.structure.block_lists == APPLIED
    logits, cache = observed.run_with_cache(ids, [f"{at}{x}" for x in ("q", "k", "pattern")])
    torch.testing.assert_close(logits, own, atol=1e-5, rtol=1e-5)
    place = torch.arange(256)
    seen = (place[:, None] >= place) & (place[:, None] // 128 == place // 128)
    scores = torch.einsum("bihd,bjhd->bhij", cache[f"{at}q"], cache[f"{at}k"]) * 8**-0.5
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(cache[f"{at}pattern"], wanted, atol=1e-5, rtol=1e-4)
