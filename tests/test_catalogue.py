"""One entry a run, read once and kept in an index that is never trusted further than it reaches."""

from __future__ import annotations

import json
import math
import os
import random
import time

import dashboard
import pytest
from damaging import in_entries
from dashboard import TRAIN

import workbench.runs.catalogue as catalogue_module
from workbench.claims.collect_evidence import find_runs, run_facts
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.runs.catalogue import KIND, catalogue, differing_settings
from workbench.runs.records import load_records, records, write_parquet
from workbench.runs.run import STUDY, Run, list_runs
from workbench.runs.sqlite_index import INDEX, Index
from workbench.training.loop import create


@pytest.fixture
def runs(tmp_path):
    dashboard.run(tmp_path, "a", "transformer", 0, "text")
    dashboard.run(tmp_path, "b", "resformer", 1, "text", steps=(0,))
    return tmp_path


def test_an_entry_says_what_the_run_says(runs):
    found = catalogue(runs)
    a, b = found.entries
    assert (a.name, a.architecture, a.seed, a.kind, a.steps, a.last) == ("a", "transformer", 0, "text", (0, 8, 20), 20)
    assert b.steps == (0,)
    assert a.group == b.group
    assert (a.n_layers, a.n_heads, a.n_ctx, a.tokens) == (2, 2, 128, TRAIN["batch"] * TRAIN["T"])
    assert found.entry("b") is b
    with pytest.raises(UnknownName, match="did you mean"):
        found.entry("bb")


def test_of_an_import_nothing_says_how_many_tokens_a_step_reads(runs):
    path = runs / "a" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": {"kind": "imported"}}))
    assert catalogue(runs).entry("a").tokens == 0
    facts = run_facts(Run.open(runs / "a"))
    assert all(math.isnan(facts[name]) for name in ("tokens", "batch", "lr", "warmup", "lr_final", "weight_decay"))


def test_runs_of_two_devices_are_compared_in_float32_and_not_in_bfloat16(runs):
    def groups_and_facts(bf16, *machines):
        for name, machine in zip("ab", machines, strict=True):
            path = runs / name / "run.json"
            info = {k: v for k, v in json.loads(path.read_text()).items() if k != "machine"}
            info |= {"train": info["train"] | {"bf16": bf16}} | ({"machine": machine} if machine else {})
            path.write_text(json.dumps(info))
        facts = [run_facts(Run.open(runs / name)) for name in "ab"]
        return len(catalogue(runs).groups), *((f["device"], f["precision"]) for f in facts)

    cpu, cuda, tf32 = (
        {"device": device, "float32_matmul": precision}
        for device, precision in (("cpu", "highest"), ("cuda", "highest"), ("cuda", "high"))
    )
    assert groups_and_facts(False, cpu, cuda) == (1, ("cpu", "float32"), ("cuda", "float32"))
    assert groups_and_facts(False, None, cpu) == (1, ("unknown", "float32"), ("cpu", "float32"))
    assert groups_and_facts(True, None, None) == (1, *[("unknown", "bfloat16 on unknown")] * 2)
    assert groups_and_facts(True, cpu, cuda) == (2, ("cpu", "bfloat16 on cpu"), ("cuda", "bfloat16 on cuda"))
    found = groups_and_facts(False, cuda, tf32)
    assert found == (2, ("cuda", "float32"), ("cuda", "float32 products of high precision on cuda"))


