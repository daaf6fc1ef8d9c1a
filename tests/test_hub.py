"""Names of the Hugging Face Hub: opened from this machine's cache, with revisions and series, and never from the network."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

import workbench
from workbench.checkpoints import hub
from workbench.checkpoints.identify import identify, series
from workbench.errors import BadCheckpoint, ObservedInstead
from workbench.runs.importing import import_run

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


@pytest.mark.parametrize("name", ["gpt2", "lab/tiny-model", "lab/tiny-model@step10"])
def test_a_name_in_the_cache_opens_as_its_folder_does(cache, gpt2, name):
    with pytest.warns(ObservedInstead):
        ours, theirs = workbench.load(name), workbench.load(gpt2)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS), atol=0, rtol=0)


def test_revisions_that_name_steps_are_a_series(cache):
    assert [step for step, _ in series("lab/tiny-model@step*")] == [10, 200]
    assert identify("lab/tiny-model@step*", 10).step == identify("lab/tiny-model@step10").step == 10


def test_an_import_is_named_by_the_repository(cache, tmp_path):
    with pytest.warns(ObservedInstead):
        run = import_run("lab/tiny-model@step*", tmp_path / "runs")
    assert (run.path.name, run.steps) == ("tiny-model", [10, 200])


def test_a_folder_goes_before_a_name_of_the_hub(cache, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(gpt2, tmp_path / "gpt2")
    assert identify("gpt2").path.resolve() == (tmp_path / "gpt2").resolve()


@pytest.mark.parametrize("name", ["lab/tiny-modle", "lab/tiny-model@step11", "gpt3"])
def test_what_the_cache_does_not_hold_is_refused_with_what_it_holds_and_nothing_is_fetched(cache, name, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was tried"))
    with pytest.raises(BadCheckpoint, match="not in the cache here"):
        identify(name)


@pytest.mark.parametrize("text", ["../../etc/passwd", "a/b/c", "-x", "", "a@b@c", "C:\\x"])
def test_what_cannot_be_a_name_is_not_looked_up(cache, text):
    assert hub.snapshot(text) is None
    assert hub.revisions(text) == {}


def test_without_a_cache_there_are_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert hub.names() == []
    with pytest.raises(BadCheckpoint, match="does not exist"):
        identify("gpt2")
