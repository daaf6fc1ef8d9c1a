"""Runs kept elsewhere: read from there step by step, written here and put up whole, and whole here whatever happens there."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys

import fsspec
import pytest
import test_cli
import training_runs
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import workbench
from workbench import environment
from workbench.claims.collect_evidence import gather
from workbench.errors import BadCheckpoint, LeftOut, NotSent, OnlyHere, UnknownName, WorkbenchError
from workbench.measurement.measuring import measure
from workbench.runs.catalogue import catalogue
from workbench.runs.run import Run, list_runs, runs_folder
from workbench.storage import mirror, remote
from workbench.storage.path_or_url import locate

URL = "memory://bucket/runs"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine("a")`: as a machine of its own, with a cache of its own; all of them see the same storage."""
    MemoryFileSystem.store.clear()

    def become(name):
        monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / name))
        mirror.forget()

    become("a")
    yield become
    MemoryFileSystem.store.clear()
    mirror.forget()


def there():
    """What lies in the runs folder there."""
    return {name.removeprefix("/bucket/runs/") for name in MemoryFileSystem.store if name.startswith("/bucket/runs/")}


def started(**more):
    return training_runs.start(URL, checkpoints=(2, 4, 6), **more)


def weights_here():
    return sorted(path.parent.name for path in runs_folder(URL).glob("resformer/*/model.safetensors"))


@pytest.mark.slow
def test_a_run_is_put_up_whole_and_read_elsewhere_step_by_step(machine, monkeypatch, tmp_path):
    puts, store = [], remote.Remote.store
    monkeypatch.setattr(remote.Remote, "store", lambda self, path, name: puts.append(name) or store(self, path, name))
    run = started()
    files = {
        p.relative_to(run.path.parent).as_posix() for p in run.path.rglob("*") if p.is_file() and p.name != ".lock"
    }
    assert there() == files
    for step in run.steps:
        one = f"resformer/step_{step:06d}"
        assert puts.index(f"{one}/model.safetensors") < puts.index(f"{one}/config.json"), (
            "what makes it a step comes last"
        )
    assert len(puts) == len(set(puts) - {"resformer/resume/state.safetensors"}) + puts.count(
        "resformer/resume/state.safetensors"
    ), "and nothing but the point to resume from twice"

    machine("b")
    ((found,), problems) = list_runs(URL)
    assert not problems
    assert found.finished
    assert found.steps == run.steps
    assert weights_here() == [], "looking fetches no weights"
    assert [e.name for e in catalogue(URL).entries] == ["resformer"]
    frame = measure(f"{URL}/resformer", "loss", steps="ends", n=2)
    assert weights_here() == ["step_000000", "step_000008"]
    copied = tmp_path / "plain" / "resformer"
    shutil.copytree(run.path, copied)
    local = measure(copied, "loss", steps="ends", n=2)
    assert frame.drop(columns="provenance").equals(local.drop(columns="provenance"))
    assert len([name for name in there() if name.startswith("resformer/records/")]) == 4, (
        "records go up, with their samples"
    )
    assert workbench.load(f"{URL}/resformer/step_000004").source["step"] == 4

    machine("a")
    assert measure(run, "loss", steps="ends", n=2)["provenance"].tolist() == frame["provenance"].tolist()


@pytest.mark.slow
def test_a_training_goes_on_on_another_machine_and_parts_it_writes_anew_are_no_longer_there(machine, uninterrupted):
    """It ends after step 6 of 8 with the state of step 4; the other machine cuts what follows into other parts."""

    def stop(step, *_):
        if step == 6:
            raise RuntimeError("the machine is gone")

    recipe = training_runs.RECIPE.replace(save_every=4)
    with pytest.raises(RuntimeError):
        started(progress=stop, recipe=recipe)
    assert "resformer/telemetry/000004-000006.parquet" in there()
    machine("b")
    run = training_runs.start(URL, checkpoints=(5,), recipe=recipe)
    assert run.finished
    assert training_runs.weights(run) == training_runs.weights(uninterrupted)
    machine("c")
    elsewhere = Run.open(f"{URL}/resformer")
    assert elsewhere.steps == [0, 2, 4, 5, 8]
    assert training_runs.telemetry(elsewhere).equals(training_runs.telemetry(uninterrupted))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no permission", "cut"])
