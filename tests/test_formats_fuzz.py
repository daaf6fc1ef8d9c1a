"""Damaged files of every form: nothing but our named errors comes out of them, quickly, and nothing in them is ever run."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from foreign import GPT, adam_of, gpt2_args, llama_tensors, nanogpt, rezipped

import workbench
from workbench.checkpoints import transformers_modules
from workbench.checkpoints.identify import CONFIG, WEIGHTS
from workbench.checkpoints.opening import read_state
from workbench.checkpoints.saving import save
from workbench.checkpoints.vocabulary import load_tokenizer
from workbench.data.corpus import from_files
from workbench.data.sources import read_tokens
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import WorkbenchError
from workbench.runs.run import Run

ROUNDS = 40  # of each form; 600 were tried once
SHAPE = {"n_heads": 4, "n_ctx": 128}
RUNNING = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
}
heard: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def listening():
    """Python's own audit of what is started while files are read; such a hook cannot be taken away, only ignored."""
    on = [True]

    def hook(event, _):
        if on[0] and event in RUNNING:
            heard.append(event)

    sys.addaudithook(hook)
    yield
    on[0] = False


def mutated(data, chance):
    """A file with flipped bits, a lost end, lost, added or overwritten bytes; half of the time in its first part."""
    out = bytearray(data)
    place = chance.randrange(min(len(out), 3000) if chance.random() < 0.5 else len(out))
    kind = chance.choice(["flip", "flip", "cut", "insert", "delete", "zero", "large"])
    if kind == "flip":
        for _ in range(chance.choice([1, 3, 20])):
            out[chance.randrange(place + 1)] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del out[place:]
    elif kind == "insert":
        out[place:place] = chance.randbytes(chance.randrange(1, 9))
    elif kind == "delete":
        del out[place : place + chance.randrange(1, 50)]
    else:
        out[place : place + 4] = b"\0\0\0\0" if kind == "zero" else chance.choice([b"\xff" * 4, b"\x7f" * 4, b"9999"])
    return bytes(out)


def in_pickle(data, chance):
    """The same archive with a damaged pickle whose checksum is right."""
    return rezipped(data, lambda name, part: mutated(part, chance) if name.endswith("data.pkl") else part)


def in_header(data, chance):
    """safetensors with a damaged header of the right length."""
    length = int.from_bytes(data[:8], "little")
    return data[:8] + mutated(data[8 : 8 + length], chance)[:length].ljust(length) + data[8 + length :]


def in_values(data, chance):
    """JSON with a value of the wrong kind or size, or a key gone."""
    values = json.loads(data)
    key = chance.choice(list(values))
    values[key] = chance.choice(
        [None, -1, 0, 10**12, 1e308, "x", [], {}, [values[key]], True, {"rope_type": 3}, "../x"]
    )
    if chance.random() < 0.2:
        del values[key]
    return json.dumps(values).encode()


def directory(tiny, folder):
    save(tiny(), folder)
    return folder / WEIGHTS, folder


def undeclared(tiny, folder):
    save(tiny("denseformer"), folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(
        json.dumps({k: v for k, v in config.items() if k != "workbench"} | {"model_type": "llama"})
    )
    return folder / CONFIG, folder


def declared(tiny, folder):
    save(tiny("resformer"), folder)
    return folder / CONFIG, folder


def sharded(tiny, folder):
    save(tiny(), folder)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(llama_tensors(tiny()), "a.safetensors")}))
    return index, folder


