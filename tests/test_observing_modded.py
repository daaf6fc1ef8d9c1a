"""modded-nanogpt's decoder of January 2025 (KellerJordan/modded-nanogpt, train_gpt.py), rewritten here, gives the numbers of its weights.

Value embeddings, lambdas of blocks and attentions, skips between layers, half-rotated normed queries and keys, a merged matrix, a soft cap.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench

D, HEADS, V, LAYERS, T = 32, 4, 61, 6, 22
IDS = torch.randint(V, (5, T), generator=torch.Generator().manual_seed(0))
SKIPS = (0.9, 0.7, 0.5)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotated(x):
    """The first half of the frequencies turns, the second half stands still."""
    frequencies = F.pad((1 / 1024) ** torch.linspace(0, 1, D // HEADS // 4), (0, D // HEADS // 4))
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)[None, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()), -1)


class Attention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.qkv_w = nn.Parameter(torch.randn(3, D, D) / D**0.5)
        self.lambdas, self.c_proj = (
            nn.Parameter(torch.tensor([0.5 + 0.05 * layer, 0.5 - 0.05 * layer])),
            nn.Linear(D, D, bias=False),
        )

    def forward(self, x, table):
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1)).view(*x.shape[:2], 3 * HEADS, -1).chunk(3, dim=-2)
        v = self.lambdas[0] * v if table is None else self.lambdas[0] * v + self.lambdas[1] * table.view_as(v)
        q, k, v = (t.transpose(1, 2) for t in (rotated(norm(q)), rotated(norm(k)), v))
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        self.pattern = (0.12 * q @ k.transpose(-1, -2)).masked_fill(future, float("-inf")).softmax(-1).detach()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attn, self.c_fc, self.c_proj = (
            Attention(layer),
            nn.Linear(D, 4 * D, bias=False),
            nn.Linear(4 * D, D, bias=False),
        )
        self.lambdas = nn.Parameter(torch.tensor([1.1, 0.2 + 0.03 * layer]))

    def forward(self, x, table, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(norm(x), table)
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.value_embeds = nn.Embedding(V, D), nn.ModuleList(nn.Embedding(V, D) for _ in range(2))
        self.blocks, self.lm_head = nn.ModuleList(map(Block, range(LAYERS))), nn.Linear(D, V, bias=False)
        self.skip_weights = nn.Parameter(torch.tensor(SKIPS))

    def forward(self, ids):
        tables, skips = [table(ids) for table in self.value_embeds], []
        x = x0 = norm(self.embed(ids))
        for i, block in enumerate(self.blocks):
            x = x + self.skip_weights[i - LAYERS // 2] * skips.pop() if i >= LAYERS // 2 else x
            x = block(x, [*tables, None, None, *tables][i], x0)
            skips += [x] if i < LAYERS // 2 else []
        return 30 * torch.sigmoid(self.lm_head(norm(x)) / (7.5 * D**0.5))


@torch.no_grad()
def test_lambdas_skips_and_attention_of_modded_nanogpt_are_found():
    module = Decoder().eval()
    observed = workbench.observe(module, IDS, quiet=True)
    assert torch.equal(observed(IDS), module(IDS))
    paths = observed.value_paths()
    paths = paths[paths["coefficient"].abs() > 1e-6]
    values = paths[paths["into"] == "value"].groupby(["layer", "source"])["coefficient"].first()
    for i, block in enumerate(module.blocks):
        own, table = block.attn.lambdas.tolist()
        assert values[i, "own"] == pytest.approx(own, abs=1e-6)
        if i not in (2, 3):
            assert values[i, f"table value_embeds.{i % 4}"] == pytest.approx(table, abs=1e-6)
    streams = paths[paths["into"] == "stream"].groupby(["layer", "source"])["coefficient"].first()
    assert streams.to_dict() == pytest.approx(
        {(3, "own"): 1 + SKIPS[0], (4, "own"): 1, (4, "block.1"): SKIPS[1], (5, "own"): 1, (5, "block.0"): SKIPS[2]},
        abs=1e-5,
    )
    rows = workbench.measure(observed, ["sink_mass", "loss"], IDS)
    sinks = rows[(rows["metric"] == "sink_mass") & rows["control"].isna()].groupby("layer")["value"].mean()
    module(IDS)
    assert sinks.tolist() == pytest.approx([float(b.attn.pattern[:, :, 1:, 0].mean()) for b in module.blocks], abs=1e-6)
    loss = F.cross_entropy(module(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert rows.loc[rows["metric"] == "loss", "value"].item() == pytest.approx(float(loss), abs=1e-5)
    assert "experts" not in observed.coverage, "a merged matrix of queries, keys and values is none of experts"
