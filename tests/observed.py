"""Foreign decoders under observation: all that `strangers` holds by name, and a naive pattern to hold theirs against."""

from __future__ import annotations

import functools
import math

import torch
from strangers import (
    GPT,
    Averaged,
    DenselyMixed,
    GroupedAttention,
    HeadwiseMixed,
    Inline,
    InPlaceBlock,
    Looped,
    Paper,
    Pulled,
    RawMatrix,
    SharedValues,
    eagerly,
    large,
)

import workbench

PLACE = torch.arange(40)
BEFORE = PLACE[:, None] >= PLACE
LAMBDAS = [(1.0, 1.0), (0.3141592, 0.7), (-0.125, 1.7320508)]
STRANGERS = {
    "fused": GPT,
    "hidden lambdas": lambda: GPT(LAMBDAS),
    "torch.softmax": lambda: GPT(LAMBDAS, eagerly("torch")),
    "F.softmax": lambda: GPT(LAMBDAS, eagerly("functional")),
    "tensor.softmax": lambda: GPT(LAMBDAS, eagerly("method")),
    "softmax by hand": lambda: GPT(LAMBDAS, eagerly("by hand")),
    "einsum": lambda: GPT(LAMBDAS, eagerly("einsum")),
    "ellipsis": lambda: GPT(LAMBDAS, eagerly("ellipsis")),
    "baddbmm": lambda: GPT(LAMBDAS, eagerly("baddbmm")),
    "repeated heads": lambda: GPT(attention=GroupedAttention),
    "repeated by hand": lambda: GPT(attention=lambda i: GroupedAttention(i, "by hand")),
    "grouped heads": lambda: GPT(attention=lambda i: GroupedAttention(i, "gqa", scale=0.2)),
    "grouped einsum": lambda: GPT(attention=lambda i: GroupedAttention(i, "einsum")),
    "shared values": lambda: GPT(attention=SharedValues),
    "pulled": lambda: GPT(attention=Pulled),
    "headwise": lambda: GPT(attention=HeadwiseMixed),
    "dense": lambda: GPT(attention=DenselyMixed),
    "bare matrix": lambda: GPT(attention=RawMatrix),
    "in place": lambda: GPT(block=InPlaceBlock),
    "averaged": Averaged,
    "looped": Looped,
    "nested outputs": Paper,
    "inline": Inline,
}


def see(module, ids, **options):
    return workbench.observe(module, ids, quiet=True, **options)


@functools.cache
def stranger(name):
    """One of the strangers, its logits and its weights before anybody observed it, and the observed module: to look at alone."""
    module = large(STRANGERS[name]())
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))  # the fixture's
    with torch.no_grad():
        plain = logits_of(module(ids)).clone()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    return module, plain, state, see(module, ids)


def logits_of(output):
    return output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


def pattern_of(cache, layer):
    """Naive pattern from what the cache calls rotated queries and keys."""
    q, k = cache[f"blocks.{layer}.attn.hook_rot_q"], cache[f"blocks.{layer}.attn.hook_rot_k"]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores, scores.softmax(-1)