def test_what_cannot_be_put_up_is_one_sentence_and_goes_up_with_the_same_command(machine, monkeypatch, how):
    put = MemoryFileSystem.put_file

    def broken(self, path, to, **more):
        if "step_000004" in to:
            if how == "cut":
                self.pipe_file(to, b"half")
                return
            raise PermissionError("AccessDenied")
        put(self, path, to, **more)

    says = "no permission: AccessDenied" if how == "no permission" else "OSError: 4 of [0-9]+ bytes arrived"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", broken)
        sentence = rf"cannot write memory://bucket/runs/resformer/step_000004/model.safetensors: {says}; everything is complete in"
        with (
            pytest.warns(NotSent, match="training continues without the upload") as told,
            pytest.raises(WorkbenchError, match=sentence),
        ):
            started()
        assert len(told) == 1, "not at each step that waits"
        run = Run.open(runs_folder(URL) / "resformer")
        assert run.finished
        assert run.load(4).source["step"] == 4
        assert "resformer/step_000004/config.json" not in there(), "half a step is none"
        written = {path: path.stat().st_mtime_ns for path in run.path.rglob("*.safetensors")}
    started()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*.safetensors")} == written, "trained once"
    machine("b")
    assert Run.open(f"{URL}/resformer").load(4).source["step"] == 4


@pytest.mark.slow
def test_what_may_be_read_and_not_written_is_measured_whole_here_and_refused_in_one_sentence(machine, monkeypatch):
    def refused(self, *_, **__):
        raise PermissionError("AccessDenied")

    started()
    before = there()
    machine("b")
    with monkeypatch.context() as bucket:
        for name in ("put_file", "rm_file", "mv", "pipe_file"):
            bucket.setattr(MemoryFileSystem, name, refused)
        measured_where_nothing_may_be_written(before)
    measure(f"{URL}/resformer", "loss", steps="ends", n=2)
    assert {name.split(".")[1] for name in there() - before} == {"parquet", "samples"}, "the same command put them up"


def measured_where_nothing_may_be_written(before):
    sentence = (
        rf"^cannot write {URL}/resformer/records/\S+: no permission: AccessDenied; everything is complete in \S+, "
        "and the same command continues from there$"
    )
    with pytest.raises(OnlyHere, match=sentence) as refusal:
        measure(f"{URL}/resformer", "loss", steps="ends", n=2)
    assert sorted(set(refusal.value.made["step"])) == [0, 8], "both steps were measured before it was said"
    with pytest.warns(NotSent, match=sentence):
        assert len(workbench.xray(f"{URL}/resformer", n=4).answers) == 4
    frame, _, problems = gather(Run.open(f"{URL}/resformer"), {4: ("loss", "importance_entropy"), 6: ("loss",)}, n=2)
    assert set(zip(frame["metric"], frame["step"], strict=True)) == {
        ("loss", 4),
        ("importance_entropy", 4),
        ("loss", 6),
    }
    assert [bool(re.match(sentence, problem)) for problem in problems] == [True], "who reads numbers hears it once"
    assert [e.name for e in catalogue(URL).entries] == ["resformer"]
    with pytest.warns(NotSent), pytest.raises(WorkbenchError, match=r"/other/\S+: no permission"):
        started(name="other")
    assert Run.open(runs_folder(URL) / "other").finished
    assert there() == before


