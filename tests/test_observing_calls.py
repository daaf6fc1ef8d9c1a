"""Attention called directly: FlexAttention with its functions, PyTorch's private fused calls and its encoder layers."""

from __future__ import annotations

import math

import flash_stand_in
import pytest
import torch
from observed import BEFORE, PLACE, see
from strangers import GPT, HEADS, VOCABULARY, D, large
from torch import nn

from workbench.errors import WorkbenchError
from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
SLOPES = torch.tensor([0.05, 0.1, 0.2, 0.4])
FLEX = {  # what of a score is left, where it is seen, and the naive form of both
    "causal": (None, lambda b, h, i, j: i >= j, lambda s: s, BEFORE),
    "window": (None, lambda b, h, i, j: (i >= j) & (i - j < 7), lambda s: s, BEFORE & (PLACE[:, None] - PLACE < 7)),
    "documents": (None, lambda b, h, i, j: (i >= j) & (i // 10 == j // 10), lambda s: s, BEFORE & (PLACE[:, None] // 10 == PLACE // 10)),
    "slopes": (
        lambda s, b, h, i, j: s - SLOPES[h] * (i - j), lambda b, h, i, j: i >= j,
        lambda s: s - SLOPES.double().view(4, 1, 1) * (PLACE[:, None] - PLACE), BEFORE,
    ),
    "cap": (lambda s, b, h, i, j: 2 * torch.tanh(s / 2), lambda b, h, i, j: i >= j, lambda s: 2 * torch.tanh(s / 2), BEFORE),
}  # fmt: skip


def flexible(score_mod, mask_mod):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(q, k, v, layer=0):
        t = q.shape[2]
        mask = create_block_mask(mask_mod, None, None, t, t, device="cpu")
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    return attend


@torch.no_grad()
def check(module, ids, change, seen, scale):
    """Values, output, pattern and statistics of a layer against a dense one in float64."""
    observed = see(module, ids)
    names = [n for n in observed.hook_dict if n.startswith("blocks.1.attn")]
    logits, cache = observed.run_with_cache(ids, names_filter=names)
    assert torch.equal(logits, module(ids)[0])
    q, k, v = (cache[f"blocks.1.attn.hook_{x}"].double() for x in "qkv")
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = change(torch.einsum("bihd,bjhd->bhij", q, k) * scale).masked_fill(~seen, -math.inf)
    pattern = scores.softmax(-1)
    wanted = statistics_of(scores, pattern)
    for name in STATISTICS:
        found = cache[f"blocks.1.attn.hook_{name}"].double()
        torch.testing.assert_close(found, getattr(wanted, name), atol=2e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"].double(), pattern, atol=1e-6, rtol=1e-5)
    z = torch.einsum("bhij,bjhd->bihd", pattern, v)
    torch.testing.assert_close(cache["blocks.1.attn.hook_z"].double(), z, atol=1e-5, rtol=1e-5)
    return observed


def in_a_row(x):
    """[batch, head, pos, d_head] -> [batch * pos, head, d_head]."""
    return x.transpose(1, 2).flatten(0, 1)


def starts(q, every=None):
    """Where sequences, or documents of so many tokens, begin in one row, and where the last one ends."""
    every = every or q.shape[2]
    return torch.arange(0, len(q) * q.shape[2] + 1, every, dtype=torch.int32), every


def lengths(q, every=None):
    cuts, longest = starts(q, every)
    return cuts, cuts, longest, longest


def some(kernels, q, k, v):
    """As many heads of keys and values as half of the queries'."""
    q, k, v = (x.transpose(1, 2) for x in (q, k[:, :2], v[:, :2]))
    return kernels.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True, softcap=2.0)


def one_by_one(kernels, q, k, v):
    packed = torch.stack([in_a_row(x) for x in (q, k, v)], 1)
    return kernels.flash_attn_varlen_qkvpacked_func(
        packed, *starts(q), causal=True, alibi_slopes=SLOPES.expand(len(q), -1)
    )


SLOPED, WINDOW = FLEX["slopes"][2], BEFORE & (PLACE[:, None] - PLACE < 7)
FLASH = {  # the call, its output [batch, pos, head, d_head] or in one row; what becomes of scores, what is seen, the scale
    "flash_attn_func": (
        lambda f, q, k, v: f.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, 0.3, True), lambda s: s, BEFORE, 0.3,
    ),
    "flash_attn_qkvpacked_func": (
        lambda f, q, k, v: f.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2).permute(0, 3, 2, 1, 4), causal=True, window_size=(6, 0)),
        lambda s: s, WINDOW, 8**-0.5,
    ),
    "flash_attn_kvpacked_func": (some, lambda s: 2 * torch.tanh(s / 2), BEFORE, 8**-0.5),
    "flash_attn_varlen_func": (
        lambda f, q, k, v: f.flash_attn_varlen_func(*map(in_a_row, (q, k, v)), *lengths(q, 10), causal=True),
        lambda s: s, FLEX["documents"][3], 8**-0.5,
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda f, q, k, v: f.flash_attn_varlen_kvpacked_func(
            in_a_row(q), torch.stack((in_a_row(k), in_a_row(v)), 1), *lengths(q), window_size=(6, 0)
        ),
        lambda s: s, WINDOW, 8**-0.5,
    ),
    "flash_attn_varlen_qkvpacked_func": (one_by_one, SLOPED, BEFORE, 8**-0.5),
}  # fmt: skip


