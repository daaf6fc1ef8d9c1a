"""Names of the Hugging Face Hub: opened from this machine's cache, with revisions and series, and never from the network."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
import typer.testing

import workbench
from workbench.checkpoints import hub
from workbench.checkpoints.paths import identify, series
from workbench.cli import app
from workbench.errors import BadCheckpoint, ObservedInstead
from workbench.runs.checkpoint_import import import_run

IDS = torch.arange(12)[None] % 61


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(gpt2, tmp_path, monkeypatch):
    """A cache as the Hub's client lays it out: blobs, snapshots of links to them, and what revisions point to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for repo, ref in (
        ("gpt2", "main"),
        ("lab/tiny-model", "main"),
        ("lab/tiny-model", "step10"),
        ("lab/tiny-model", "step200"),
    ):
        home = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        commit = f"{abs(hash((repo, ref))):040x}"[:40]
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (home / "blobs").mkdir(exist_ok=True)
        for file in gpt2.iterdir():
            blob = home / "blobs" / f"{commit}-{file.name}"
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(blob)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
    return tmp_path / "hub"


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gpt2", "lab/tiny-model@step10", "models--lab--tiny-model"])
def test_a_name_in_the_cache_opens_as_its_folder_does(cache, gpt2, name):
    name = cache / name if name.startswith("models--") else name
    with pytest.warns(ObservedInstead):
        ours, theirs = workbench.load(name), workbench.load(gpt2)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS), atol=0, rtol=0)


def test_revisions_that_name_steps_are_a_series(cache):
    assert [step for step, _ in series("lab/tiny-model@step*")] == [10, 200]
    assert series("lab/tiny-model", "step*") == series("lab/tiny-model@step*")
    assert identify("lab/tiny-model@step*", 10).step == identify("lab/tiny-model@step10").step == 10


@pytest.mark.slow
def test_an_import_is_named_by_the_repository(cache, tmp_path):
    with pytest.warns(ObservedInstead):
        run = import_run("lab/tiny-model@step*", tmp_path / "runs")
    assert (run.path.name, run.steps) == ("tiny-model", [10, 200])


def test_a_revision_is_given_by_name_or_beside_it(cache, tmp_path):
    command = ["import", "lab/tiny-model", "--revision", "step10", "--runs", str(tmp_path / "runs")]
    with pytest.warns(ObservedInstead):
        assert typer.testing.CliRunner().invoke(app, command).exit_code == 0
    assert [run.name for run in (tmp_path / "runs").glob("*/step_*")] == ["step_000010"]
    asked = typer.testing.CliRunner().invoke(app, ["xray", "lab/tiny-model", "--revision", "step11"])
    assert "lab/tiny-model@step10" in str(asked.exception)