def test_a_recording_has_no_checkpoints_no_recipe_and_a_series_of_its_own(runs):
    (runs / "mine").mkdir()
    info = {
        "architecture": "GPT",
        "seed": 3,
        "model": {"n_layers": 5},
        "data": {"kind": "recorded"},
        "recorder": {"every": 2},
    }
    (runs / "mine" / "run.json").write_text(json.dumps(info))
    mine = catalogue(runs).entry("mine")
    assert (mine.series, mine.architecture, mine.kind, mine.n_layers, mine.seed) == ("mine", "GPT", "recorded", 5, 3)
    assert (mine.steps, mine.last, mine.n_heads, mine.n_ctx, mine.tokens) == ((), 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0.3, 0.7), ("lambda_v1=0.3", "lambda_v1=0.7")), (([1, 2, 3], [3]), ("lambda_v1=1-3", "lambda_v1=3")),
        (([1, 2], [1, 3, 4]), ("lambda_v1=1+2", "lambda_v1=1+3+4")), ((["a", "b", "c"], []), ("lambda_v1=a+b+c", "lambda_v1=")),
    ],
)  # fmt: skip
def test_runs_that_differ_in_an_option_are_told_apart(runs, values, said):
    for name, value in zip(("c", "d"), values, strict=True):
        dashboard.run(runs, name, "resformer", 2, "text", steps=())
        path = runs / name / "run.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps(info | {"options": {"lambda_v1": value}}))
    series = {e.name: e.series for e in catalogue(runs).entries}
    assert [series["c"], series["d"]] == [f"resformer {told}" for told in said]


def test_experiments_are_told_apart_by_what_most_of_their_kind_have_otherwise(runs):
    for name, change in (
        ("c", {"train": {"lr": 0.5}}),
        ("d", {"model": {"n_layers": 4}, "train": {"steps": 7}}),
        ("e", {}),
        ("f", {"train": {"lr": 0.5, "warmup": 7}}),
    ):
        dashboard.run(runs, name, "transformer", 0, "text", steps=())
        path = runs / name / "run.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps(info | {part: info[part] | values for part, values in change.items()}))
    groups = {}
    for entry in catalogue(runs).entries:
        groups.setdefault(entry.group, []).append(entry)
    assert {runs[0].name: told for runs, told in zip(groups.values(), differing_settings(groups).values(), strict=True)} == {
        "a": "", "c": "rate 0.5", "d": "4 layers, 7 steps", "f": "rate 0.5, 7 warm-up steps",
    }  # fmt: skip


def test_only_what_changed_is_read_again(runs, monkeypatch):
    monkeypatch.setattr(catalogue_module, "SETTLED", 0)
    catalogue(runs)
    opened = []
    original = Run.open
    monkeypatch.setattr(Run, "open", classmethod(lambda cls, path: opened.append(path.name) or original(path)))
    assert len(catalogue(runs).entries) == 2
    assert opened == []
    time.sleep(0.01)
    (runs / "b" / "step_000008").mkdir()
    catalogue(runs)
    assert opened == ["b"]


def change_index(runs, change, run=None):
    """Change every entry in the index, its checksum too; `run` renames it."""
    index = Index(runs)
    parts = list(index.read(KIND, ("",)))
    assert parts
    changed = [p._replace(value=json.dumps(json.loads(p.value) | change).encode(), run=run or p.run) for p in parts]
    assert index.write(KIND, None, changed[: 1 if run else None])


