"""Damaged files of every form: nothing but our named errors comes out of them, quickly, and nothing in them is ever run."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from damage import FORMS
from foreign import rezipped

import workbench
from workbench.checkpoints import transformers_modules
from workbench.checkpoints.paths import CONFIG
from workbench.errors import WorkbenchError

ROUNDS = 8  # of each form; `benchmarks/damaged_files.py` tries thousands
LONGEST = ("values of a Llama's config", "values of another library's config")
HARMLESS = (
    "text", "link", "catalogue's index", "values of a catalogue's index", "demo's status", "dashboard's note",
    "run.json of a run with numbers", "values of a run.json", "tokenizer's settings", "names at a URL", "pins",
)  # fmt: skip
"""Forms of which a damaged one is another sound one, or as good as absent."""
RUNNING = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect", "pty.spawn",
}  # fmt: skip
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_damaged_files_are_read_or_refused_by_name(tiny, tmp_path, form, monkeypatch):
    # what would be observed is sound; observing it has tests of its own
    seen = SimpleNamespace(source={}, tokenizer=None, config=SimpleNamespace(d_vocab=61))
    monkeypatch.setattr(transformers_modules, "observe", lambda module, ids, **_: seen)
    make, damage = FORMS[form]
    file, act = make(tiny, tmp_path)
    good, chance = file.read_bytes(), random.Random(form)
    rounds = ROUNDS // 4 if form in LONGEST else ROUNDS
    read = [survives(act, file, damage(good, chance)) for _ in range(rounds)]
    assert not all(read) or form in HARMLESS, "the damage does nothing"
    assert not set(heard) - ({"subprocess.Popen"} if form == "tokenizer's patterns" else set()), "the worker is our own"
    heard.clear()


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
