"""Tiny trainings for the tests: run here, in a child process, or in a fork that reports each step."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time

from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.errors import WorkbenchError
from workbench.training.loop import train

MODEL = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=24, d_vocab=64, n_ctx=64)
RECIPE = TrainConfig(steps=8, batch=4, T=16, warmup=2, lr=1e-2, validate_every=4, save_every=2, validation_sequences=4)
PUBLISHED = TrainConfig(steps=10_000, batch=1, T=2)


def start(root, architecture="resformer", *, data=None, model=MODEL, recipe=RECIPE, name=None, **more):
    return train(
        architecture, data or RepeatedData(), name=name or architecture, runs=root, model=model, train=recipe,
        device="cpu", **more,
    )  # fmt: skip


def trained_as(root, name, recipe):
    """A run by its name, for processes that take plain arguments."""
    return start(root, name=name, recipe=recipe).path


def weights(run, step=None):
    return (run.step_folder(run.train.steps if step is None else step) / "model.safetensors").read_bytes()


@contextlib.contextmanager
def unchanged(root):
    """What was trained for many tests is at their end what it was; records may be added to it."""

    def files():
        return {
            p: p.read_bytes() for p in root.rglob("*") if p.name in ("run.json", "config.json", "model.safetensors")
        }

    before = files()
    yield
    assert files() == before, "a test has written into a run that others read"


def telemetry(run):
    """Everything written down except what depends on the clock, in one order."""
    frame = run.telemetry()
    frame = frame[frame["metric"] != "tokens_per_second"].drop(columns="run")
    return frame.sort_values(["step", "metric", "part", "layer", "variant", "data"]).reset_index(drop=True)


CHILD = """
import json, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.errors import WorkbenchError
from workbench.training.loop import train
root, architecture, model, recipe, pause, device = json.loads(sys.argv[1])
def slow(step, loss, rate):
    print(step, flush=True)
    time.sleep(pause)
try:
    train(architecture, RepeatedData(), name=architecture, runs=Path(root), model=ModelConfig(**model),
          train=TrainConfig(**recipe), device=device, progress=slow)
except WorkbenchError as error:
    sys.exit(f"WorkbenchError {type(error).__name__}: {error}")
"""


def child(root, architecture="resformer", *, recipe=RECIPE, pause=0.0, device="cpu", before=()):
    from dataclasses import asdict

    settings = [str(root), architecture, asdict(MODEL), asdict(recipe), pause, device]
    return subprocess.Popen(
        [sys.executable, *before, *([] if before else ["-c", CHILD]), json.dumps(settings)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def train_and_tell(told, root, pause, limit):
    """A training that sends each step through a pipe, and what it says when it is refused."""
    if limit:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def slow(step, loss, rate):
        told.send(step)
        time.sleep(pause)

    try:
        train(
            "resformer",
            RepeatedData(),
            name="resformer",
            runs=root,
            model=MODEL,
            train=RECIPE,
            device="cpu",
            progress=slow,
        )
    except WorkbenchError as error:
        told.send(str(error))
        sys.exit(1)
    except KeyboardInterrupt as stop:
        told.send(str(stop))
        sys.exit(130)


def last_word(process, heard):
    """What a process sent before it ended."""
    said = None
    with contextlib.suppress(EOFError):
        while True:
            said = heard.recv()
    process.join(60)
    return said


def launched(root, *, pause=0.0, limit=0):
    """A training in another process that has imported torch already, and the pipe that its steps arrive in."""
    context = multiprocessing.get_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train_and_tell, args=(sender, root, pause, limit))
    process.start()
    sender.close()
    return process, receiver
