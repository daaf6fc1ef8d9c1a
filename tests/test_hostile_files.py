"""What has no end is not read, what is no file is not replaced, and a URL is no path: each is refused by name, and nothing waits."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

import dashboard
import pytest

from workbench.cli.dashboard_process import NOTE, running_note
from workbench.cli.list_tables import listing
from workbench.data import corpus
from workbench.errors import WorkbenchError
from workbench.file_io import MAX_TABLE, replacing, write_text
from workbench.measurement.models_and_data import sample_of
from workbench.runs.catalogue import catalogue
from workbench.runs.records import metrics_of, run_records
from workbench.runs.run import Run, list_runs
from workbench.runs.sqlite_index import INDEX
from workbench.runs.table_cache import TelemetryCache
from workbench.studies.demo import STATUS
from workbench.studies.study_file import read_study
from workbench.views.start import demo_status

ENDLESS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: (path.write_bytes(b""), os.truncate(path, MAX_TABLE + 1)),
}


def within(seconds, function):
    """What a call returns or raises; a failure where it has not by then."""
    outcome = []

    def call():
        try:
            outcome.append(function())
        except WorkbenchError as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits, or failed with a foreign error"
    return outcome[0]


READERS = {
    "r/run.json": lambda runs: list_runs(runs)[1]["r"],
    "r/./run.json": lambda runs: catalogue(runs).problems["r"],
    "r/tokenizer.json": lambda runs: Run.open(runs / "r").tokenizer,
    "r/telemetry/000000-000020.parquet": lambda runs: Run.open(runs / "r").telemetry(),
    "r/./telemetry/000000-000020.parquet": lambda runs: TelemetryCache().rows(catalogue(runs).entries)[1]["r"],
    "r/records/a-b.parquet": lambda runs: run_records(runs / "r"),
    "r/step_000000/config.json": lambda runs: Run.open(runs / "r").load(0),
    "corpus/documents.parquet": lambda runs: corpus.load_corpus(runs / "corpus"),
    "corpus/manifest.json": lambda runs: corpus.load_corpus(runs / "corpus"),
    "text.txt": lambda runs: corpus.from_files([runs / "text.txt"]),
    "study.toml": lambda runs: read_study(runs / "study.toml"),
}
"""A file, and who refuses it by name."""


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_refused_by_name(tmp_path, kind):
    dashboard.run(tmp_path, "r", "transformer", 0, "text", steps=(0,))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    for name, read in READERS.items():
        path = tmp_path / name
        before = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        ENDLESS[kind](path)
        told = str(within(20, lambda read=read: read(tmp_path)))
        assert "regular file" in told or "bytes" in told, (name, told)
        assert path.name in told or path.parent.name in told or kind == "large"
        path.unlink()
        if before is not None:
            path.write_bytes(before)


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_as_absent_where_it_only_saves_time(tmp_path, kind):
    dashboard.run(tmp_path, "r", "transformer", 0, "text", steps=())
    (tmp_path / "r" / "records").mkdir()
    for name in (INDEX, STATUS, NOTE, "r/records/a-b.parquet"):
        ENDLESS[kind](tmp_path / name)
    assert [e.name for e in within(20, lambda: catalogue(tmp_path)).entries] == ["r"]
    assert within(20, lambda: [demo_status(tmp_path), running_note(tmp_path, 8501)]) == [None, None]
    assert within(20, lambda: [metrics_of(tmp_path / "r")]) == [()]


def test_nothing_but_a_regular_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    for name, kind in (("pipe", stat.S_ISFIFO), ("link", stat.S_ISLNK)):
        with pytest.raises(WorkbenchError, match=f"cannot write .*{name}: it is there already and neither file nor"):
            write_text(tmp_path / name, "text")
        assert kind((tmp_path / name).lstat().st_mode)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "file").write_text("old")
    for name in ("nowhere", "file", "new"):
        write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_device_stays_a_device(tmp_path):
    device = tmp_path / "full"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("this machine's root makes no device nodes")
    with pytest.raises(WorkbenchError, match="cannot write"), replacing(device):
        pass
    assert stat.S_ISCHR(device.stat().st_mode)


@pytest.mark.parametrize("url", ["memory://runs", "s3://bucket/runs", "filecache::s3://bucket", "file:///tmp/runs"])
def test_text_and_pages_are_on_this_machine(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: sample_of(url, None, 1, None, 0), lambda: write_text(Path(url) / "page.html", "")):
        with pytest.raises(WorkbenchError, match="is a URL; here a path of this machine is needed"):
            call()
    with pytest.raises(WorkbenchError, match="filecache::s3:/bucket: one kind of storage, without"):
        catalogue("filecache::s3:/bucket")
    assert not list(tmp_path.iterdir())
    write_text(tmp_path / "s3:" / "file", "a folder of that name")


@pytest.mark.parametrize("note", ['{"pid": 1e400, "port": 1}', f'{{"pid": {10**40}, "port": 1}}', "[" * 100_000])
def test_a_note_of_no_dashboard_is_as_absent(tmp_path, note):
    (tmp_path / NOTE).write_text(note)
    assert running_note(tmp_path, 1) is None


@contextlib.contextmanager
def another_user(folder):
    """Nobody's files are closed to root, so root is somebody else meanwhile; `folder` can be reached."""
    root = os.geteuid() == 0
    before = {
        parent: parent.stat().st_mode for parent in (folder, *folder.parents) if root and parent.owner() == "root"
    }
    try:
        for parent in before:
            parent.chmod(before[parent] | 0o755)
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for parent, mode in before.items():
            parent.chmod(mode)


def test_a_closed_folder_is_named_beside_the_runs(tmp_path):
    for name in ("closed", "open"):
        dashboard.run(tmp_path, name, "transformer", 0, "text", steps=())
    listing("runs", tmp_path)  # imports what it needs
    (tmp_path / "closed").chmod(0o311)
    try:
        with another_user(tmp_path):
            rows, notes = listing("runs", tmp_path)
        assert [row["run"] for row in rows] == ["open"]
        assert any("closed cannot be listed: Permission denied" in note for note in notes)
    finally:
        (tmp_path / "closed").chmod(0o755)
