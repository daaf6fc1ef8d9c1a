"""The recipe in numbers, pairing across architectures, and trainings that are killed, stopped, doubled or out of disk."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from workbench.config import ModelConfig, TrainConfig
from workbench.data import RepeatedData, prepare
from workbench.errors import BadCheckpoint, BadData, UnknownName, WorkbenchError
from workbench.measuring import measure
from workbench.models import ARCHITECTURES, build
from workbench.runs import Run
from workbench.training import checkpoint_steps, learning_rate, optimiser, train

MODEL = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=24, d_vocab=64, n_ctx=64)
RECIPE = TrainConfig(steps=8, batch=4, T=16, warmup=2, lr=1e-2, validate_every=4, save_every=2, validation_sequences=4)
PUBLISHED = TrainConfig(steps=10_000, batch=1, T=2)


def start(root, architecture="resformer", *, data=None, model=MODEL, recipe=RECIPE, name=None, **more):
    return train(
        architecture, data or RepeatedData(), name=name or architecture, runs=root, model=model, train=recipe,
        device="cpu", **more,
    )  # fmt: skip


def weights(run, step=None):
    return (run.step_folder(run.train.steps if step is None else step) / "model.safetensors").read_bytes()


def telemetry(run):
    """Everything written down except what depends on the clock, in one order."""
    frame = run.telemetry()
    frame = frame[frame["metric"] != "tokens_per_second"].drop(columns="run")
    return frame.sort_values(["step", "metric", "part", "layer", "variant", "data"]).reset_index(drop=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nobody disturbed."""
    return start(tmp_path_factory.mktemp("straight"))


# ---- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "total"), [(120, 3.296), (1200, 3.264)])
def test_learning_rates_of_the_published_schedule(warmup, total):
    recipe = PUBLISHED.replace(warmup=warmup)
    rates = [learning_rate(t, recipe) for t in range(10_001)]
    assert rates[0] == 1e-7
    assert rates[warmup] == pytest.approx(6e-4, rel=1e-12)
    assert rates[10_000] == pytest.approx(6e-5, rel=1e-12)
    assert sum(rates[:10_000]) == pytest.approx(total, abs=5e-4)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert learning_rate(0, PUBLISHED.replace(warmup=0)) == pytest.approx(6e-4)


def test_checkpoints_are_even_in_the_logarithm():
    assert checkpoint_steps(300, 1) == [0, 8, 16, 32, 64, 128, 256, 300]
    assert checkpoint_steps(40, 2) == [0, 8, 11, 16, 23, 32, 40]
    assert checkpoint_steps(5, 1) == [0, 5]


def test_matrices_decay_and_gains_and_coefficients_do_not(any_architecture):
    model = build(any_architecture, MODEL.replace(n_heads=4))
    groups = optimiser(model, RECIPE).param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    for name, parameter in model.named_parameters():
        matrix = name.endswith("_proj.weight") or name in ("embed.weight", "unembed.weight")
        table = ".tables." in name or ".gates." in name
        assert (id(parameter) in decayed) == (matrix or table), name
    assert {g["weight_decay"] for g in groups} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("architecture", "option", "coefficients"),
    [
        ("resformer_learnable", "decay_lambda", ["resformer_learnable.first", "resformer_learnable.own"]),
        (
            "resformer_learnable_plus",
            "decay_lambda",
            [f"resformer_learnable_plus.{x}" for x in ("own", "logits", "scale")],
        ),
        ("resformer_dense", "decay_lambda", ["resformer_dense.rows.1"]),
        ("value_embedding", "decay_lambda", ["value_embedding.own", "value_embedding.table"]),
        ("denseformer", "decay_alpha", ["dwa.alphas.0.weight", "dwa.alphas.1.weight"]),
    ],
)
def test_coefficients_decay_where_asked_for(architecture, option, coefficients):
    for asked in (True, False):
        model = build(architecture, MODEL, **{option: asked})
        decayed = {id(p) for g in optimiser(model, RECIPE).param_groups if g["weight_decay"] for p in g["params"]}
        own = f"{model.shortcuts[0].prefix}."
        found = {name: id(p) in decayed for name, p in model.named_parameters() if name.startswith(own)}
        assert {name: d for name, d in found.items() if ".tables." not in name} == dict.fromkeys(coefficients, asked)
        assert id(model.ln_final.weight) not in decayed