def test_the_cache_stays_within_its_bounds_and_keeps_what_is_not_up(machine, monkeypatch):
    run = started()
    size = (run.step_folder(0) / "model.safetensors").stat().st_size
    machine("b")
    monkeypatch.setenv(environment.CACHE_GB, str(2.5 * size / 1e9))
    elsewhere = Run.open(f"{URL}/resformer")
    for step in (0, 2, 4, 0, 6):
        elsewhere.weights_hash(step)
    assert weights_here() == ["step_000000", "step_000006"], "those used last"
    assert elsewhere.steps == run.steps
    own = elsewhere.step_folder(6) / "model.safetensors"
    own.write_bytes(own.read_bytes()[:-4] + b"abcd")
    for step in (2, 4):
        elsewhere.weights_hash(step)
    assert weights_here() == ["step_000002", "step_000004", "step_000006"], "one was changed here, and counts no more"
    machine("b")
    elsewhere.weights_hash(6)
    assert own.read_bytes()[-4:] == b"abcd", "nor is it overwritten"
    monkeypatch.setenv(environment.CACHE_GB, "much")
    with pytest.raises(WorkbenchError, match="WORKBENCH_CACHE_GB='much' is no number"):
        mirror.limit()


def test_what_is_replaced_or_removed_there_is_here_too(machine):
    run = started()
    machine("b")
    elsewhere = Run.open(f"{URL}/resformer")
    elsewhere.weights_hash(8)
    system = remote.remote(URL).system
    system.pipe_file("/bucket/runs/resformer/tokenizer.json", b"{}")
    system.rm_file("/bucket/runs/resformer/step_000008/config.json")
    system.rm_file("/bucket/runs/resformer/step_000008/model.safetensors")
    mirror.forget()
    assert Run.open(elsewhere.path).steps == run.steps[:-1]
    assert (elsewhere.path / "tokenizer.json").read_bytes() == b"{}"
    assert not (elsewhere.step_folder(8) / "model.safetensors").exists()


def test_checkpoints_of_others_open_by_their_url(machine, tiny, tmp_path):
    """A directory and a folder on another disk; a place elsewhere is put aside and renamed, as on any plain disk."""
    from workbench.checkpoints.saving import save

    model = tiny("resformer", config={"n_layers": 2})
    save(model, tmp_path / "disk" / "final")
    opened = workbench.load(f"file://{tmp_path}/disk/final")
    assert (opened.embed.weight == model.embed.weight).all()
    training_runs.start(f"file://{tmp_path}/disk/runs", recipe=training_runs.RECIPE.replace(steps=2))
    kept = {path.name for path in (tmp_path / "disk" / "runs" / "resformer").rglob("*")}
    assert not {name for name in kept if name.endswith(".part")}
    assert Run.open(tmp_path / "disk" / "runs" / "resformer").finished, "what is there is a run as any other"
    with pytest.raises(WorkbenchError, match=rf"file://{tmp_path}/disk/nothing does not exist, or nothing is in it"):
        workbench.load(f"file://{tmp_path}/disk/nothing")


