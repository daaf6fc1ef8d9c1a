"""The line that says which share of an observed module its hook points cover."""

from __future__ import annotations

import pytest
import torch
from strangers import GPT, GPTBlock, large

import workbench
from workbench.runs.records import facts

IDS = torch.randint(61, (4, 24), generator=torch.Generator().manual_seed(0))


class Skipping(GPT):
    """Block 1 never runs, as a cross-attention layer without an image."""

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        for block in (self.transformer.h[0], self.transformer.h[2]):
            x = block(x, {})
        return self.lm_head(self.transformer.ln_f(x))


class ExpertBlock(GPTBlock):
    """An MLP of fused expert weights [expert, width, width]."""

    def __init__(self, attention):
        super().__init__(attention)
        self.mlp = Experts()


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(4, 32, 32))

    def forward(self, x):
        return torch.einsum("btd,edw->btw", x, self.up).tanh()


def share(*parameters):
    return sum(p.numel() for p in parameters)


@pytest.mark.slow
def test_a_plain_decoder_is_covered_but_for_its_positions():
    module = large(GPT())
    model = workbench.observe(module, IDS, quiet=True)
    rest = share(module.transformer.wpe.weight) / share(*module.parameters())
    assert model.coverage.startswith("Coverage: attention of 3 of 3 layers, its statistics in 3; ")
    assert f"outside: transformer.wpe ({rest:.1%})" in model.coverage
    assert model.coverage in repr(model)
    frame = workbench.measure(model, "sink_mass", IDS)
    assert facts(frame["provenance"].iloc[0])["coverage"] == model.coverage
    assert str(workbench.xray(model, IDS)).endswith(model.coverage)


def test_blocks_that_did_not_run_are_named():
    module = large(Skipping())
    model = workbench.observe(module, IDS, quiet=True)
    part = share(*module.transformer.h[1].parameters()) / share(*module.parameters())
    assert "attention of 2 of 2 layers" in model.coverage
    assert f"transformer.h.1, which did not run ({part:.1%})" in model.coverage


def test_fused_expert_weights_are_counted():
    module = large(GPT(block=ExpertBlock))
    model = workbench.observe(module, IDS, quiet=True)
    part = 3 * 4 * 32 * 32 / share(*module.parameters())
    assert f"{part:.1%} are fused 3-D weights" in model.coverage


@pytest.mark.slow
def test_layers_without_readable_attention_are_counted():
    transformers = pytest.importorskip("transformers")
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = workbench.observe(transformers.GraniteMoeHybridForCausalLM(config).eval(), IDS, quiet=True)
    assert "attention of 1 of 2 layers" in model.coverage
    assert "no readable attention in 0;" in model.coverage