def test_the_first_step_is_adamw_by_hand(tmp_path):
    """One clipped step on all tokens' mean loss, against torch's own AdamW."""
    recipe = RECIPE.replace(steps=1, warmup=0, clip=0.05)
    run = start(tmp_path, "transformer", recipe=recipe, seed=3)
    model = build("transformer", MODEL, seed=3).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    model(RepeatedData().batch(0, 4, 16, 3), return_type="loss").backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert total > 0.05
    reference.step()
    trained = dict(run.load().named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-7)
    noted = run.telemetry("metric = 'gradient_norm' and part = 'all'")
    assert noted["value"].item() == pytest.approx(float(total), rel=1e-5)


def test_rate_factors_of_some_parameters_are_adamw_by_hand(tmp_path):
    """Five times the rate for block 0, its decay with it, the rest at the schedule's."""
    recipe = RECIPE.replace(steps=2, warmup=0, lr_final=1.0, clip=0.0, lr_factors={"blocks.0.*": 5, "unembed.*": 0.5})
    run = start(tmp_path, "transformer", recipe=recipe, seed=3)
    model = build("transformer", MODEL, seed=3).train()
    groups = []
    for name, p in model.named_parameters():
        rate = 5e-2 if name.startswith("blocks.0.") else 5e-3 if name.startswith("unembed") else 1e-2
        groups.append({"params": [p], "lr": rate, "weight_decay": 0.1 if p.ndim == 2 else 0.0})
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(2):
        reference.zero_grad()
        model(RepeatedData().batch(step, 4, 16, 3), return_type="loss").backward()
        reference.step()
    trained = dict(run.load().named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-6, msg=name)
    assert run.train.lr_factors == {"blocks.0.*": 5, "unembed.*": 0.5}
    assert start(tmp_path, "transformer", recipe=recipe, seed=3).finished


def test_a_run_from_before_a_key_came_is_still_its_own(tmp_path):
    path = start(tmp_path).path / "run.json"
    info = json.loads(path.read_text())
    del info["train"]["lr_factors"]
    path.write_text(json.dumps(info))
    assert start(tmp_path).finished
    with pytest.raises(WorkbenchError, match="exists with another train"):
        start(tmp_path, recipe=RECIPE.replace(lr_factors={"blocks.0.*": 2}))


def test_architectures_of_one_seed_start_and_learn_from_the_same(tmp_path):
    models = {a: dict(build(a, MODEL.replace(n_heads=4), seed=5).named_parameters()) for a in ARCHITECTURES}
    for tensors in models.values():
        for name, tensor in tensors.items():
            if name in models["transformer"] and tensor.shape == models["transformer"][name].shape:
                assert torch.equal(tensor, models["transformer"][name]), name
    losses = [
        telemetry(start(tmp_path, a, recipe=RECIPE.replace(lr=1e-30, weight_decay=0.0, warmup=0)))
        for a in ("transformer", "denseformer")
    ]
    first, second = (frame[frame["metric"] == "train_loss"]["value"].to_numpy() for frame in losses)
    assert first == pytest.approx(second, rel=1e-5), "equal functions that do not learn see equal batches"
    assert len(set(first)) == RECIPE.steps


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    text = "\n\n".join(f"line {i} of the book says {i * i % 97} and nothing more than that" for i in range(1500))
    (tmp_path / "book.txt").write_text(text)
    data, again = (prepare(texts=[tmp_path / "book.txt"], vocabulary=280) for _ in range(2))
    for source, other in ((data, again), (RepeatedData(), RepeatedData())):
        assert torch.equal(source.batch(7, 4, 16, 1), other.batch(7, 4, 16, 1))
        assert not torch.equal(source.batch(7, 4, 16, 1), source.batch(7, 4, 16, 2))
        assert not torch.equal(source.batch(7, 4, 16, 1), source.batch(8, 4, 16, 1))
    chunks = len(data._train.chunks(16))
    epoch = torch.cat([data.batch(step, 1, 16, 1) for step in range(chunks)])
    assert torch.equal(epoch[4:8], data.batch(1, 4, 16, 1)), "the order does not depend on the size of a batch"
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, data._train.chunks(16).tolist()))
    second = torch.cat([data.batch(step, 1, 16, 1) for step in range(chunks, 2 * chunks)])
    assert not torch.equal(second, epoch)