def test_a_folder_goes_before_a_name_of_the_hub(cache, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(gpt2, tmp_path / "gpt2")
    assert identify("gpt2").path.resolve() == (tmp_path / "gpt2").resolve()


@pytest.mark.parametrize("name", ["lab/tiny-modle", "lab/tiny-model@step11", "gpt3"])
def test_what_the_cache_does_not_hold_is_refused_with_what_it_holds_and_nothing_is_fetched(cache, name, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was tried"))
    with pytest.raises(BadCheckpoint, match=r"not in this machine's Hub cache; .*--download"):
        identify(name)


@pytest.mark.parametrize("text", ["../../etc/passwd", "a/b/c", "-x", "", "a@b@c", "C:\\x", "gpt2@../x"])
def test_what_cannot_be_a_name_is_not_looked_up(cache, text):
    assert hub.snapshot(text) is None
    assert hub.revisions(text) == {}


@pytest.mark.parametrize("held", ["../../../elsewhere", "/etc", "", "a b", b"\xff"])
def test_a_revision_of_the_cache_that_is_a_path_is_refused(cache, held):
    place = cache / "models--gpt2"
    (place / "refs" / "main").write_bytes(held if isinstance(held, bytes) else held.encode())
    with pytest.raises(BadCheckpoint, match=r"main (holds|cannot be read)"):
        identify(place)


def test_nothing_is_asked_of_the_hub_while_local_files_are_read():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with hub.offline():
        with hub.offline():
            assert constants.HF_HUB_OFFLINE
        assert constants.HF_HUB_OFFLINE
    assert before == constants.HF_HUB_OFFLINE


def test_without_a_cache_there_are_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert hub.names() == []
    with pytest.raises(BadCheckpoint, match="does not exist"):
        identify("gpt2")


# ---- fetching, where it is asked for ---------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository as the Hub's own interface tells of it: two branches, a README that nothing needs, the weights twice."""

    folder: ClassVar[Path]
    asked: ClassVar[list[str]]

    def do_GET(self):
        type(self).asked.append(self.path)
        commits = {"main": "a" * 40, "step10": "b" * 40}
        *_, revision = self.path.partition("?")[0].rpartition("/")
        names = [*sorted(p.name for p in self.folder.iterdir()), "README.md", "pytorch_model.bin"]
        if self.path.startswith("/api/models/lab/tiny/refs"):
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in commits.items()]
            self.answer(json.dumps({"branches": branches, "converts": [], "tags": []}).encode())
        elif self.path.startswith("/api/models/lab/tiny/tree") and revision in (*commits, *commits.values()):
            files = [{"type": "file", "path": name, "size": 1, "oid": "c" * 40} for name in names]
            self.answer(json.dumps(files).encode())
        elif self.path.startswith("/api/models/lab/tiny/revision") and revision in (*commits, *commits.values()):
            self.answer(json.dumps({"id": "lab/tiny", "sha": commits.get(revision, revision), "siblings": []}).encode())
        elif self.path.startswith("/lab/tiny/resolve/") and (file := self.folder / revision).is_file():
            commit = self.path.split("/")[4]
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(data, {"ETag": etag, "X-Repo-Commit": commits.get(commit, commit)})
        else:
            self.answer(b"{}", {"X-Error-Code": "RevisionNotFound" if "/tiny" in self.path else "RepoNotFound"}, 404)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, data, headers=None, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(gpt2, tmp_path, monkeypatch):
    """A server that plays the Hub, and an empty cache; what was asked of it."""
    kind = type("Served", (Hub,), {"folder": gpt2, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"),
    }.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    yield kind.asked
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_what_is_asked_for_is_fetched_once_without_what_no_model_needs(served, gpt2):
    (folder,) = hub.download("lab/tiny@step10")
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in gpt2.iterdir())
    assert not [path for path in served if "README" in path or path.endswith(".bin")]
    with pytest.warns(ObservedInstead):
        ours, theirs = workbench.load("lab/tiny@step10"), workbench.load(gpt2)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS), atol=0, rtol=0)


def test_the_revisions_of_a_pattern_are_fetched(served):
    hub.download("lab/tiny@step*")
    assert hub.names() == ["lab/tiny@step10"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("lab/tiny@step7*", "has no revision step7"), ("lab/tiny@step11", "RevisionNotFound"), ("lab/other", "RepositoryNotFound"),
     ("../x", "no name of the Hub")],
)  # fmt: skip
def test_what_is_not_there_to_fetch_is_said_in_a_sentence(served, name, said, tmp_path):
    with pytest.raises(BadCheckpoint, match=said):
        hub.download(name)
    assert not list((tmp_path / "hub").glob("models--*/snapshots/*/*"))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "command", [["generate", "lab/tiny", "--prompt", "3 1"], ["import", "lab/tiny"], ["xray", "lab/tiny"]]
)
def test_a_command_fetches_when_told_to_and_never_else(served, monkeypatch, command, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = typer.testing.CliRunner().invoke(app, command)
    assert isinstance(asked.exception, BadCheckpoint)
    assert served == []
    typer.testing.CliRunner().invoke(app, [*command, "--download"])
    assert hub.names() == ["lab/tiny"]
