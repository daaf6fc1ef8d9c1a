"""Prompts whose sizes may be taken for another axis, code that takes another path, examples and matrices that are alike."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from observed import STRANGERS, see
from odd_attentions import Packed, Registers
from odd_stacks import PositionsFirst
from strangers import GPT, VOCABULARY, D, FusedAttention, large, split
from torch import nn

import workbench
from workbench.errors import BadData, WorkbenchError


class Library(nn.Module):
    """`nn.MultiheadAttention` with either order of its axes."""

    def __init__(self, batch_first):
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 4, batch_first=batch_first)

    def forward(self, x, memory):
        x = x if self.attend.batch_first else x.transpose(0, 1)
        future = torch.full((x.shape[self.attend.batch_first],) * 2, -torch.inf).triu(1)
        y = self.attend(x, x, x, attn_mask=future, need_weights=False)[0]
        return y if self.attend.batch_first else y.transpose(0, 1)


class Normed(FusedAttention):
    """Norms of queries and keys after their axes are turned, and fewer key-value heads (Gemma 3)."""

    def __init__(self, layer):
        super().__init__(layer)
        self.q_norm, self.k_norm = nn.RMSNorm(D // 4), nn.RMSNorm(D // 4)

    def forward(self, x, memory):
        q, k, v = self.c_attn(x).split(D, dim=2)
        q, k, v = self.q_norm(split(q)), self.k_norm(split(k[..., : D // 2], 2)), split(v[..., : D // 2], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


MODULES = {
    "norms of turned heads": lambda: GPT(attention=Normed),
    "batch second": lambda: GPT(attention=lambda i: Library(False)),
    "logits with positions first": lambda: PositionsFirst(turned=False),
    "one row": lambda: Packed("eager"),
    "registers": Registers,
    "baddbmm": STRANGERS["baddbmm"],
}


@pytest.fixture(scope="module")
def sweep():
    path = Path(__file__).parent.parent / "benchmarks" / "prompt_sizes.py"
    spec = importlib.util.spec_from_file_location("prompt_sizes", path)
    sys.modules["prompt_sizes"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prompt_sizes"]


@pytest.mark.slow
@pytest.mark.fast(3)
@torch.no_grad()
@pytest.mark.parametrize("name", MODULES)
def test_a_prompt_of_any_size_shows_what_its_sequences_show_in_a_longer_one(name, ids, sweep):
    observed = see(large(MODULES[name]()), ids)
    prompts = torch.randint(VOCABULARY, (8, sweep.LONG), generator=torch.Generator().manual_seed(2))
    compared, wrong, refused = sweep.differences(observed, prompts)
    assert compared > 300
    assert not wrong
    assert not refused


@pytest.mark.slow
def test_an_example_of_any_size_is_read_alike(ids):
    module = large(GPT(attention=Normed))
    plain = see(module, ids)
    other = see(module, torch.randint(VOCABULARY, (4, 4), generator=torch.Generator().manual_seed(3)))
    names = [name for name in plain.hook_dict if not name.endswith("v_mix")]
    assert [*other.hook_dict] == [*plain.hook_dict]
    (_, found), (_, expected) = (model.run_with_cache(ids, names) for model in (other, plain))
    for hook in names:
        assert torch.equal(found[hook], expected[hook]), hook


@pytest.mark.slow
@torch.no_grad()
def test_measures_do_not_depend_on_how_many_sequences_are_run_at_once():
    prompts = torch.randint(VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(2))
    observed = see(large(GPT(attention=lambda i: Library(True))), prompts)
    eight, seven = (
        workbench.measure(observed, ["token_identity_share", "token_similarity"], prompts, batch=n) for n in (8, 7)
    )
    assert eight["value"].tolist() == pytest.approx(seven["value"].tolist(), abs=1e-6)


def later(form):
    """Attention that takes another path for more than 40 tokens: one more call before it, by the same code or other code."""

    def attend(q, k, v, layer=0):
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)

        def mixed(q, k, v):
            return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v

        long = q.shape[2] > 40
        if form == "other lines" and long:
            v = v + (k @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v
        for _ in range(2 if form == "same lines" and long else 1):
            y = mixed(q, k, v)
        if form == "in its place" and long:
            y = (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v
        return y

    return attend


@torch.no_grad()
def test_attentions_are_told_apart_by_the_code_that_calls_them(ids):
    module = large(GPT(attend=later("other lines")))
    observed, point = see(module, ids), "blocks.1.attn.hook_z"
    seen = []
    module.transformer.h[1].attn.c_proj.register_forward_pre_hook(lambda part, args: seen.append(args[0]))
    for prompt in (ids, torch.cat((ids, ids[:, :8]), 1)):
        _, cache = observed.run_with_cache(prompt, [point])
        torch.testing.assert_close(cache[point].flatten(2), seen.pop())


@torch.no_grad()
def test_code_that_calls_an_attention_more_often_than_on_the_example_is_refused(ids):
    observed = see(large(GPT(attend=later("same lines"))), ids)
    observed.run_with_cache(ids, ["blocks.1.attn.hook_pattern"])
    with pytest.raises(WorkbenchError, match=r"layer 1 makes more than the 1 product call in .* observe the module on"):
        observed.run_with_cache(torch.cat((ids, ids), 1), ["blocks.1.attn.hook_pattern"])


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor


OUTPUTS = {"dataclass": Output, "deep": lambda x: {"a": [{"b": {"c": (x,)}}]}}


class Wrapped(nn.Module):
    def __init__(self, wrap, dropout=0.0):
        super().__init__()
        self.gpt, self.wrap, self.dropout = large(GPT()), wrap, dropout

    def forward(self, ids):
        return self.wrap(nn.functional.dropout(self.gpt(ids)[0], self.dropout))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
def test_logits_are_found_and_compared_wherever_an_output_keeps_them(wrap, ids):
    observed = see(Wrapped(wrap).eval(), ids)
    assert torch.equal(observed(ids), observed.foreign.gpt(ids)[0])
    assert observed(ids, return_type="loss").isfinite()
    with pytest.raises(WorkbenchError, match="two runs of Wrapped on the same tokens differ"):
        see(Wrapped(wrap, dropout=0.5).eval(), ids)


def test_an_output_without_tensors_is_refused(ids):
    with pytest.raises(WorkbenchError, match=r"returns a float without a tensor.* pass observe\(\) a call="):
        see(Wrapped(lambda x: float(x.sum())).eval(), ids)


def test_examples_of_few_ids_are_refused(ids):
    module, example = large(GPT()), torch.arange(48).view(2, 24) % 3
    for run in (lambda: see(module, example), lambda: see(module, ids).value_paths(example)):
        with pytest.raises(BadData, match=r"different ids.* too few to tell tensors apart"):
            run()


class Apart(nn.Module):
    """Queries, keys and values by matrices of their own."""

    def __init__(self, layer):
        super().__init__()
        self.k, self.v, self.q, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, memory):
        q, k, v = (split(project(x)) for project in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("alike", ["keys and values", "multiples", "heads"])
def test_matrices_that_are_equal_when_observed_are_not_merged(alike, ids):
    module = large(GPT(attention=Apart))
    attentions = [block.attn for block in module.transformer.h]
    for attn in attentions:
        if alike == "keys and values":
            attn.v.load_state_dict(attn.k.state_dict())
        if alike == "multiples":
            attn.v.load_state_dict({name: -2 * x for name, x in attn.k.state_dict().items()})
        for part in (attn.k, attn.v) if alike == "heads" else ():
            for p in part.parameters():
                p.copy_(p[: D // 4].repeat(4, *[1] * (p.ndim - 1)))
    observed = see(module, ids)
    assert observed.architecture == "transformer", "no value is said to be a mixture"
    large(module)  # trained apart
    names = {"q": "hook_q", "k": "hook_k", "v": "own.hook_v"}
    seen = {}
    for name in names:
        getattr(attentions[1], name).register_forward_hook(lambda part, args, out, name=name: seen.update({name: out}))
    _, cache = observed.run_with_cache(ids, [f"blocks.1.attn.{point}" for point in names.values()])
    for name, point in names.items():
        assert torch.equal(cache[f"blocks.1.attn.{point}"].flatten(2), seen[name]), name