@pytest.mark.parametrize("content", [b"", b"[]", b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_index_is_built_again(runs, content):
    whole = catalogue(runs)
    (runs / INDEX).write_bytes(content)
    assert catalogue(runs) == whole
    assert len(list(Index(runs).read(KIND, ("",)))) == 2


@pytest.mark.parametrize("run", ["../elsewhere/secret", "/etc/secret", "a/b/c/secret", "", "."])
def test_an_index_cannot_point_outside_the_folder(runs, run):
    catalogue(runs)
    change_index(runs, {"name": "secret"}, run or "./")
    assert [e.name for e in catalogue(runs).entries] == ["a", "b"]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(runs, monkeypatch):
    monkeypatch.setattr(Index, "_replace", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    assert len(catalogue(runs).entries) == 2
    assert not (runs / INDEX).exists()


def test_damaged_runs_are_problems_and_stay_out(runs):
    (runs / "a" / "run.json").write_text("{")
    found = catalogue(runs)
    assert [e.name for e in found.entries] == ["b"]
    assert "run.json" in found.problems["a"]
    assert catalogue(runs / "nowhere").entries == ()


# ---- what others left in the folder ----


def test_an_index_with_false_contents_of_the_right_type_is_not_believed(runs, monkeypatch):
    monkeypatch.setattr(catalogue_module, "SETTLED", 0)
    sound, file, draw = catalogue(runs).entries, runs / INDEX, random.Random(0)
    data = file.read_bytes()
    for _ in range(20):
        file.write_bytes(in_entries(data, draw))
        assert catalogue(runs).entries == sound


def test_a_description_that_changes_again_within_a_tick_of_its_clock_is_read_again(runs):
    path = runs / "b" / "run.json"
    times = path.stat()
    first = catalogue(runs)
    text = path.read_text()
    path.write_text(text.replace('"seed": 1', '"seed": 2'))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for known in (first, None):  # in memory, and from the index
        second = catalogue(runs, known)
        assert second.entry("b").seed == 2
        assert second.entry("b").stamp != first.entry("b").stamp, "what was kept of the other is not shown"


def test_folders_of_others_are_looked_into_once_and_become_runs_when_they_are(runs, monkeypatch):
    (runs / "other").mkdir()
    os.utime(runs / "other", ns=(10**18, 10**18))
    looked = []
    real = catalogue_module.is_run
    monkeypatch.setattr(catalogue_module, "is_run", lambda path: looked.append(path.name) or real(path))
    known = catalogue(runs)
    assert "other" in looked
    looked.clear()
    assert [e.name for e in catalogue(runs, known).entries] == ["a", "b"]
    assert "other" not in looked
    dashboard.run(runs, "other", "svformer", 0, "text", steps=())
    assert [e.name for e in catalogue(runs, known).entries] == ["a", "b", "other"]


def test_closed_folders_are_somebody_elses_and_a_closed_folder_of_runs_is_said(runs, monkeypatch):
    real = type(runs).exists

    def closed(path):
        if path.parent.name == "b":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(type(runs), "exists", closed)
    assert [e.name for e in catalogue(runs).entries] == ["a"]

    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalogue_module.os, "scandir", refuse)
    found = catalogue(runs)
    assert not found.entries
    assert "Permission denied" in found.problems[runs.name]


def test_numbers_have_the_name_that_their_folder_has_now(runs):
    """Of two runs that swapped their names, none shows the other's numbers as its own."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        common = {"run": name, "architecture": "transformer", "seed": 0, "step": 20, "value": value, "provenance": "{}"}
        write_parquet(records([common | {"metric": "loss"}]), runs / name / "records" / "aa-bb.parquet")
        lost = common | {"metric": "validation_loss"}
        write_parquet(records([lost]), runs / name / "telemetry" / "000000-000021.parquet")
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        (runs / old).rename(runs / new)
    named = load_records([runs / "a", runs / "b"])
    assert dict(zip(named["run"], named["value"], strict=True)) == {"a": 2.0, "b": 1.0}
    assert set(Run.open(runs / "a").telemetry()["run"]) == {"a"}


def test_of_two_runs_with_one_name_one_is_left_out_and_an_analysis_of_both_is_refused(runs, tmp_path):
    study = runs / "study"
    dashboard.run(study, "a", "svformer", 0, "text")
    (study / STUDY).write_text("{}")
    found, (listed, problems) = catalogue(runs), list_runs(runs)
    assert [(e.name, e.architecture) for e in found.entries] == [("a", "transformer"), ("b", "resformer")]
    assert "has the same name" in found.problems["study/a"]
    assert [run.path for run in listed] == [runs / "a", runs / "b"]
    assert "has the same name" in problems[str(study / "a")]
    assert catalogue(runs, found).entries == found.entries
    for folder in (runs, study):
        for run in list_runs(folder)[0]:
            write_parquet(records([]), run.path / "telemetry" / "000000-000021.parquet")
    with pytest.raises(BadData, match="has the same name"):
        find_runs([runs / "a", study / "a"])


def test_no_run_is_begun_in_a_folder_with_files_of_another(runs):
    (runs / "a" / "run.json").unlink()
    shape = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=24, d_vocab=64, n_ctx=128)
    with pytest.raises(WorkbenchError, match=r"files of a run whose run\.json is gone"):
        create(
            "a",
            runs,
            architecture="transformer",
            model=shape,
            train=TrainConfig(steps=2, batch=2, T=16),
            data=RepeatedData(),
            seed=1,
            options={},
        )
