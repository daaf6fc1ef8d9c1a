"""Operands of attention whose heads stand before the sequences: read as in the same decoder written batch first."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from observed import BEFORE, see
from strangers import GPT, HEADS, VOCABULARY, large

from workbench.errors import WorkbenchError
from workbench.hook_names import STATISTICS

SCALE = 8**-0.5


def weights(scores):
    t = scores.shape[-1]
    return (scores * SCALE).masked_fill(~BEFORE[:t, :t], -math.inf).softmax(-1)


def heads_first(x):
    return x.transpose(0, 1).contiguous()


def flat(x):
    return heads_first(x).flatten(0, 1)


def batch_first(y, like):
    return y.reshape(like.shape[1], like.shape[0], *like.shape[2:]).transpose(0, 1)


def by_bmm(q, k, v, layer=0):
    return batch_first(torch.bmm(weights(torch.bmm(flat(q), flat(k).mT)), flat(v)), q)


def by_bmm_viewed(q, k, v, layer=0):
    scores = torch.bmm(flat(q), flat(k).mT)
    pattern = weights(scores.view(q.shape[1], q.shape[0], *scores.shape[1:]))
    return batch_first(torch.bmm(pattern.flatten(0, 1), flat(v)), q)


def by_matmul(q, k, v, layer=0):
    q_, k_, v_ = map(heads_first, (q, k, v))
    return batch_first(weights(q_ @ k_.mT) @ v_, q)


def by_einsum(q, k, v, layer=0):
    q_, k_, v_ = map(heads_first, (q, k, v))
    return batch_first(torch.einsum("hbij,hbjd->hbid", weights(torch.einsum("hbid,hbjd->hbij", q_, k_)), v_), q)


def by_hand(q, k, v, layer=0):
    weighted = (torch.bmm(flat(q), flat(k).mT) * SCALE).exp() * BEFORE[: q.shape[2], : q.shape[2]]
    return batch_first(torch.bmm(weighted / weighted.sum(-1, keepdim=True), flat(v)), q)


def by_sdpa(q, k, v, layer=0):
    return batch_first(F.scaled_dot_product_attention(*map(heads_first, (q, k, v)), is_causal=True), q)


def by_flat_sdpa(q, k, v, layer=0):
    seen = BEFORE[: q.shape[2], : q.shape[2]].expand(q.shape[0] * q.shape[1], -1, -1)
    return batch_first(F.scaled_dot_product_attention(*map(flat, (q, k, v)), attn_mask=seen), q)


def plainly(q, k, v, layer=0):
    return weights(q @ k.mT) @ v


def grouped(attend):
    """Two key-value heads, each repeated for half of the query heads."""

    def attend_grouped(q, k, v, layer=0):
        return attend(q, *(x[:, :2].repeat_interleave(HEADS // 2, dim=1) for x in (k, v)), layer)

    return attend_grouped


def by_grouped_einsum(q, k, v, layer=0):
    q_, (k_, v_) = heads_first(q).unflatten(0, (2, -1)), (heads_first(x[:, :2]) for x in (k, v))
    pattern = weights(torch.einsum("kgbid,kbjd->kgbij", q_, k_))
    return batch_first(torch.einsum("kgbij,kbjd->kgbid", pattern, v_), q)


def by_grouped_sdpa(q, k, v, layer=0):
    q_, k_, v_ = flat(q), flat(k[:, :2]), flat(v[:, :2])
    q_, k_, v_ = (x.unflatten(0, (-1, q.shape[0])).transpose(0, 1) for x in (q_, k_, v_))
    return F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)


FORMS = (by_bmm, by_bmm_viewed, by_matmul, by_einsum, by_hand, by_sdpa, by_flat_sdpa)
CASES = {f.__name__: (f, plainly) for f in FORMS}
CASES |= {f"grouped {f.__name__}": (grouped(f), grouped(plainly)) for f in (by_bmm, by_matmul, by_sdpa, by_flat_sdpa)}
CASES |= {f.__name__: (f, grouped(plainly)) for f in (by_grouped_einsum, by_grouped_sdpa)}


def tokens(batch, length=12, seed=3):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.fast(3)
@torch.no_grad()
@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES))[::3])
def test_heads_before_the_sequences_are_read_as_after_them(number, case):
    example = (1, 2, HEADS, 8)[number % 4]  # a module is observed on one batch and run on all
    attend, plain = CASES[case]
    lambdas = [(1, 1), (0.3, 0.7), (0.3, 0.7)]
    theirs, same = (see(large(GPT(lambdas, attend=f)), tokens(example)) for f in (attend, plain))
    at = "blocks.1.attn."
    sites = [f"{at}hook_{x}" for x in ("q", "k", "v", "z", "pattern", *STATISTICS)] + [f"{at}own.hook_v"]
    assert set(sites) <= set(theirs.hook_dict)
    for batch in ((1, HEADS), (2, 8))[number % 2]:  # as many as it was observed on, and another number
        ids = tokens(batch, 9, seed=batch)
        (logits, cache), (_, true) = (model.run_with_cache(ids, sites) for model in (theirs, same))
        assert torch.equal(logits, theirs.foreign(ids)[0])
        for name in sites:
            torch.testing.assert_close(cache[name], true[name], atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        for name in ("hook_z", "hook_pattern", "hook_v", "hook_q"):

            def change(x, hook):
                x = x.clone()
                x[0, 1] *= 0.5
                return x

            edited = [m.run_with_hooks(ids, fwd_hooks=[(f"{at}{name}", change)]) for m in (theirs, same)]
            torch.testing.assert_close(*edited, atol=2e-4, rtol=1e-4)
            assert not torch.equal(edited[0], logits)


def test_a_flattened_axis_whose_order_no_run_shows_is_refused():
    def mixing(q, k, v, layer=0):
        return by_bmm(*(x + 9 * x.sum(0, keepdim=True) for x in (q, k, v)))

    with pytest.raises(WorkbenchError, match="not known which axis of its tensors holds the sequences"):
        see(large(GPT(attend=mixing)), tokens(2))
