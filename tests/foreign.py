"""Files of other trainings, written by the libraries themselves where they are here, else in the shape those give them."""

from __future__ import annotations

import io
import math
import re
import warnings
import zipfile

import torch
import torch.nn.functional as F
from torch import nn

import workbench
from workbench.checkpoints.tensor_and_setting_names import llama_name
from workbench.errors import ArchitectureAssumed

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
SHAPE = {"n_heads": 4, "n_ctx": 128, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))


def llama_tensors(model):
    """A model's state dict with a Llama's names."""
    return {llama_name(name): p.detach().clone() for name, p in model.named_parameters()}


def adam_of(model):
    """A real optimizer state after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    sum((p**2).sum() for p in model.parameters()).backward()
    state = torch.optim.AdamW(model.parameters())
    state.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        kept = [p.clone() for p in model.parameters()]
        state.step()
        for p, old in zip(model.parameters(), kept, strict=True):
            p.copy_(old)
            p.grad = None
    return state.state_dict()


def nanogpt(model, **changes):
    """What nanoGPT's train.py saves, around any module."""
    settings = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 128, "vocab_size": 61, "dropout": 0.0}
    return {
        "model": llama_tensors(model), "optimizer": adam_of(model), "model_args": settings, "iter_num": 500,
        "best_val_loss": torch.tensor(3.5), "config": {"batch_size": 12, "learning_rate": 6e-4},
    } | changes  # fmt: skip


class GPT(nn.Module):
    """A plain GPT-2 in a dozen lines, tensors named as nanoGPT names them."""

    def __init__(self, *, bias, mask=False):
        super().__init__()
        d, self.heads = 32, 4
        block = lambda: nn.ModuleDict({  # noqa: E731
            "ln_1": nn.LayerNorm(d, bias=bias), "ln_2": nn.LayerNorm(d, bias=bias),
            "attn": nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d, bias=bias), "c_proj": nn.Linear(d, d, bias=bias)}),
            "mlp": nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d, bias=bias), "c_proj": nn.Linear(4 * d, d, bias=bias)}),
        })  # fmt: skip
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(61, d),
                "wpe": nn.Embedding(64, d),
                "h": nn.ModuleList(block() for _ in range(2)),
                "ln_f": nn.LayerNorm(d, bias=bias),
            }
        )
        self.lm_head = nn.Linear(d, 61, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for part in self.transformer["h"] if mask else ():
            part["attn"].register_buffer("bias", torch.ones(64, 64).tril().view(1, 1, 64, 64))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=generator))

    def forward(self, ids):
        t, h = self.transformer, self.heads
        x = t["wte"](ids) + t["wpe"](torch.arange(ids.shape[1]))
        for block in t["h"]:
            q, k, v = (
                z.unflatten(-1, (h, -1)).transpose(1, 2)
                for z in block["attn"]["c_attn"](block["ln_1"](x)).chunk(3, dim=-1)
            )
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
            z = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
            x = x + block["attn"]["c_proj"](z.transpose(1, 2).flatten(-2))
            x = x + block["mlp"]["c_proj"](F.gelu(block["mlp"]["c_fc"](block["ln_2"](x))))
        return self.lm_head(t["ln_f"](x))


def gpt2_args(**changes):
    """nanoGPT's `model_args` of `GPT`."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": 61}
    return sizes | {"bias": True, "dropout": 0.1} | changes


def rezipped(data, change):
    """A PyTorch archive with `change(name, bytes)` made of each record and checksums that are right again.

    Without the version from which on PyTorch works out where records begin instead of looking: here they begin elsewhere.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in (i for i in old.infolist() if not i.filename.endswith(".format_version")):
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return out.getvalue()


def hugging_face(kind=None, config=None, **changes):
    """A small model of transformers, a Llama unless its class and config are given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return (kind or LlamaForCausalLM)((config or LlamaConfig)(**SIZES | changes)).eval()


def quietly(path, **settings):
    """Loaded without the warning that its architecture is assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)
        return workbench.load(path, **settings)


def same(model, logits):
    torch.testing.assert_close(model(IDS), logits, atol=1e-5, rtol=1e-5)


EXAMPLE = '''"""Files of the example code base: {params, iteration, shape}.

Source: an example.
"""

from workbench.checkpoints.format import Format

FORMAT = Format(
    name="example", keys=("params", "iteration"), weights="params", step="iteration", config="shape",
    settings={"width": "d_model", "depth": "n_layers", "heads": "n_heads", "length": "n_ctx"},
    tensors={
        "tokens": "embed.weight", "norm": "ln_final.weight", "head": "unembed.weight",
        "layer.*.norm_1": "blocks.*.ln1.weight", "layer.*.norm_2": "blocks.*.ln2.weight",
        "layer.*.q": "blocks.*.attn.q_proj.weight", "layer.*.k": "blocks.*.attn.k_proj.weight",
        "layer.*.v": "blocks.*.attn.v_proj.weight", "layer.*.o": "blocks.*.attn.o_proj.weight",
        "layer.*.gate": "blocks.*.mlp.gate_proj.weight", "layer.*.up": "blocks.*.mlp.up_proj.weight",
        "layer.*.down": "blocks.*.mlp.down_proj.weight",
    },
)  # fmt: skip
'''
"""A code base's form as one more file in the folder of formats."""


def example_container(model):
    """What that code base saves of a model: its names come from its own table."""
    exec(EXAMPLE, made := {})
    theirs, config = {ours: name for name, ours in made["FORMAT"].tensors.items()}, model.config
    params = {}
    for name, p in model.named_parameters():
        layer = next(iter(re.findall(r"\.(\d+)\.", name)), "")
        params[theirs[name.replace(f".{layer}.", ".*.")].replace("*", layer)] = p.detach()
    shape = {"width": config.d_model, "depth": config.n_layers, "heads": config.n_heads, "length": config.n_ctx}
    return {"params": params, "iteration": 7, "shape": shape}
