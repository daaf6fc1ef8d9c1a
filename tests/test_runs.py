"""A run folder as it may be found: foreign files, leftovers, damage, a missing corpus."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
import torch

from workbench.checkpoints.loading import load
from workbench.checkpoints.saving import save
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData, open_data, prepare
from workbench.errors import BadCheckpoint, UnknownName, WorkbenchError
from workbench.measurement.measuring import measure
from workbench.runs.run import CORPORA, Run, is_locked, list_runs, runs_folder
from workbench.training.loop import train

MODEL = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=16, d_vocab=280, n_ctx=64)
RECIPE = TrainConfig(steps=3, batch=2, T=16, warmup=1, validate_every=3, save_every=3, validation_sequences=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run on text and one on repeated tokens."""
    root = tmp_path_factory.mktemp("runs")
    text = "\n\n".join(f"line {i} of the book says {i * i % 97} and nothing more than that" for i in range(1500))
    (root / "book.txt").write_text(text)
    data = prepare(texts=[root / "book.txt"], vocabulary=280, root=root / CORPORA)
    for name, source in (("text", data), ("copy", RepeatedData())):
        train("svformer", source, name=name, runs=root, model=MODEL, train=RECIPE, device="cpu")
    return root


@pytest.fixture
def runs(folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(folder, tmp_path / "runs")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_a_run_says_what_it_is(runs):
    run = Run.open(runs / "text")
    assert (run.name, run.architecture, run.seed, run.steps, run.finished) == ("text", "svformer", 0, [0, 3], True)
    assert run.model == MODEL
    assert run.train == RECIPE
    assert run.tokenizer.decode(run.tokenizer.encode("line 7")) == "line 7"
    assert Run.open(runs / "copy").tokenizer is None
    model = run.load()
    assert model.source["step"] == 3
    assert model("line 7 of the book").shape[-1] == 280
    assert torch.equal(load(runs / "text" / "step_000003").embed.weight, model.embed.weight)
    assert load(runs / "text" / "step_000003").tokenizer is not None
    assert run.data.hash == run.info["data"]["hash"]


def test_steps_are_named_or_refused(runs):
    run = Run.open(runs / "text")
    assert [run.resolve(s) for s in ("last", "first", "all", "ends", 0)] == [[3], [0], [0, 3], [0, 3], [0]]
    with pytest.raises(UnknownName, match="last"):
        run.resolve("lst")
    with pytest.raises(WorkbenchError, match=r"no checkpoint at step 2; choose from \[0, 3\]"):
        run.load(2)
    with pytest.raises(WorkbenchError, match="single checkpoint"):
        load(runs / "text" / "step_000003", step=0)
    with pytest.raises(BadCheckpoint, match="does not exist"):
        load(runs / "nowhere")


def test_leftovers_and_foreign_files_do_not_matter(runs):
    run = runs / "text"
    for path in ("telemetry/.x.parquet.1.part", "telemetry/notes.txt", "telemetry/mine.parquet", "step_000002/model.safetensors",
                 "step_1/config.json", "step_000003/.config.json.9.part", "records/readme.md", "step_abc/config.json"):  # fmt: skip
        (run / path).parent.mkdir(exist_ok=True)
        (run / path).write_bytes(b"not yours")
    assert Run.open(run).steps == [0, 3]
    assert set(Run.open(run).telemetry()["metric"]) >= {"train_loss", "validation_loss"}
    assert measure(run, "loss", n=2)["n"][0] == 2
    (runs / "figures").mkdir()
    (runs / "notes.txt").write_text("hello")
    found, problems = list_runs(runs)
    assert [r.name for r in found] == ["copy", "text"]
    assert not problems


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_text("{"),
        lambda p: p.write_text("[]"),
        lambda p: edit(p, model={"n_layers": 1}),
        lambda p: edit(p, seed="abc"),
        lambda p: edit(p, seed=2**60),
        lambda p: edit(p, model={**json.loads(p.read_text())["model"], "n_heads": "four"}),
    ],
    ids=["cut", "list", "keys", "seed", "huge", "type"],
)
def test_a_damaged_description_is_named(runs, damage):
    damage(runs / "copy" / "run.json")
    with pytest.raises(BadCheckpoint, match=r"run\.json"):
        Run.open(runs / "copy")
    found, problems = list_runs(runs)
    assert [r.name for r in found] == ["text"]
    assert "run.json" in problems["copy"]
    with pytest.raises(WorkbenchError):
        measure(runs / "copy", "loss")


