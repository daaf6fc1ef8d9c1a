"""Learned depth weights from a checkpoint's small tensors: of ours and of three other code bases' generated files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_extremes import check

from workbench.checkpoints.coefficients import read_coefficients
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.models import build
from workbench.views import Link, Source
from workbench.views.depth_weights import checkpoint_coefficients

CONFIG = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 64, "d_vocab": 61, "n_ctx": 64}


def drawn(folder, **options):
    """The drawing of a link, whose figure must have the numbers of its table and no others."""
    drawing = checkpoint_coefficients(
        Source(folder), Link("depth", {key: str(value) for key, value in options.items()})
    )
    check(drawing.figure)
    marks = [t for t in drawing.figure.data if t.type == "heatmap" or "markers" in t.mode]
    values = np.concatenate([np.ravel(t.z if t.type == "heatmap" else t.y).astype(float) for t in marks])
    without_layer = (
        drawing.table["quantity"].isin(drawing.table.dropna(subset="layer")["quantity"]) & drawing.table["layer"].isna()
    )
    assert sorted(values[~np.isnan(values)]) == pytest.approx(sorted(drawing.table.loc[~without_layer, "value"]))
    return drawing


def assert_drawn(path):
    """The view of a path has the numbers of the command."""
    table = drawn(path.parent, path=path).table
    assert table[["quantity", "layer", "part", "value", "tensor"]].equals(read_coefficients(path).frame)


@pytest.fixture
def kimi(tmp_path):
    """Shards in the layout of Kimi K3: 3 layers of width 8, experts in a shard that holds no depth weight and is missing."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(torch.bfloat16)  # noqa: E731
    stem, of = "language_model.model", {}
    shards = {f"model-0000{n}-of-00003.safetensors": {} for n in (1, 2, 3)}
    first, second, experts = shards
    for layer in range(3):
        for part in ("self_attention", "mlp"):
            file = shards[first if layer < 2 else second]
            file[f"{stem}.layers.{layer}.{part}_res_norm.weight"] = random(8)
            file[f"{stem}.layers.{layer}.{part}_res_proj.weight"] = random(1, 8)
        shards[experts][f"{stem}.layers.{layer}.mlp.experts.0.w1.weight"] = random(64, 512)
    shards[second] |= {
        f"{stem}.output_attn_res_norm.weight": random(8),
        f"{stem}.output_attn_res_proj.weight": random(1, 8),
    }
    shards[first][f"{stem}.embed_tokens.weight"] = random(512, 64)
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
        of |= dict.fromkeys(tensors, name)
    (tmp_path / experts).unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"attn_res_block_size": 2}}))
    return tmp_path, shards


def test_attention_residuals_are_read_out_of_shards_through_the_index(kimi):
    folder, shards = kimi
    tensors = {name: tensor for file in shards.values() for name, tensor in file.items()}
    result = read_coefficients(folder)
    assert result.layout == "Kimi K3"
    assert result.frame["part"].tolist() == ["attention", "MLP"] * 3 + ["output"]
    stem = "language_model.model.layers.1.mlp_res"
    expected = tensors[f"{stem}_proj.weight"].double()[0] * tensors[f"{stem}_norm.weight"].double()
    torch.testing.assert_close(result.vectors["MLP 1"], expected)
    row = result.frame.query("layer == 1 and part == 'MLP'")
    assert row["value"].item() == pytest.approx(float(expected.norm()))
    files = sum(f.stat().st_size for f in folder.iterdir())
    assert result.bytes_read < 6000 < 60_000 < files, (
        "the embedding is not read, and the shard of the experts is not there"
    )
    assert "blocks of 2 layers" in result.notes[0]
    assert_drawn(folder)