def pickled(tiny, folder):
    save(tiny(), folder)
    (folder / WEIGHTS).unlink()
    torch.save(llama_tensors(tiny()), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin", folder


def single(container, **how):
    def make(tiny, folder):
        file = folder / "ckpt.pt"
        torch.save(container(tiny()), file, **how)
        return file, file

    return make


def foreign(tiny, folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder / CONFIG, folder


LOADED = {
    "safetensors": (directory, mutated),
    "safetensors header": (directory, in_header),
    "config": (declared, mutated),
    "values of a config": (declared, in_values),
    "values of a Llama's config": (undeclared, in_values),
    "index": (sharded, mutated),
    "values of an index": (sharded, in_values),
    "pytorch_model.bin": (pickled, mutated),
    "nanoGPT": (single(nanogpt), mutated),
    "nanoGPT's pickle": (single(nanogpt), in_pickle),
    "nanoGPT's GPT-2": (single(lambda m: {"model": GPT(bias=True).state_dict(), "model_args": gpt2_args()}), in_pickle),
    "Lightning's pickle": (single(lambda m: {"state_dict": llama_tensors(m), "global_step": 3, "hyper_parameters": SHAPE}), in_pickle),
    "modded-nanogpt": (single(lambda m: {"step": 3, "code": "", "model": llama_tensors(m), "optimizers": [adam_of(m)]}), in_pickle),
    "before PyTorch 1.6": (single(nanogpt, _use_new_zipfile_serialization=False), mutated),
    "values of another library's config": (foreign, in_values),
}  # fmt: skip


def survives(act, file, data):
    """Whether a damaged file was read all the same; anything but a named error goes through."""
    file.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act()
        except WorkbenchError as error:
            if not str(error):
                raise AssertionError("a refusal without a word") from error
            return False
    return True


@pytest.mark.parametrize("form", LOADED)
@pytest.mark.slow
def test_damaged_checkpoints_load_or_are_refused_by_name(tiny, tmp_path, form, monkeypatch):
    # what would be observed is sound; observing it has tests of its own
    seen = SimpleNamespace(source={}, config=SimpleNamespace(d_vocab=61))
    monkeypatch.setattr(transformers_modules, "observe", lambda module, ids, **_: seen)
    make, damage = LOADED[form]
    file, path = make(tiny, tmp_path)
    good, chance = file.read_bytes(), random.Random(form)
    rounds = ROUNDS // 4 if make in (foreign, undeclared) else ROUNDS  # these take longest
    read = [survives(lambda: workbench.load(path, config={}), file, damage(good, chance)) for _ in range(rounds)]
    assert not all(read), "the damage does nothing"
    assert not heard


@pytest.mark.slow
def test_damaged_files_of_modules_to_be_filled_are_refused_by_name(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(3, 4).T, "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(1)}, file)
    good, chance = file.read_bytes(), random.Random(0)
    for damage in (mutated, in_pickle):
        read = [survives(lambda: read_state(file), file, damage(good, chance)) for _ in range(2 * ROUNDS)]
        assert not all(read)
    assert not heard


SIDE = {
    "tokenizer": (lambda f: train_tokenizer(["the cat sat on the mat " * 20], 270).save(f), "tokenizer.json", load_tokenizer),
    "JSON Lines": (
        lambda f: f.write_text("\n".join(json.dumps({"text": f"{i} words " * 200}) for i in range(40))),
        "rows.jsonl", lambda f: from_files([f]),
    ),
    "Parquet": (
        lambda f: pd.DataFrame({"text": [" ".join(f"w{i * j}" for j in range(300)) for i in range(40)]}).to_parquet(f),
        "rows.parquet", lambda f: from_files([f]),
    ),
    "token ids": (lambda f: np.arange(4000, dtype="<u2").tofile(f), "ids.bin", lambda f: read_tokens(f, 4000)),
    "run.json": (
        lambda f: f.write_text(json.dumps({
            "architecture": "resformer", "seed": 0,
            "model": {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_mlp": 8, "d_vocab": 9, "n_ctx": 8},
            "train": {"steps": 2, "batch": 1, "T": 4}, "data": {"kind": "imported"},
        })),
        "run.json", lambda f: Run.open(f.parent),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SIDE)
@pytest.mark.slow
def test_damaged_files_beside_checkpoints_are_read_or_refused_by_name(tmp_path, form):
    write, name, act = SIDE[form]
    file = tmp_path / name
    write(file)
    good, chance = file.read_bytes(), random.Random(form)
    read = [survives(lambda: act(file), file, mutated(good, chance)) for _ in range(ROUNDS)]
    assert not all(read), "the damage does nothing"
    assert not heard


HOSTILE = {
    "os.system": b"cos\nsystem\n(S'touch {ran}'\ntR.",
    "eval": b'cbuiltins\neval\n(S\'open("{ran}", "w")\'\ntR.',
    "a class's __setstate__": b"ccollections\nCounter\n)R(S'x'\nlb.",
    "a module's attribute": b"ctorch.serialization\nload\n(S'{ran}'\ntR.",
    "a doubled list, 2 to the 40th": b"(lq\x00" + b"".join(b"(h%ch%clq%c" % (i, i, i + 1) for i in range(40)) + b".",
    "a text of 2 to the 62nd": b"\x8d" + (2**62).to_bytes(8, "little") + b"x.",
    "a depth of 10,000": b"(" * 10_000 + b"t" * 10_000 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("where", ["alone", "in an archive", "in a directory"])
def test_hostile_pickles_are_refused_and_run_nothing(tmp_path, name, where):
    ran, file = tmp_path / "ran", tmp_path / ("pytorch_model.bin" if where == "in a directory" else "ckpt.pt")
    payload = HOSTILE[name].replace(b"{ran}", os.fsencode(ran))
    torch.save({"a": torch.ones(2)}, file)
    if where == "alone":
        file.write_bytes(payload)
    else:
        data = rezipped(file.read_bytes(), lambda part, held: payload if part.endswith("data.pkl") else held)
        file.write_bytes(data)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(WorkbenchError):
        workbench.load(tmp_path if where == "in a directory" else file)
    assert not ran.exists()
    assert not heard