def test_cut_files_are_named(runs):
    run = Run.open(runs / "copy")
    for path in (run.telemetry_parts()[0][1], run.step_folder(3) / "model.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(BadCheckpoint, match=path.name):
            run.telemetry() if path.suffix == ".parquet" else run.load()


def test_a_missing_or_exchanged_corpus_is_told(runs):
    run = Run.open(runs / "text")
    corpus = runs / CORPORA / run.info["data"]["hash"]
    moved = corpus.rename(corpus.with_name("0123456789abcdef"))
    with pytest.raises(BadCheckpoint, match="give data= instead"):
        measure(run, "loss")
    assert measure(run, "loss", "line 7 of the book")["n"][0] == 1
    with pytest.raises(BadCheckpoint, match="other data than its name says"):
        open_data(run.info["data"] | {"hash": moved.name}, runs / CORPORA)
    (moved / "documents.parquet").write_bytes(b"PAR1")
    moved.rename(corpus)
    with pytest.raises(BadCheckpoint, match="no readable corpus"):
        _ = run.data
    for tokenizer in (None, runs / "no tokenizer"):
        with pytest.raises(BadCheckpoint, match="is not under"):
            open_data(run.info["data"] | {"hash": "f" * 16}, runs / CORPORA, tokenizer)
    for description in ({"kind": "moon"}, {"kind": "text", "hash": "../x"}, {"kind": "repeated"}, {}):
        with pytest.raises(BadCheckpoint, match="unknown data"):
            open_data(description, runs)


def test_a_renamed_run_keeps_its_numbers(runs):
    before = measure(runs / "text", "loss")
    (runs / "text").rename(runs / "renamed")
    after = measure(runs / "renamed", "loss")
    assert after["value"].equals(before["value"])
    assert after["run"].tolist() == ["renamed"]


def test_locks_and_folders(runs, monkeypatch):
    run = Run.open(runs / "text")
    assert not is_locked(run.path)
    lock = run.writing()
    with pytest.raises(WorkbenchError, match="written by another process"):
        run.writing()
    assert is_locked(run.path)
    lock.release()
    assert not is_locked(run.path)
    monkeypatch.setenv("WORKBENCH_RUNS", str(runs))
    assert runs_folder() == runs.resolve()
    assert runs_folder("elsewhere").name == "elsewhere"
    assert list_runs(runs / "nowhere") == ([], {})


@pytest.fixture
def bare(tiny, tmp_path):
    """A run folder with steps 0 and 20 and no telemetry, and a step that was cut off before its config."""
    folder = tmp_path / "a-run"
    models = {step: tiny("resformer", seed=step, lambda_v1=0.8) for step in (0, 20)}
    for step, model in models.items():
        save(model, folder / f"step_{step:06d}", seed=7, step=step)
    (folder / "step_000030").mkdir()
    info = {
        "architecture": "resformer", "seed": 7, "model": asdict(models[0].config),
        "train": {"steps": 20, "batch": 1, "T": 8}, "data": {"kind": "repeated", "vocabulary": 61},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    return folder, models


def test_a_run_loads_its_last_first_or_named_step(bare):
    folder, models = bare
    ids = torch.arange(9)[None]
    places = [(folder, step, true) for step, true in (("last", 20), ("first", 0), (0, 0), (20, 20))]
    for path, step, true in (*places, (folder / "step_000000", "last", 0)):
        model = load(path, step=step)
        assert torch.equal(model(ids), models[true](ids))
        assert (model.source["run"], model.source["step"], model.source["seed"]) == ("a-run", true, 7)
    assert load(folder, lambda_v1=0.1).options["lambda_v1"] == 0.1
    for step in (5, 30):
        with pytest.raises(WorkbenchError, match=rf"no checkpoint at step {step}; choose from \[0, 20\]"):
            load(folder, step=step)
    with pytest.raises(WorkbenchError, match=r"step='all' of a-run means 2 checkpoints; choose one of \[0, 20\]"):
        load(folder, step="all")


@pytest.mark.parametrize("odd", [{"vocabulary": 10**30}, {"shortest": [4]}, {"kind": "backcopy"}])
def test_a_task_that_cannot_be_is_refused(runs, odd):
    path = runs / "copy" / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"data": info["data"] | odd}))
    with pytest.raises(BadCheckpoint, match="unknown data"):
        _ = Run.open(runs / "copy").data
