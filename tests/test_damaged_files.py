"""Files that cannot be opened are refused with the cause and run nothing; those that can take no more memory than their weights."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from foreign import IDS, hugging_face, llama_tensors, nanogpt, quietly, rezipped
from transformers import GPT2Config, GPT2LMHeadModel

import workbench
from workbench.checkpoints.loading import read_state
from workbench.checkpoints.paths import CONFIG
from workbench.checkpoints.saving import save
from workbench.errors import BadCheckpoint


class Payload:
    """A pickle that touches a file when it is opened the unsafe way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda p: {"model": {"a": torch.ones(2)}, "config": Payload(p)},
            r"would have to run code to be opened: it holds .*and open OUT$",
        ),
        (
            lambda p: torch.nn.Linear(2, 2),
            r"whole pickled module \(torch\.nn\.modules\.linear\.Linear\).*state_dict\(\)",
        ),
        (lambda p: {"metrics": {"loss": 1.0}}, "no state dict under model, state_dict.*it has metrics"),
        (
            lambda p: {"model": {"a": torch.ones(2), "b": torch.ones(2), "c": 3}},
            "'c' among the weights is no tensor but a int",
        ),
    ],
)
def test_pickles_are_refused_with_the_cure_and_run_nothing(tmp_path, make, told):
    file, ran = tmp_path / "ckpt.pt", tmp_path / "ran"
    torch.save(make(ran), file)
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(file)
    assert not ran.exists()


def test_a_bare_pickle_is_refused_and_runs_nothing(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(BadCheckpoint, match="a Python pickle, which could run code"):
        workbench.load(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_a_user_allows_by_name_is_read(tmp_path, tiny):
    torch.save(nanogpt(tiny(), config=Fraction(1, 2), args=argparse.Namespace(lr=1)), tmp_path / "ckpt.pt")
    with torch.serialization.safe_globals([Fraction]):
        assert torch.equal(quietly(tmp_path / "ckpt.pt")(IDS), tiny()(IDS))
    with pytest.raises(BadCheckpoint, match=r"it holds fractions\.Fraction\."):
        workbench.load(tmp_path / "ckpt.pt")


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("mp_rank_00_model_states.pt", "DeepSpeed shards.*zero_to_fp32"),
        ("__0_0.distcp", "FSDP.*dcp_to_torch {at} OUT.pt.*merge-weights {at} OUT"),
        ("model_and_optim/__0_0.distcp", "OLMo-core's shards.*convert_checkpoint_to_hf.*-path {at} "),
        ("lit_model.pth", "LitGPT model.*convert_from_litgpt {at} OUT"),
        ("model.gguf", "GGUF file.*gguf_file="),
    ],
)
def test_shards_of_other_libraries_are_refused_with_the_cure(tmp_path, file, told):
    folder = tmp_path / "out" / "step-10"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_bytes(b"GGUF" if file.endswith("gguf") else b"")
    told = told.format(at=folder)
    files = [folder / file, (folder / file).parent] if file.endswith(("distcp", "lit_model.pth")) else []
    for place in (folder, folder.parent, tmp_path, *files):
        with pytest.raises(BadCheckpoint, match=told):
            workbench.load(place)
    (folder / CONFIG).write_text("{}")
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(folder)


def test_the_command_named_for_shards_makes_a_file_that_opens(tmp_path, tiny):
    import torch.distributed.checkpoint as shards
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings(action="ignore"):  # PyTorch's, of a single process
        shards.save({"model": tiny().state_dict()}, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(BadCheckpoint, match="dcp_to_torch"):
        workbench.load(tmp_path / "step-1")
    dcp_to_torch_save(tmp_path / "step-1", tmp_path / "OUT.pt")
    read, _ = workbench.read_state(tmp_path / "OUT.pt")
    assert all(torch.equal(read[name], tensor) for name, tensor in tiny().state_dict().items())


@pytest.mark.slow
def test_a_gguf_file_beside_weights_is_no_obstacle(tmp_path, tiny):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    torch.save(nanogpt(tiny()), tmp_path / "ckpt.pt")
    assert torch.equal(quietly(tmp_path)(IDS), tiny()(IDS))


@pytest.mark.slow
def test_a_bit_that_flipped_in_a_pickled_file_is_found(tmp_path, tiny):
    file = tmp_path / "ckpt.pt"
    torch.save(nanogpt(tiny()), file)
    data = bytearray(file.read_bytes())
    place = data.index(tiny().embed.weight.detach().numpy().tobytes()[:64]) + 40
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"Bad CRC-32.*copy it again"):
        quietly(file)


@pytest.mark.parametrize("cut", [1, 5000])
def test_files_that_were_cut_off_are_refused(tmp_path, tiny, cut):
    file = tmp_path / "ckpt.pt"
    torch.save(nanogpt(tiny()), file)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(BadCheckpoint, match="begins as a ZIP archive"):
        workbench.load(file)


def test_a_tensor_that_claims_more_bytes_than_the_file_has_is_refused_before_memory_is_spent(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(40)}, file)
    huge = (10**9).to_bytes(4, "little")

    def change(name, data):
        return data.replace(b"K\x28\x85", b"J" + huge + b"\x85") if name.endswith("data.pkl") else data

    file.write_bytes(rezipped(file.read_bytes(), change))
    with pytest.raises(BadCheckpoint, match="damaged"):
        read_state(file)


