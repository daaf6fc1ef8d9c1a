"""Files as other people's scripts leave them: Meta's layout, numbers and Namespaces beside weights, any prefix, any key."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign import IDS, SHAPE, llama_tensors, quietly
from safetensors.torch import save_file
from torch import nn

import workbench
from workbench.checkpoints.loading import read_state
from workbench.errors import BadCheckpoint, NotCovered

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "multiple_of": 16}


class Llama(nn.Module):
    """Meta's decoder: rotations of neighbouring columns as complex numbers (Touvron et al. 2023)."""

    def __init__(self, eps=1e-5, theta=10_000.0):
        super().__init__()
        d, kv = SIZES["dim"], SIZES["dim"] // 2
        self.eps, self.theta = eps, theta
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        block = lambda: nn.ModuleDict({  # noqa: E731
            "attention": nn.ModuleDict({"wq": linear(d, d), "wk": linear(d, kv), "wv": linear(d, kv), "wo": linear(d, d)}),
            "feed_forward": nn.ModuleDict({"w1": linear(d, 48), "w2": linear(48, d), "w3": linear(d, 48)}),
            "attention_norm": nn.RMSNorm(d), "ffn_norm": nn.RMSNorm(d),
        })  # fmt: skip
        self.tok_embeddings = nn.Embedding(SIZES["vocab_size"], d)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(d), linear(d, SIZES["vocab_size"])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p.ndim == 1))

    def rotated(self, x):
        width = x.shape[-1]
        angles = torch.arange(x.shape[1])[:, None] / self.theta ** (torch.arange(0, width, 2) / width)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(3)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        normed = lambda x, m: F.rms_norm(x, x.shape[-1:], m.weight, self.eps)  # noqa: E731
        for b in self.layers:
            a, h = b["attention"], normed(x, b["attention_norm"])
            q, k, v = (a[f"w{n}"](h).unflatten(-1, (-1, 8)) for n in "qkv")
            q, k, v = (y.transpose(1, 2) for y in (self.rotated(q), self.rotated(k), v))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            x = x + a["wo"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            f, h = b["feed_forward"], normed(x, b["ffn_norm"])
            x = x + f["w2"](F.silu(f["w1"](h)) * f["w3"](h))
        return self.output(normed(x, self.norm))


def metas_folder(model, folder):
    folder.mkdir()
    torch.save(model.state_dict() | {"rope.freqs": torch.ones(4)}, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(
        json.dumps(SIZES | {"vocab_size": -1, "norm_eps": model.eps, "rope_theta": model.theta})
    )
    return folder


def llama2_c(model, folder):
    folder.mkdir()
    saved = {
        "model": {f"_orig_mod.{n}": p for n, p in model.state_dict().items()},
        "model_args": SIZES | {"max_seq_len": 64},
    }
    torch.save(
        saved | {"optimizer": {}, "iter_num": 500, "best_val_loss": np.float64(2.0), "config": {}}, folder / "ckpt.pt"
    )
    return folder / "ckpt.pt"


def safetensors(model, folder):
    path = metas_folder(model, folder) / "consolidated.safetensors"
    (folder / "consolidated.00.pth").unlink()
    save_file(model.state_dict(), path)
    return path


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("form", [metas_folder, llama2_c, safetensors])
def test_metas_llama_layout_computes_what_metas_code_computes(form, tmp_path):
    model = Llama() if form is llama2_c else Llama(eps=1e-3, theta=500.0)
    loaded = quietly(form(model, tmp_path / "llama"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS), model(IDS), atol=1e-5, rtol=1e-5)
    assert loaded.source["format"] == "Llama"
    assert loaded.config.n_key_value_heads == 2
    assert (loaded.source["step"], loaded.config.n_ctx) == ((500, 64) if form is llama2_c else (None, 2048))


def test_metas_files_of_which_a_part_or_a_rotation_is_missing_are_refused(tmp_path):
    folder = metas_folder(Llama(), tmp_path / "llama")
    settings = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(settings | {"use_scaled_rope": True}))
    with pytest.raises(NotCovered, match="use_scaled_rope"):
        workbench.load(folder)
    (folder / "params.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"nothing says n_heads; give config="):
        workbench.load(folder)
    assert quietly(folder, config={"n_heads": 4}).config.n_ctx == 2048
    (folder / "consolidated.01.pth").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"one of 2 parts .*convert_llama_weights_to_hf\.py"):
        workbench.load(folder)


def test_numbers_namespaces_paths_and_arrays_beside_weights_are_read_without_their_code(tiny, tmp_path):
    model = tiny()
    settings = argparse.Namespace(**SHAPE, out=pathlib.Path("/a/b"), lr=np.float32(0.25))
    beside = {
        "args": settings, "best": np.float64(1.5), "iter": np.int64(500), "late": np.bool_(True), "big": np.dtype(">f8").type(3),
        "rng": np.random.default_rng(0).random(3), "objects": np.array([print], dtype=object)[:0], "texts": np.str_("a"),
        "more": types.SimpleNamespace(a=1), "sums": collections.defaultdict(dict, {1: {2: 3}}),
    }  # fmt: skip
    torch.save({"model": llama_tensors(model)} | beside, tmp_path / "c.pt")
    loaded = quietly(tmp_path / "c.pt")
    assert torch.equal(loaded(IDS), model(IDS))
    info = read_state(tmp_path / "c.pt")[1]
    assert (info.step, info.config) == (500, SHAPE | {"out": "/a/b", "lr": 0.25})


PROGRAMS = {
    "TorchScript": (
        lambda m, path: torch.jit.save(torch.jit.trace(m, IDS), path),
        lambda path, out: torch.save(torch.jit.load(path).state_dict(), out),
    ),
    "exported": (
        lambda m, path: torch.export.save(torch.export.export(m, (IDS,)), path),
        lambda path, out: torch.save(torch.export.load(path).state_dict, out),
    ),
}


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_named_and_the_advice_gives_weights_that_open(kind, tmp_path):
    module = Llama().eval()
    save, follow = PROGRAMS[kind]
    save(module, str(tmp_path / "program.pt2"))
    with pytest.raises(BadCheckpoint, match=f"{kind} program .*not weights alone"):
        workbench.load(tmp_path / "program.pt2")
    follow(str(tmp_path / "program.pt2"), tmp_path / "out.pt")
    tensors, _ = read_state(tmp_path / "out.pt")
    assert all(torch.equal(tensors[n], p) for n, p in module.state_dict().items())


def test_another_archive_is_not_called_damaged(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    with pytest.raises(BadCheckpoint, match=r"ZIP archive without the data\.pkl .*it holds x\.npy"):
        workbench.load(tmp_path / "a.npz")


@pytest.mark.parametrize("prefix", ["model.llm."])
def test_any_prefix_is_named_and_comes_off_where_it_is_given(tiny, tmp_path, prefix):
    model, other = tiny(), {"value_head.weight": torch.ones(2)}
    torch.save({f"{prefix}{n}": t for n, t in llama_tensors(model).items()} | other, tmp_path / "c.pt")
    with pytest.raises(BadCheckpoint, match=rf"strip_prefix='{prefix}' \(workbench import --strip-prefix {prefix}\)"):
        workbench.load(tmp_path / "c.pt", config=SHAPE)
    loaded = quietly(tmp_path / "c.pt", config=SHAPE, strip_prefix=prefix)
    assert torch.equal(loaded(IDS), model(IDS))
    assert loaded.source["stripped"] == [prefix]
    with pytest.raises(BadCheckpoint, match=r"no tensor's name begins with 'nett\.'"):
        workbench.load(tmp_path / "c.pt", strip_prefix="nett.")


@pytest.mark.slow
def test_weights_below_another_key_are_read_where_it_is_named(tiny, tmp_path):
    student, teacher = tiny(seed=1), tiny(seed=2)
    nets = {"student": llama_tensors(student), "teacher": llama_tensors(teacher)}
    torch.save({"nets": nets, "config": SHAPE, "step": 7}, tmp_path / "c.pt")
    with pytest.raises(BadCheckpoint, match=r"it has nets, config, step\. .*key='nets\.student' for a key in a key"):
        workbench.load(tmp_path / "c.pt")
    for name, model in (("student", student), ("teacher", teacher)):
        loaded = quietly(tmp_path / "c.pt", key=f"nets.{name}")
        assert torch.equal(loaded(IDS), model(IDS))
        assert loaded.source["step"] == 7
    with pytest.raises(BadCheckpoint, match=r"no 'studen' there; did you mean student\?"):
        workbench.load(tmp_path / "c.pt", key="nets.studen")