def test_what_cannot_be_reached_is_one_sentence_and_exit_code_2(machine, monkeypatch):
    def refused(self, *_, **__):
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(MemoryFileSystem, "find", refused)
    done = test_cli.run("list", "runs", "--runs", URL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"workbench: cannot read {URL}: no permission: AccessDenied\n"
    with pytest.raises(
        WorkbenchError, match=r"cannot open gs://bucket: it needs gcsfs: pip install '[\w-]+\[remote\]'"
    ):
        runs_folder("gs://bucket")
    with pytest.raises(UnknownName, match="unknown kind of storage 's4'; did you mean s3"):
        runs_folder("s4://bucket/runs")


class Cut(AsyncFileSystem):
    """A connection that breaks: the request fails, and so does a task that it had begun."""

    cachable = False

    async def _isfile(self, path):
        async def send():
            raise ConnectionError("cannot write to a closing transport")

        self.loop.create_task(send())
        await asyncio.sleep(0)
        raise ConnectionError("cut")


def test_what_a_broken_connection_leaves_behind_is_not_told_beside_the_sentence(monkeypatch):
    fsspec.register_implementation("cut", Cut, clobber=True)
    monkeypatch.setattr(fsspec, "available_protocols", lambda: ["cut"])
    told = list[object]()
    monkeypatch.setattr(logging.getLogger("asyncio"), "error", lambda *words, **_: told.append(words))
    with pytest.raises(WorkbenchError, match=r"^cannot read cut://bucket/a: ConnectionError: cut$"):
        remote.remote("cut://bucket").exists("a")
    gc.collect()
    assert told == []


def test_a_path_of_this_machine_is_nothing_to_the_mirrors(tmp_path):
    assert mirror.mirror_of(tmp_path) is None
    assert locate(tmp_path).path == mirror.fetch_all(tmp_path) == tmp_path
    assert mirror.address_of(tmp_path) == str(tmp_path)
    mirror.push(tmp_path)
    assert remote.address("s3:/bucket/runs/") == "s3://bucket/runs", "what a path makes of a URL"


def put(*names):
    """Objects of these names, whatever another filesystem would make of them."""
    for name in names:
        path = f"/bucket/runs/{name}"
        MemoryFileSystem.store[path] = MemoryFile(None, path, b"{}")


def files_here(place):
    return {
        path.relative_to(place).as_posix()
        for path in place.rglob("*")
        if path.is_file() and ".remote" not in path.parts
    }


@pytest.mark.parametrize("name", ["source", "leases"])
def test_a_run_may_have_the_name_of_any_bookkeeping(machine, name):
    put(f"{name}/run.json", f"{name}/records/a.json")
    for _ in range(2):
        assert files_here(mirror.here(URL)) == {f"{name}/run.json", f"{name}/records/a.json"}
        mirror.forget()
    assert mirror.here(f"{URL}/{name}").name == name
    assert mirror.mirror_of(runs_folder(URL)).url == URL


@pytest.mark.parametrize(
    ("name", "said"),
    [("r/" + "n" * 256, "too long"), ("é" * 128 + "/run.json", "too long"), ("r/nul\0.json", "no path of this disk")],
)
def test_what_this_disk_cannot_hold_is_named_and_the_rest_is_here(machine, name, said):
    longest = "n" * 250
    put("r/run.json", "s/run.json", f"{longest}/{longest}", name)
    for _ in range(2):
        with pytest.warns(LeftOut, match=rf"1 files are left out: .*{said}"):
            assert files_here(mirror.here(URL)) == {"r/run.json", "s/run.json", f"{longest}/{longest}"}
        mirror.forget()


def test_an_object_with_the_name_of_a_folder_is_named(machine):
    """As object stores have them; the filesystem of these tests refuses both at once."""
    fits, left_out = mirror.usable_files(
        mirror.mirror_of(runs_folder(URL)), {"r": "1", "r/run.json": "1", "s/run.json": "1"}
    )
    assert (list(fits), left_out) == (["r/run.json", "s/run.json"], {"r": "a folder has the same name"})


def test_one_object_that_cannot_be_read_is_named_and_the_rest_is_here(machine, monkeypatch):
    put("r/run.json", "r/bad.json", "s/run.json")
    get = MemoryFileSystem.get_file

    def refused(self, path, *rest, **options):
        if path.endswith("bad.json"):
            raise PermissionError("AccessDenied")
        get(self, path, *rest, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", refused)
    for _ in range(2):
        with pytest.warns(LeftOut, match=r"1 files are left out: 'r/bad\.json' .*no permission: AccessDenied"):
            assert files_here(mirror.here(URL)) == {"r/run.json", "s/run.json"}
        mirror.forget()
    with pytest.raises(WorkbenchError, match=r"cannot read memory://bucket/runs/r/bad\.json: no permission"):
        mirror.here(f"{URL}/r")
    monkeypatch.setattr(MemoryFileSystem, "get_file", get)
    assert files_here(mirror.here(URL)) == {"r/run.json", "r/bad.json", "s/run.json"}


def test_links_pipes_and_names_of_other_encodings_on_a_disk_are_named_and_the_rest_is_here(machine, tmp_path):
    disk = tmp_path / "disk"
    (disk / "r").mkdir(parents=True)
    (disk / "r" / "run.json").write_text("{}")
    (disk / "r" / "dangling.json").symlink_to(disk / "nowhere")
    (disk / "r" / "zero.json").symlink_to("/dev/zero")
    (disk / "r" / "loop").symlink_to(disk)
    os.mkfifo(disk / "r" / "pipe.json")
    (disk / "r" / os.fsdecode(b"caf\xe9.json")).write_text("{}")  # a name in Latin-1
    with pytest.warns(LeftOut, match=r"5 files are left out: .*'r/caf\\udce9\.json' \(its name is no UTF-8\)"):
        assert files_here(mirror.here(f"file://{disk}")) == {"r/run.json"}


def test_a_file_that_is_a_folder_now_and_the_other_way_round(machine):
    put("r/a", "r/b/c")
    mirror.here(URL)
    del MemoryFileSystem.store["/bucket/runs/r/a"], MemoryFileSystem.store["/bucket/runs/r/b/c"]
    put("r/a/c", "r/b")
    mirror.forget()
    assert files_here(mirror.here(URL)) == {"r/a/c", "r/b"}


def test_a_mirror_whose_url_was_changed_is_refused(machine):
    place = runs_folder(URL) / mirror.NOTES / mirror.SOURCE
    place.write_text(json.dumps({"url": "memory://elsewhere/runs"}))
    with pytest.raises(BadCheckpoint, match=r"not the URL that .* was made for"):
        mirror.here(URL)
    with pytest.raises(BadCheckpoint, match="not the URL"):
        mirror.refresh(place.parents[1] / "r")


READER = """
import sys
from workbench.storage.mirror import here, reading
lease = reading(here(sys.argv[1]))
print("reading", flush=True)
sys.stdin.readline()
print(sorted(path.name for path in lease.path.rglob("*.safetensors")), flush=True)
"""


@pytest.mark.slow
def test_weights_that_another_process_reads_are_not_evicted(machine, tmp_path, monkeypatch):
    """Two processes, one cache, room for nothing: what the other reads stays, even when it ends badly, until it has ended."""
    for name in ("r", "s"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / "disk" / name / "run.json").write_text("{}")
        for shard in ("1", "2"):
            (tmp_path / "disk" / name / f"{shard}.safetensors").write_bytes(b"x" * 1000)
    monkeypatch.setenv(environment.CACHE_GB, "0.000000001")
    url = f"file://{tmp_path}/disk"
    with subprocess.Popen(
        [sys.executable, "-c", READER, f"{url}/r"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "reading\n"
        with mirror.reading(mirror.here(f"{url}/s")) as own:
            mirror.forget()
            mirror.trim(tmp_path / "disk")
            assert len(list(own.glob("*.safetensors"))) == 2, "another lease of this process counts as well"
        mirror.trim(tmp_path / "disk")
        assert not list(own.glob("*.safetensors"))
        answer, _ = reader.communicate("\n")
    assert answer == "['1.safetensors', '2.safetensors']\n"
    mirror.trim(tmp_path / "disk")
    assert not list(own.parent.rglob("*.safetensors"))


def test_weights_that_went_in_between_are_fetched_again(machine):
    put("r/run.json", "r/1.safetensors", "r/2.safetensors")
    place = mirror.fetch_all(mirror.here(f"{URL}/r"))
    (place / "1.safetensors").unlink()
    with mirror.reading(place):
        assert (place / "1.safetensors").exists()