def flash(kernels, call):
    def attend(q, k, v, layer=0):
        out = call(kernels, q, k, v)
        return out.reshape(len(q), q.shape[2], *out.shape[-2:]).transpose(1, 2)

    return large(GPT(attend=attend))


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", FLASH)
def test_flash_kernels_are_read_where_their_functions_end(name, ids, monkeypatch):
    """Held against a stand-in: the kernels themselves need a GPU."""
    call, *truth = FLASH[name]
    observed = check(flash(flash_stand_in.installed(monkeypatch), call), ids, *truth)
    plain = truth[1] is BEFORE and name in ("flash_attn_func", "flash_attn_varlen_func")
    assert ("blocks.1.attn.hook_rot_q" in observed.hook_dict) is plain
    assert observed.structure.layers[1].attention.exact
    with torch.no_grad(), observed.hooks([("blocks.1.attn.hook_v", lambda v, hook: v * 0)]):
        _, cache = observed.run_with_cache(ids, names_filter=["blocks.1.attn.hook_z"])
    assert not cache["blocks.1.attn.hook_z"].any()


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"dropout_p": 0.1}, "dropout of 0.1 is active"),
        (
            {"block_table": torch.zeros(1, 1, dtype=torch.int32)},
            "_flash_attn_varlen_forward with block_table: give whole sequences",
        ),
        ({"causal": False}, "sees later positions"),
    ],
)
def test_what_a_flash_kernel_does_that_cannot_be_read_is_refused_by_name(given, refused, ids, monkeypatch):
    def call(kernels, q, k, v):
        return kernels.flash_attn_varlen_func(*map(in_a_row, (q, k, v)), *lengths(q), **{"causal": True} | given)

    with pytest.raises(WorkbenchError, match=refused):
        see(flash(flash_stand_in.installed(monkeypatch), call), ids)


@pytest.mark.slow  # it goes through the compiler, which other tests should not share a process with
@pytest.mark.parametrize("kind", FLEX)
def test_flex_attention_is_read_with_its_functions_of_scores_and_places(kind, ids):
    score_mod, mask_mod, change, seen = FLEX[kind]
    observed = check(large(GPT(attend=flexible(score_mod, mask_mod))), ids, change, seen, 8**-0.5)
    assert ("blocks.1.attn.hook_rot_q" in observed.hook_dict) is (kind == "causal")
    assert (observed.architecture, observed.structure.layers[1].attention.exact) == ("transformer", True)


def test_private_fused_calls_are_refused_by_name(ids):
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with pytest.raises(WorkbenchError, match="_scaled_dot_product_flash_attention_for_cpu"):
        see(large(GPT(attend=lambda q, k, v, layer=0: call(q, k, v, 0.0, True)[0])), ids)


@pytest.mark.slow
@torch.no_grad()
def test_values_of_a_flex_attention_can_be_replaced(ids):
    module = large(GPT(attend=flexible(*FLEX["slopes"][:2])))
    observed = see(module, ids)
    with observed.hooks([("blocks.1.attn.hook_v", lambda v, hook: v * 0)]):
        _, cache = observed.run_with_cache(ids, names_filter=["blocks.1.attn.hook_z"])
    assert not cache["blocks.1.attn.hook_z"].any()


class Encoded(nn.Module):
    """A decoder made of PyTorch's encoder layers under a causal mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, HEADS, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, ids):
        x, future = self.embed(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=future, is_causal=True)
        return self.head(x)


@torch.no_grad()
def test_encoder_layers_are_read_on_their_plain_path_and_take_their_fused_one_afterwards(ids):
    module = large(Encoded())
    fused = module(ids)
    observed = see(module, ids)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(observed(ids), fused), "without hooks a run is the module's own"
    logits, cache = observed.run_with_cache(ids)
    torch.testing.assert_close(logits, fused, atol=1e-4, rtol=1e-4)
    layer = module.layers[1].self_attn
    x = module.layers[1].norm1(cache["blocks.1.hook_resid_pre"])
    v = (x @ layer.in_proj_weight[2 * D :].T + layer.in_proj_bias[2 * D :]).unflatten(-1, (HEADS, -1))
    torch.testing.assert_close(cache["blocks.1.attn.hook_v"], v, atol=1e-5, rtol=1e-5)
    assert cache["blocks.1.attn.hook_received"].sum(-1).flatten().tolist() == pytest.approx([40.0] * 8, rel=1e-5)
