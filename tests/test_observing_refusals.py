"""What cannot be observed is refused by its cause, and names and inputs are checked as on our own models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from observed import BEFORE, pattern_of, see, stranger
from strangers import GPT, VOCABULARY, D, Pair, causal, flash, large, split
from torch import nn

import workbench
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.observing.recognition.decoder_structure import UNLIMITED


def noisy(q, k, v, layer):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)


REFUSALS = {
    "both directions": (
        lambda: GPT(attend=lambda q, k, v, i: F.scaled_dot_product_attention(q, k, v)),
        "sees later positions",
    ),
    "custom kernel": (lambda: GPT(attend=lambda q, k, v, i: flash(q, k, v)), "flash_attn_forward.*custom kernel"),
    "two decoders": (Pair, "several stacks of blocks: student.transformer.h and teacher.transformer.h; .*blocks="),
    "dropout in attention": (lambda: GPT(attend=noisy), r"dropout of 0.2 is active.*module.eval\(\)"),
    "no attention": (
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)),
        "no attention was seen",
    ),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_refused_by_its_cause(name, ids):
    make, cause = REFUSALS[name]
    with pytest.raises(WorkbenchError, match=cause):
        see(large(make()), ids)


def test_dropout_is_refused_when_observing_and_when_running(ids):
    module = large(GPT(dropout=0.1))
    with pytest.raises(WorkbenchError, match=r"dropout is active \(transformer.drop, p=0.1\): call module.eval\(\)"):
        see(module.train(), ids)
    observed = see(module.eval(), ids)
    module.train()
    with pytest.raises(WorkbenchError, match="dropout is active"):
        observed.run_with_cache(ids)
    with pytest.raises(WorkbenchError, match="dropout is active"):
        workbench.measure(observed, "loss", ids)
    assert module.training, "measuring must not change the mode of a foreign module"
    assert not observed.eval().training
    assert not module.training
    assert observed.run_with_cache(ids)[1]


def test_soft_caps_keep_values_and_pattern_but_not_what_would_be_wrong(ids):
    def capped(q, k, v, layer):
        scores = (3 * torch.tanh(q @ k.mT * 8**-0.5 / 3)).masked_fill(~BEFORE, -math.inf)
        return scores.softmax(-1) @ v

    observed = see(large(GPT(attend=capped)), ids)
    _, cache = observed.run_with_cache(
        ids, names_filter=["blocks.1.attn.hook_v", "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_received"]
    )
    pattern = cache["blocks.1.attn.hook_pattern"]
    torch.testing.assert_close(cache["blocks.1.attn.hook_received"], pattern.sum(-2), atol=1e-5, rtol=1e-5)
    with pytest.raises(WorkbenchError, match=r"not a multiple of q \. k"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_rot_q")
    row = observed.sites.set_index(["site", "layer"]).loc[("rot_q", 1)]
    assert not row["found"]
    assert "cap" in row["note"]


@pytest.mark.parametrize(
    ("tokens", "cause"),
    [
        ([[1.5, 2.5]], "needs token ids"),
        ([[1, 2, 3]], "8 positions"),
        ([[1, 2], [3]], "rows of one length"),
        ([[0, 1, 2, VOCABULARY] * 3], f"ids 0 to {VOCABULARY} .*out of range.*: give ids of its vocabulary"),
        ([[0, 1, 2, 3] * 30], r"tokens \(1, 120\) .*no more positions than it reads"),
    ],
)
def test_bad_example_tokens_are_refused(tokens, cause):
    with pytest.raises(BadData, match=cause):
        see(large(GPT()), tokens)


def test_names_and_inputs_are_checked_as_on_our_own_models(ids):
    observed = stranger("fused")[-1]
    with pytest.raises(UnknownName, match="hook_v"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_w")
    with pytest.raises(BadData, match="n_ctx=96"):
        observed(torch.zeros(1, 97, dtype=torch.long))
    with pytest.raises(BadData, match="vocabulary"):
        observed(torch.full((1, 20), VOCABULARY))
    with pytest.raises(WorkbenchError, match=r"torch.nn.Module, not a int"):
        see(3, ids)


def test_an_error_of_a_hook_is_not_blamed_on_the_number_of_tokens(ids):
    """Where nothing says how many tokens the module reads, an error in a run may come from their number."""
    observed = see(large(GPT()), ids)
    observed.config = replace(observed.config, n_ctx=UNLIMITED)
    wrong = ("blocks.0.hook_resid_pre", lambda x, hook: x.view(7, -1))
    with observed.hooks([wrong]), pytest.raises(RuntimeError, match=r"shape '\[7, -1\]' is invalid"):
        observed(ids)
    with pytest.raises(WorkbenchError, match="cannot read 200 tokens"):
        observed(ids[:, :1].expand(-1, 200))


def stateful(q, k, v, layer, runs=[0]):  # noqa: B006 - it counts
    runs[0] += 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * (1 + runs[0])


class Watched(GPT):
    """Takes another path while hooks are on its parts, as PyTorch's fused encoder layers do."""

    def forward(self, idx):
        logits = super().forward(idx)[0]
        return logits + 1 if self.lm_head._forward_hooks else logits


