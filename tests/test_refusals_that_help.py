"""What can be read is not refused, and what cannot is refused by its cause and with what works instead."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from foreign import hugging_face
from observed import see
from strangers import GPT, VOCABULARY, D, causal, large, split
from torch import nn

import workbench
from workbench.errors import BadCheckpoint, ObservedInstead, WorkbenchError
from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of
from workbench.runs.checkpoint_import import import_run

IDS = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))


def later(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)


MASKS = {
    "-1000 beside the call": lambda q, k, v, i: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.zeros(later(q).shape).masked_fill(later(q), -1000.0)
    ),
    "-1000 in place of a score": lambda q, k, v, i: (
        ((q @ k.mT) * 8**-0.5).masked_fill(later(q), -1000.0).softmax(-1) @ v
    ),
    "-10000 on top of a score": lambda q, k, v, i: ((q @ k.mT) * 8**-0.5 - 1e4 * later(q)).softmax(-1) @ v,
}


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("attend", MASKS.values(), ids=list(MASKS))
def test_a_mask_need_not_be_infinite(attend):
    observed = see(large(GPT(attend=attend)), IDS)
    plain = see(large(GPT()), IDS)
    name = "blocks.2.attn.hook_row_entropy"
    one, other = (m.run_with_cache(IDS, names_filter=name)[1][name] for m in (observed, plain))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert {layer.attention.mask for layer in observed.structure.layers} == {"causal"}


def test_a_softmax_at_the_side_does_not_hide_the_decoder():
    class Pooled(GPT):
        def forward(self, idx):
            x = self.transformer.wte(idx)
            return super().forward(idx)[0] + ((x @ x.mT).softmax(-1) @ x).mean()

    observed = see(large(Pooled()), IDS)
    assert [layer.block for layer in observed.structure.layers] == [f"transformer.h.{i}" for i in range(3)]


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("eager", [False, True])
def test_the_kind_of_mask_is_that_of_the_call(eager):
    """Looked at with 40 tokens, of which a window of 50 hides nothing; read with 60."""

    def windowed(q, k, v, layer):
        at = torch.arange(q.shape[2])
        mask = (at[:, None] >= at) & (at[:, None] - at < 50)
        if eager:
            return (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    observed = see(large(GPT(attend=windowed)), IDS)
    longer = torch.cat((IDS, IDS[:, :20]), 1)
    names = [f"blocks.1.attn.hook_{n}" for n in ("q", "k", *STATISTICS)]
    _, cache = observed.run_with_cache(longer, names_filter=names)
    q, k = (cache[f"blocks.1.attn.hook_{n}"].double() for n in "qk")
    at = torch.arange(60)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    scores = scores.masked_fill((at[:, None] < at) | (at[:, None] - at >= 50), -torch.inf)
    wanted = statistics_of(scores, scores.softmax(-1))
    for statistic in STATISTICS:
        found = cache[f"blocks.1.attn.hook_{statistic}"].double()
        torch.testing.assert_close(found, getattr(wanted, statistic), atol=2e-5, rtol=1e-5, msg=statistic)
    with pytest.raises(WorkbenchError, match="read hook_pattern or the statistics"):
        observed.run_with_cache(longer, names_filter="blocks.1.attn.hook_rot_q")


class MoreArguments(GPT):
    def forward(self, idx, positions):
        return super().forward(idx)[0]


class Channels(nn.Module):
    """Passes the stream as [batch, d_model, pos]."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x):
            z = causal(*(split(y) for y in self.qkv(x.mT).chunk(3, -1)))
            return x + self.out(z.transpose(1, 2).flatten(2)).mT

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, D), nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        x = self.embed(idx).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mT)


MODULES = {
    "more arguments": (lambda: large(MoreArguments()), r"cannot be called with ids alone .*'positions'.* call="),
    "another layout": (
        lambda: large(Channels()),
        r"where it is one, have it take and return the stream in that layout",
    ),
    "meta": (lambda: GPT().to("meta"), r"transformer.wte.weight is on the meta device"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_refused_with_what_would_work(name):
    make, cause = MODULES[name]
    with pytest.raises(WorkbenchError, match=cause):
        see(make(), IDS)


FILES = {
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(64), r"GGUF file.*(gguf_file=|llama-quantize)"),
    "model.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        r"pointer of Git LFS.*git lfs pull",
    ),
    "model.pt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"pointer of Git LFS.*git lfs pull"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_sound_file_of_another_kind_is_not_called_damaged(tmp_path, name):
    content, cause = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=cause):
        workbench.load(tmp_path / name)


def test_a_trainers_folder_with_a_final_model_asks_which_is_meant(tmp_path):
    for folder in ("out", "out/checkpoint-10", "out/checkpoint-20"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    with pytest.raises(WorkbenchError, match=r"beside the steps checkpoint-10, checkpoint-20: give '.*checkpoint-\*'"):
        import_run(tmp_path / "out", tmp_path / "runs")


def test_code_beside_a_model_that_transformers_has_itself_is_left_alone(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    module = hugging_face(Qwen2ForCausalLM, Qwen2Config)
    module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = config | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.warns(ObservedInstead, match="Qwen2ForCausalLM"):
        model = workbench.load(tmp_path)
    assert torch.equal(model(IDS), module(IDS).logits)
    (tmp_path / "config.json").write_text(json.dumps(own | {"model_type": "mine"}))
    with pytest.raises(BadCheckpoint, match=r"auto_map.*never run"):
        workbench.load(tmp_path)