def test_what_is_written_down(straight):
    frame = straight.telemetry()
    assert set(frame["metric"]) >= {
        "train_loss", "validation_loss", "copy_loss", "learning_rate", "gradient_norm", "tokens_per_second", "coefficient",
    } - {"coefficient"}  # fmt: skip
    assert frame[frame["metric"] == "train_loss"]["step"].tolist() == list(range(8))
    validation = frame[frame["metric"] == "validation_loss"]
    assert validation["step"].tolist() == [0, 4, 8]
    assert (validation["n"] == 4).all()
    assert validation["se"].notna().all()
    output = frame[(frame["metric"] == "gradient_norm") & (frame["variant"] == "output")]
    assert (output["unit"] == "logit per weight").all()
    assert straight.steps == [0, 8]
    assert straight.finished
    assert start(straight.path.parent).path == straight.path, "a finished run is not trained again"


def test_precision_and_device_of_one_training_are_its_own(tmp_path, straight):
    half = start(tmp_path, recipe=RECIPE.replace(bf16=True))
    assert start(tmp_path, name="again").steps == [0, 8]
    assert weights(Run.open(tmp_path / "again")) == weights(straight)
    assert weights(half) != weights(straight)
    if not torch.cuda.is_available():
        with pytest.raises(WorkbenchError, match="device='cuda'"):
            train("transformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=RECIPE, device="cuda")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": MODEL.replace(d_vocab=32)}, "d_vocab=32"),
        ({"recipe": RECIPE.replace(T=128)}, "n_ctx=64"),
        ({"recipe": RECIPE.replace(T=15)}, "even length"),
        ({"checkpoints": [99]}, "99"),
        ({"seed": -1}, "seed"),
        ({"name": "../up"}, "plain folder name"),
        ({"lambda_v": 1.0}, "lambda_v1"),
        ({"architecture": "resfromer"}, "resformer"),
        ({"recipe": RECIPE.replace(lr_factors={"block.0.*": 5})}, r"unknown pattern .*'block\.0\.\*'"),
        ({"recipe": RECIPE.replace(lr_factors={"blocks.0.*": 5, "*.attn.*": 2})}, "both fit blocks.0.attn"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(tmp_path, changes, says):
    with pytest.raises(WorkbenchError, match=says):
        start(tmp_path, **changes)
    assert not list(tmp_path.rglob("run.json"))


def test_other_settings_under_one_name_are_refused(tmp_path, straight):
    root = straight.path.parent
    before = weights(straight)
    for changes in ({"seed": 1}, {"recipe": RECIPE.replace(lr=1e-3)}, {"data": RepeatedData(32)}, {"lambda_v1": 0.7}):
        with pytest.raises(WorkbenchError, match="exists with another"):
            start(root, "resformer", **changes)
    assert weights(straight) == before
    with pytest.raises(UnknownName):
        start(root, "resformer", lambda_v9=1)


def test_a_loss_that_is_no_number_is_told_and_kept_nowhere(tmp_path):
    wild = RECIPE.replace(lr=1e30, clip=0.0, warmup=0)
    with pytest.raises(WorkbenchError, match=r"the loss is .* (nan|inf).* lower lr"):
        start(tmp_path, recipe=wild, checkpoints=range(9))
    run = Run.open(tmp_path / "resformer")
    assert all(p.isfinite().all() for p in run.load().parameters())


def test_a_damaged_resume_point_is_named(tmp_path):
    run = start(tmp_path)
    state = run.path / "resume" / "state.safetensors"
    whole = state.read_bytes()
    for folder in ("step_000008",):
        (run.path / folder / "config.json").unlink()
    for damaged in (whole[: len(whole) // 2], b"", b"\0" * 100):
        state.write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=r"state\.safetensors is damaged"):
            start(tmp_path)
    state.write_bytes(whole)
    assert start(tmp_path).finished


def test_a_folder_in_use_is_refused_at_once(tmp_path, straight, forked):
    lock = straight.writing()
    try:
        (straight.step_folder(8) / "config.json").rename(tmp_path / "config.json")
        process, heard = forked(straight.path.parent)
        assert "another process" in last_word(process, heard)
        assert process.exitcode == 1
    finally:
        (tmp_path / "config.json").rename(straight.step_folder(8) / "config.json")
        lock.release()


# ---- other processes -------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from workbench.config import ModelConfig, TrainConfig
from workbench.data import RepeatedData
from workbench.errors import WorkbenchError
from workbench.training import train
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


@pytest.fixture
def forked(forkserver):
    """`forked(root)`: a training in another process that has imported torch already, and where its steps are heard."""

    def launch(root, *, pause=0.0, limit=0):
        context = multiprocessing.get_context()
        heard, told = context.Pipe(duplex=False)
        process = context.Process(target=train_and_tell, args=(told, root, pause, limit))
        process.start()
        told.close()
        return process, heard

    return launch


def last_word(process, heard):
    """What a process sent before it ended."""
    said = None
    with contextlib.suppress(EOFError):
        while True:
            said = heard.recv()
    process.join(60)
    return said


@pytest.mark.parametrize("attempt", range(2))
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, straight, forked, attempt):
    """kill -9 at random moments, the last one in the middle of writing as likely as not."""
    moments = random.Random(attempt)
    for _ in range(2):
        process, heard = forked(tmp_path, pause=0.2)
        for _ in range(moments.randint(1, 2)):
            heard.recv()
        time.sleep(moments.random() * 0.2)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (tmp_path / "resformer" / "resume" / ".state.safetensors.dead.part").write_bytes(b"half")
    run = start(tmp_path)
    assert weights(run) == weights(straight)
    assert weights(run, 0) == weights(straight, 0)
    pd.testing.assert_frame_equal(telemetry(run), telemetry(straight))
    assert not list(run.path.rglob("*.part"))


def test_ctrl_c_ends_with_everything_written(tmp_path, straight):
    process = child(tmp_path, pause=0.3)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt: stopped after step" in said
    run = Run.open(tmp_path / "resformer")
    stopped = int(said.rsplit("stopped after step ", 1)[1].split()[0])
    assert 0 < stopped < RECIPE.steps
    assert run.telemetry("metric = 'train_loss'")["step"].max() == stopped - 1
    assert weights(start(tmp_path)) == weights(straight)
    pd.testing.assert_frame_equal(telemetry(run), telemetry(straight))


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE is POSIX")
def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path, forked):
    """The weights fit, the resume point with its moments does not."""
    size = sum(p.numel() for p in build("resformer", MODEL).parameters()) * 4
    process, heard = forked(tmp_path, limit=2 * size)
    said = last_word(process, heard)
    assert process.exitcode == 1
    assert "cannot write" in said
    assert "state.safetensors" in said
    run = Run.open(tmp_path / "resformer")
    assert run.steps == [0]
    run.load(0)
    assert not (run.path / "resume" / "state.safetensors").exists()
    assert not list(run.path.rglob("*.part"))
    assert start(tmp_path).finished


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize(
    "launcher",
    [
        (str(Path(__file__).with_name("two.py")),),
        pytest.param(("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"), marks=pytest.mark.slow),
    ],
    ids=["forked", "torchrun"],
)
def test_two_processes_learn_what_one_learns(tmp_path, launcher):
    recipe = RECIPE.replace(steps=20, validate_every=10, save_every=10)
    (tmp_path / "child.py").write_text(CHILD)
    process = child(tmp_path / "two", recipe=recipe, before=(*launcher, str(tmp_path / "child.py")))
    _, said = process.communicate(timeout=120)
    one, two = start(tmp_path / "one", recipe=recipe), Run.open(tmp_path / "two" / "resformer")
    assert two.finished, said  # not the exit code: gloo's threads sometimes abort a process that has done its work
    for (name, mine), theirs in zip(one.load().named_parameters(), two.load().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=name)
    columns = ["step", "metric", "part", "layer", "variant", "data"]
    pd.testing.assert_frame_equal(telemetry(one)[columns], telemetry(two)[columns])
    assert telemetry(one)["value"].to_numpy() == pytest.approx(telemetry(two)["value"].to_numpy(), abs=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_and_measuring_on_a_gpu(tmp_path):
    recipe = RECIPE.replace(bf16=True)
    run = train("resformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=recipe, device="cuda")
    (run.step_folder(8) / "config.json").unlink()
    resumed = train("resformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=recipe, device="cuda")
    assert resumed.finished
    on_gpu, on_cpu = (measure(run, "loss", torch.arange(16)[None], device=d) for d in ("cuda", "cpu"))
    assert on_gpu["value"][0] == pytest.approx(on_cpu["value"][0], abs=1e-2)


def test_data_errors_come_first(tmp_path):
    (tmp_path / "book.txt").write_text(
        "\n\n".join(f"line {i} says {i * i % 89} and then stops here" for i in range(900))
    )
    data = prepare(texts=[tmp_path / "book.txt"], vocabulary=280)
    long = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=8, d_vocab=280, n_ctx=10**6)
    with pytest.raises(BadData, match=r"choose a smaller length|the longest has"):
        start(tmp_path, "transformer", data=data, model=long, recipe=RECIPE.replace(T=500_000))
    assert not (tmp_path / "transformer").exists()
