"""Positions inside a module that are no tokens, and sequences that stand in one row: tokens are shown, the rest is a share of its own."""

from __future__ import annotations

import pytest
import torch
from observed import see
from odd_attentions import Packed, Prefixed, Registers, softmax
from strangers import GPT, HEADS, LAYERS, D, eagerly, large, split
from torch.nn import functional as F

import workbench
from workbench.errors import WorkbenchError
from workbench.hook_names import NULL, STATISTICS
from workbench.models.decomposition import decompose


def of_layer_1(observed, ids):
    """(logits, names of layer 1 -> tensors) of one run."""
    logits, cache = observed.run_with_cache(ids, lambda name: name.startswith("blocks.1."))
    return logits, {name.removeprefix("blocks.1.").replace("hook_", ""): x for name, x in cache.items()}


def truth(module, ids, n_keys=0):
    """Pattern over all keys [batch, head, query, key], values and the stream before block 1, of a plain run in float64."""
    kept = {}
    block = module.transformer.h[1]
    handles = [
        block.register_forward_pre_hook(lambda m, args: kept.update(stream=args[0])),
        block.attn.c_attn.register_forward_hook(lambda m, args, out: kept.update(qkv=out)),
    ]
    logits = module(ids)
    [handle.remove() for handle in handles]
    q, k, v = (split(x) for x in kept["qkv"].split(D, dim=2))
    if n_keys:
        own = block.attn.prefix.expand(len(ids), *block.attn.prefix.shape)
        k, v = torch.cat((own[:, 0], k), 2), torch.cat((own[:, 1], v), 2)
        seen = F.pad(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(), (n_keys, 0), value=True)
        pattern = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    else:
        pattern = softmax(q, k)
    return logits, pattern, v.transpose(1, 2), kept["stream"]


def check(found, pattern, tokens, v):
    """All that is shown of an attention against its whole pattern, of whose keys `tokens` are tokens."""
    mine = pattern[..., tokens]
    null = 1 - mine.sum(-1)
    wanted = {
        "attn.pattern": mine, "attn.null": null, "attn.received": mine.sum(-2), "attn.sink": mine[..., 0],
        "attn.row_max": mine.amax(-1), "attn.row_entropy": torch.special.entr(mine).sum(-1) + torch.special.entr(null.clamp_min(0)),
        "attn.v": v[:, tokens],
    }  # fmt: skip
    for name, true in wanted.items():
        torch.testing.assert_close(found[name], true, msg=name)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("before", "after", "attend"), [(2, 1, None), (3, 0, eagerly("torch"))])
@torch.no_grad()
def test_registers_are_told_from_tokens_and_get_a_share_of_their_own(attend, before, after, ids):
    module = large(Registers(before, after, **({"attend": attend} if attend else {}))).double()
    observed = see(module, ids)
    tokens = slice(before, before + ids.shape[1])
    for some in (ids, ids[:1, :17]):
        tokens = slice(before, before + some.shape[1])
        plain, pattern, v, stream = truth(module, some)
        logits, found = of_layer_1(observed, some)
        assert torch.equal(logits, plain[:, tokens])
        check(found, pattern[:, :, tokens], tokens, v)
        assert torch.equal(found["resid_pre"], stream[:, tokens])
    assert observed.architecture == "transformer"
    told = " and ".join(f"{n} positions {where} the tokens" for n, where in ((before, "before"), (after, "after")) if n)
    assert f"{told} are no tokens (registers, a prefix): what goes there is shown as null" in repr(observed)
    assert decompose(observed, ids, "logits", "head").error < 1e-9
    assert observed(ids, return_type="loss") == F.cross_entropy(plain_logits(module, ids, tokens), ids[:, 1:].flatten())


def plain_logits(module, ids, tokens):
    before = tokens.start
    return module(ids)[:, before : before + ids.shape[1] - 1].flatten(0, 1)


@pytest.mark.fast(1)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_keys_of_a_prefix_are_no_tokens(fused, ids):
    module = large(GPT(attention=lambda i: Prefixed(i, fused))).double()
    observed = see(module, ids)
    (plain, _), pattern, v, _ = truth(module, ids, 3)
    logits, found = of_layer_1(observed, ids)
    assert torch.equal(logits, plain)
    check(found, pattern, slice(3, None), v)
    assert "some of its keys are no tokens (registers, a prefix)" in repr(observed)
    assert workbench.measure(observed, "null_mass", ids)["value"].max() > 0.05


def with_means(x):
    """Keys or values, and after them the mean of every four whole ones, as DeepSeek-V4 compresses its context."""
    n = x.shape[2] // 4
    return torch.cat((x, x[:, :, : 4 * n].unflatten(2, (n, 4)).mean(3)), 2)