def test_a_query_is_not_paired_with_the_gain_of_another_stack_of_layers(tmp_path):
    names = [f"{stem}.layers.0.mlp_res_{part}.weight" for stem in ("model", "model.mtp") for part in ("proj", "norm")]
    save_file({name: torch.ones(8) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="of one sublayer, of two stacks of layers"):
        read_coefficients(tmp_path)


def test_a_url_gives_the_same_numbers_from_ranges_of_bytes(kimi):
    fsspec = pytest.importorskip("fsspec")
    folder, _ = kimi
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/kimi/{path.name}", path.read_bytes())
    try:
        remote, local = read_coefficients("memory://kimi"), read_coefficients(folder)
    finally:
        memory.rm("/kimi", recursive=True)
    assert remote.frame.equals(local.frame)
    assert remote.bytes_read == local.bytes_read


def test_damaged_shards_are_refused(kimi):
    folder, _ = kimi
    file = folder / "model-00002-of-00003.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(BadCheckpoint, match="cut off"):
        read_coefficients(folder)
    file.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        read_coefficients(folder)
    tensors = {"language_model.model.layers.2.mlp_res_norm.weight": torch.ones(8)}
    save_file(tensors, file)
    with pytest.raises(BadCheckpoint, match="which the index names there"):
        read_coefficients(folder)


def numbers(frame, **where):
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame["value"].tolist()


def test_nanochat_and_modded_nanogpt_in_their_own_files(tmp_path):
    path = tmp_path / "model_000100.pt"
    gates = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    torch.save({
        "transformer.wte.weight": torch.zeros(61, 8), "resid_lambdas": torch.tensor([1.25, 1.5]), "x0_lambdas": torch.tensor([0.5, 0.0]),
        "backout_lambda": torch.tensor([0.25]), "transformer.h.1.attn.ve_gate.weight": gates, "transformer.h.0.attn.c_q.weight": gates,
    }, path)  # fmt: skip
    result = read_coefficients(path)
    assert result.layout == "nanochat"
    assert numbers(result.frame, quantity="resid_lambdas") == [1.25, 1.5]
    assert numbers(result.frame, quantity="x0_lambdas", layer=0) == [0.5]
    assert numbers(result.frame, quantity="ve_gate, norm", layer=1) == [5.0, 2.0]
    assert numbers(result.frame, quantity="backout_lambda") == [0.25]
    assert_drawn(path)

    path = tmp_path / "state_step000100.pt"
    weights = {
        "_orig_mod.blocks.0.lambdas": torch.tensor([1.0, 0.5]), "_orig_mod.blocks.0.attn.lambdas": torch.tensor([0.25, 0.75]),
        "_orig_mod.resid_lambdas": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "_orig_mod.scalars": torch.arange(3.0),
        "_orig_mod.blocks.0.mlp.c_fc.weight": torch.zeros(4, 4),
    }  # fmt: skip
    torch.save({"step": 100, "code": "x", "model": weights}, path)
    result = read_coefficients(path)
    assert result.layout == "modded-nanogpt"
    assert numbers(result.frame, quantity="lambdas", part="table") == [0.75]
    assert numbers(result.frame, quantity="lambdas", part="embedding") == [0.5]
    assert numbers(result.frame, quantity="resid_lambdas", layer=1, part="MLP") == [4.0]
    assert "numbered, not named" in result.notes[0]
    assert_drawn(path)

    weights = {  # of two streams: [layer, sublayer, stream]; names that a later version may have
        "post_lambdas": torch.arange(8.0).view(2, 2, 2), "scalars": torch.zeros(2), "mudd_b2": torch.zeros(2, 3),
        "blocks.0.attn.lamb": torch.tensor(0.25), "lm_head.weight": torch.zeros(4, 4), "skip_weights": torch.tensor([[1.0, -1.5, 0.5]] * 2),
    }  # fmt: skip
    torch.save({"step": 100, "code": "x", "model": weights}, path)
    result = read_coefficients(path)
    assert numbers(result.frame, quantity="post_lambdas", layer=1) == [4, 5, 6, 7]
    assert numbers(result.frame, quantity="post_lambdas", layer=0, part="MLP, stream 1") == [3]
    assert numbers(result.frame, quantity="lamb", part="other value; own: 1 less this") == [0.25]
    assert numbers(result.frame, quantity="skip_weights", part="1, 2") == [0.5], "by skip and channel"
    assert result.notes[0].endswith("like those of depth weights: mudd_b2.")
    assert "multiplies by their sigmoid" in result.notes[-1]


@pytest.mark.parametrize("architecture", ["resformer_learnable", "resformer_dense", "denseformer", "value_embedding"])
def test_our_numbers_are_those_of_the_model(architecture, tmp_path):
    model = build(architecture, CONFIG, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.numel() < 8:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    result = read_coefficients(tmp_path)
    assert result.layout == "workbench"
    (part,) = (p for p in model.shortcuts if p.coefficients())
    expected = [x for row in part.coefficients().values() for x in row if x == x]
    assert sorted(result.frame["value"]) == pytest.approx(sorted(expected))
    assert_drawn(tmp_path)
    if architecture == "resformer_learnable":
        assert numbers(result.frame, quantity="first", layer=2) == [pytest.approx(part.coefficients()["lambda_v1"][2])]


def test_averages_of_every_second_output_are_named_by_the_outputs_that_they_read(tmp_path):
    shape = CONFIG | {"n_layers": 4}
    for options, known in (({"dilation": 2}, True), ({"dilation": 3, "period": 4}, False)):
        model = build("denseformer", shape, seed=0, **options)
        with torch.no_grad():
            for alpha in model.shortcuts[0].alphas.values():
                alpha.weight.copy_(torch.arange(1.0, 1 + alpha.weight.numel()))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        if not known:  # a dilation of 3 and of 4 give the same shapes
            assert read_coefficients(tmp_path).frame["part"].tolist() == ["source 0, own last", "source 1, own last"]
            (tmp_path / "config.json").write_text(json.dumps({"workbench": {"options": options}}))
        alphas = model.shortcuts[0].coefficients()
        for row in read_coefficients(tmp_path).frame.itertuples():
            assert row.value == alphas[f"alpha_{row.part.removeprefix('output ')}"][row.layer]


def test_numbers_whose_layer_is_unknown_are_refused_and_a_single_later_layer_is_named(tmp_path):
    weights = {"transformer.h.0.attn.c_q.weight": torch.zeros(2, 2), "x0_lambdas": torch.zeros(2, 3)}
    torch.save(weights, tmp_path / "model_000100.pt")
    with pytest.raises(
        BadCheckpoint, match=r"x0_lambdas has the shape \[2, 3\], so which axis is the layer is unknown"
    ):
        read_coefficients(tmp_path / "model_000100.pt")
    save_file({"resformer_learnable.first": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read_coefficients(tmp_path).frame["layer"].tolist() == [1]


def test_our_attention_residuals(tmp_path):
    model = build("attention_residuals", CONFIG, seed=0)
    part = model.shortcuts[0]
    with torch.no_grad():
        part.queries["3"].fill_(0.5)
        part.gains["3"].fill_(2.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    result = read_coefficients(tmp_path)
    assert numbers(result.frame, layer=1, part="MLP") == [pytest.approx(32**0.5)]
    assert result.frame["part"].tolist()[-1] == "output"
    assert_drawn(tmp_path)
    assert not result.notes
    both = build("resformer_learnable+attention_residuals", CONFIG, seed=0)
    save_file(both.state_dict(), tmp_path / "model.safetensors")
    (note,) = read_coefficients(tmp_path).notes
    assert note.endswith("resformer_learnable.first, resformer_learnable.own.")


def test_other_names_are_refused_with_the_names_that_are_there(tmp_path):
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        BadCheckpoint, match=r"no depth weights under the names of Kimi K3.*it has model\.layers\.0\.self_attn"
    ):
        read_coefficients(tmp_path)
    save_file({"blocks.0.lambdas": torch.zeros(2048, 2048)}, Path(tmp_path) / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="which is no depth weight"):
        read_coefficients(tmp_path)


def test_a_link_draws_the_weights_of_two_models_beside_those_at_random_init(populated):
    both = {"weights": 1, "a": "text-denseformer-s0", "compare": 1, "b": "text-denseformer-s0", "step_b": 8}
    table = drawn(populated, **both).table
    a, b = (
        read_coefficients(populated / "text-denseformer-s0" / f"step_{step:06d}").frame["value"] for step in (20, 8)
    )
    assert table["value"].tolist() == [*a, *b, *(a - b)]
    one = drawn(populated, weights=1, a="text-denseformer-s0")
    first = read_coefficients(populated / "text-denseformer-s0" / "step_000000").frame["value"]
    assert one.table["init"].tolist() == first.tolist()
    with pytest.raises(WorkbenchError, match="drawn with weights=1"):
        checkpoint_coefficients(Source(populated), Link("depth"))
    with pytest.raises(WorkbenchError, match="Transformer · s0, step 20 has no learned depth weights"):
        drawn(populated, weights=1, a="text-transformer-s0")


@pytest.mark.parametrize("path", ["hf://moonshotai/Kimi-K3", "memory://kimi"])
def test_a_link_fetches_nothing(populated, path, monkeypatch):
    monkeypatch.setattr("workbench.checkpoints.coefficients.read_coefficients", lambda path: pytest.fail("it was read"))
    with pytest.raises(WorkbenchError, match=f"a page fetches nothing. In a terminal: workbench coefficients {path}"):
        drawn(populated, path=path)


@pytest.mark.parametrize("path", ["/dev/zero", "/nowhere", "\0", "~no such user/x", "/proc/self/mem", "a" * 5000])
def test_a_path_of_a_link_that_is_no_checkpoint_is_refused(populated, path):
    with pytest.raises(WorkbenchError):
        drawn(populated, path=path)