def test_outputs_that_change_by_themselves_are_told_from_those_that_a_trace_changes(ids):
    with pytest.raises(WorkbenchError, match="two runs of GPT on the same tokens differ"):
        see(large(GPT(attend=stateful)), ids)
    with pytest.raises(WorkbenchError, match="Watched takes another path when it is traced"):
        see(large(Watched()), ids)


@pytest.mark.parametrize("tokens", [torch.zeros(8, dtype=torch.bool), torch.zeros(1, 2, 8, dtype=torch.long)])
def test_example_tokens_are_whole_numbers_by_text_and_position(tokens):
    with pytest.raises(BadData, match=r"example_tokens of shape"):
        see(large(GPT()), tokens)


def test_eight_positions_in_all_are_enough_and_one_text_needs_no_axis(ids):
    assert see(large(GPT()), ids[:, :4]).config.n_layers == 3
    assert see(large(GPT()), ids[0, :8].tolist()).config.n_layers == 3
    with pytest.raises(BadData, match="8 positions or more"):
        see(large(GPT()), ids[:1, :7])
    with pytest.raises(WorkbenchError, match="observed already"):
        see(stranger("fused")[-1], ids)


def test_an_activation_is_named_by_where_it_is_found_not_by_what_looks_like_it(ids):
    """A block that attends by itself, its W_O a bare parameter: the next matrix reads no heads but the MLP's input."""

    class Block(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D)
            self.w_o, self.up, self.down = nn.Parameter(torch.zeros(D, D)), nn.Linear(D, 64), nn.Linear(64, D)

        def forward(self, x, memory):
            q, k, v = (split(y) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
            x = x + causal(q, k, v).transpose(1, 2).reshape(x.shape) @ self.w_o
            return x + self.down(F.gelu(self.up(x)))

    observed = see(large(GPT(block=Block)), ids)
    row = observed.sites.set_index(["site", "layer"]).loc[("z", 1)]
    assert row["note"] == "", "a parameter that is no module is W_O too"
    _, cache = observed.run_with_cache(ids)
    _, pattern = pattern_of(cache, 1)
    z = torch.einsum("bhij,bjhd->bihd", pattern, cache["blocks.1.attn.hook_v"].double())
    torch.testing.assert_close(cache["blocks.1.attn.hook_z"].double(), z, atol=1e-5, rtol=1e-5)
    with observed.hooks([("blocks.1.attn.hook_z", lambda x, hook: x * 0)]):
        kept = observed.run_with_cache(ids, names_filter="blocks.1.hook_resid_post")[1]["blocks.1.hook_resid_post"]
    block, x = observed.foreign.transformer.h[1], cache["blocks.1.hook_resid_pre"]
    torch.testing.assert_close(kept, x + block.down(F.gelu(block.up(x))), atol=1e-5, rtol=1e-5)