@pytest.mark.fast(1)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_the_number_of_keys_that_are_no_tokens_may_grow_with_the_tokens(fused, ids):
    def masked(t):
        ends = torch.arange(t // 4) * 4 + 3
        return torch.cat((torch.ones(t, t, dtype=torch.bool).tril(), ends <= torch.arange(t)[:, None]), 1)

    def attend(q, k, v, layer=0):
        k, v, mask = with_means(k), with_means(v), masked(q.shape[2])
        if fused:
            return F.scaled_dot_product_attention(q, k, v, mask)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v

    module = large(GPT(attend=attend)).double()
    observed = see(module, ids)
    for t in (40, 39, 17, 4, 3):
        logits, found = of_layer_1(observed, ids[:, :t])
        assert torch.equal(logits, module(ids[:, :t])[0])
        _, _, v, stream = truth(module, ids[:, :t])
        q, k, _ = (
            split(x) for x in module.transformer.h[1].attn.c_attn(module.transformer.h[1].ln_1(stream)).split(D, 2)
        )
        pattern = (q @ with_means(k).mT * 8**-0.5).masked_fill(~masked(t), -torch.inf).softmax(-1)
        check(found, pattern, slice(0, t), v)


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("form", ["fused", "eager"])
@torch.no_grad()
def test_sequences_in_one_row_are_shown_one_by_one(form, ids):
    module, alone = large(Packed(form)).double(), large(GPT()).double()
    alone.load_state_dict(module.state_dict())
    observed, same = see(module, ids), see(alone, ids)
    assert "all sequences stand in one row inside the module" in repr(observed)
    for some in (ids, ids[:, :23], ids[:1]):
        logits, cache = observed.run_with_cache(some, lambda name: True)
        expected, true = same.run_with_cache(some, lambda name: True)
        torch.testing.assert_close(logits, expected)
        assert set(cache.keys()) == set(true.keys())
        for name, tensor in true.items():
            torch.testing.assert_close(cache[name], tensor, msg=name)
    assert decompose(observed, ids, "logits", "value_path").error < 1e-9


@torch.no_grad()
def test_sequences_in_one_row_that_see_each_other_are_refused(ids):
    with pytest.raises(WorkbenchError, match="lets sequences that stand in one row see each other: mask them, or give"):
        see(large(Packed(apart=False)), ids)


@pytest.fixture(
    scope="module", params=[Registers, lambda: Packed("eager"), lambda: GPT(attention=lambda i: Prefixed(i))]
)
def longer(request):
    """An observed module whose tensors hold more than the tokens of one sequence."""
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    return see(large(request.param()).double(), ids)


@pytest.mark.fast(4)
@pytest.mark.parametrize("point", ["hook_resid_pre", "attn.hook_v", "attn.hook_pattern"])
@torch.no_grad()
def test_what_is_replaced_is_the_tokens_and_nothing_else(longer, point, ids):
    """Adding nothing changes nothing; what is changed at one token leaves those before it as they are."""
    observed = longer
    plain = observed(ids)

    def changed(x, hook, by):
        x = x.clone()
        at = (0, slice(None), 20) if "pattern" in point else (0, 20)
        x[at] += by * torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
        return x

    with observed.hooks([(f"blocks.1.{point}", lambda x, hook: changed(x, hook, 0.0))]):
        torch.testing.assert_close(observed(ids), plain)
    with observed.hooks([(f"blocks.1.{point}", lambda x, hook: changed(x, hook, 1.0))]):
        moved = (observed(ids) - plain).abs().amax(-1) > 1e-9
    assert not moved[1].any()
    assert not moved[0, :20].any()
    assert moved[0, 20:].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@torch.no_grad()
def test_an_adapters_prompt_and_its_prefix_are_no_tokens(ids):
    """peft's virtual tokens: embeddings before those of the tokens, and keys and values before theirs."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    for kind in ("prompt", "prefix"):
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=D, n_layer=LAYERS, n_head=HEADS)
        base = transformers.GPT2LMHeadModel(config).eval()
        make = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
        module = peft.get_peft_model(base, make(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        observed = see(module, ids)
        logits, cache = observed.run_with_cache(ids)
        assert torch.equal(logits, module(ids).logits[:, 4 if kind == "prompt" else 0 :])
        assert cache[f"blocks.1.attn.hook_{NULL}"].min() > 0.01
        assert {f"blocks.1.attn.hook_{name}" for name in STATISTICS} <= set(cache.keys())