def test_files_of_before_pytorch_1_6_are_refused_with_the_cure(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.arange(40.0)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(BadCheckpoint, match=r"before 1\.6.*torch\.save\(torch\.load\(path, weights_only=True\), OUT\)"):
        read_state(file)
    torch.save(torch.load(file, weights_only=True), file)
    assert torch.equal(read_state(file)[0]["a"], torch.arange(40.0))


def test_a_record_of_an_archive_that_claims_gigabytes_is_refused_before_memory_is_spent(tmp_path):
    """The length of `version` in the archive's table of contents, which PyTorch reads first."""
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    entry = data.rfind(b"a/version") - 46  # of the table of contents
    assert data[entry : entry + 4] == b"PK\1\2"
    data[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(
        BadCheckpoint, match=r"^\S+ is damaged: a/version would take 4294967294 bytes, and the whole file has \d+; copy"
    ):
        workbench.load(tmp_path / "a.pt")


def test_an_archive_that_somebody_packed_again_is_read_or_told_apart_from_a_damaged_one(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.arange(40.0)}, file)
    data = file.read_bytes()
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", method) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
        if method == zipfile.ZIP_STORED:
            assert torch.equal(read_state(file)[0]["a"], torch.arange(40.0))
    with pytest.raises(BadCheckpoint, match=r"packed again by a program that compresses: .*zip -0"):
        read_state(file)


def test_a_tensor_that_repeats_itself_beyond_its_file_is_refused_before_memory_is_spent(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1).expand(10**12)}, file)
    with pytest.raises(BadCheckpoint, match="would take 4000000000000 bytes, and the whole file has"):
        read_state(file)


@pytest.mark.parametrize("ours", [True, False])
def test_weights_that_make_no_finite_logits_are_refused_by_name(tmp_path, tiny, ours):
    """3e38 is a float32, and its square is none."""
    name = "model.layers.1.mlp.up_proj.weight" if ours else "transformer.h.0.mlp.c_fc.weight"
    model = tiny() if ours else hugging_face(GPT2LMHeadModel, GPT2Config, bos_token_id=0, eos_token_id=0)
    with torch.no_grad():
        (model.blocks[1].mlp.up_proj.weight if ours else model.get_parameter(name))[3, 2] = -3e38
    if ours:
        save(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    with pytest.raises(BadCheckpoint, match=rf"{name} holds 3e\+38, of which logits become NaN or infinite"):
        quietly(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**9}, "n_layers=1000000000, but there are only 21 tensors"),
        ({"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 4.0}}, "contradicts itself: rope_theta is 3.0"),
        ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1\."),
        ({"hidden_size": 10**12, "head_dim": None}, "no transformer can be built with|wanted"),
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves_or_their_tensors_are_refused(tmp_path, changes, told):
    hugging_face().save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "null"])
def test_endless_and_empty_configs_are_refused(tmp_path, text):
    hugging_face().save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"config\.json (cannot be read|holds a)"):
        workbench.load(tmp_path)


def test_a_path_that_is_not_there_names_its_neighbours(tmp_path):
    (tmp_path / "ckpt_500.pt").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"ckpt_600\.pt does not exist; did you mean ckpt_500\.pt"):
        workbench.load(tmp_path / "ckpt_600.pt")
    with pytest.raises(BadCheckpoint, match="damaged or no PyTorch checkpoint"):
        workbench.load(tmp_path / "ckpt_500.pt")


# ---- memory ----------------------------------------------------------------------------------------------------------

OPEN = """
import sys, warnings
warnings.simplefilter("ignore")
import workbench
from pathlib import Path
def kb(key):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])
settings = {"config": {"n_heads": 4, "n_ctx": 128}, "architecture": "transformer"}
small, *large = sys.argv[1:]
kept = []  # so that the memory of no model is used again
for path in (small, small + ".pt"):
    workbench.load(path, **settings)
for path in large:
    Path("/proc/self/clear_refs").write_text("5")
    before = kb("VmRSS")
    kept.append(workbench.load(path, **settings))
    print((kb("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
@pytest.mark.slow
def test_opening_takes_the_memory_of_the_weights_and_no_more(tmp_path, tiny):
    """Peak resident memory in a fresh process against the file's bytes, at most 1.1 times."""
    size = {"n_layers": 3, "d_model": 512, "d_mlp": 1536, "d_vocab": 12_000}
    for name, model in {"small": tiny(), "large": tiny(config=size)}.items():
        save(model, tmp_path / name)
        torch.save(llama_tensors(model), tmp_path / f"{name}.pt")
    done = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "small", tmp_path / "large", tmp_path / "large.pt"],
        capture_output=True, text=True, timeout=560, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = (tmp_path / "large" / "model.safetensors", tmp_path / "large.pt")
    for file, peak in zip(files, done.stdout.split(), strict=True):
        ratio = int(peak) / file.stat().st_size
        assert 0.9 < ratio < 1.1, f"{file.name}: {ratio:.3f}"


def test_a_shard_that_is_a_link_out_of_its_folder_is_refused(tmp_path):
    """The Hub's cache keeps all files in `blobs`; any other place is not the checkpoint's."""
    hugging_face().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shard = next(iter(sorted((tmp_path / "model").glob("model-*.safetensors"))))
    for where, fits in (("blobs", True), ("private", False)):
        (tmp_path / where).mkdir()
        target = shard.resolve().rename(tmp_path / where / "0123")
        shard.unlink(missing_ok=True)
        shard.symlink_to(target)
        if fits:
            quietly(tmp_path / "model")
        else:
            with pytest.raises(BadCheckpoint, match=r"a link to .* outside its folder; copy that file there"):
                quietly(tmp_path / "model")
