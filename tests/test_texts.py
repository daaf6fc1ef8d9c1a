"""Tables, datasets and token files as data: rows become documents, ids keep their width, and what does not fit is named."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import workbench
from workbench.claims.collect_evidence import has_start_tokens
from workbench.config import PRESETS, ModelConfig
from workbench.data import data_sources
from workbench.data.corpus import dataset_rows, from_files, joined, read_documents
from workbench.data.data_sources import open_data, open_tokens, prepare
from workbench.data.example_prompts import examples
from workbench.data.token_shards import read_tokens
from workbench.errors import BadCheckpoint, BadData
from workbench.measurement.models_and_data import Subject, sample_of
from workbench.models.hooked import next_token_loss
from workbench.prompts.prompt import tokenise
from workbench.training.loop import train

PROSE = ["\n\n".join(" ".join(f"{name}{i + j}" for j in range(20)) for i in range(0, 900, 20)) for name in "abcdefgh"]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The same rows as text lines of JSON, as Parquet (its only text), and as a folder that `datasets` reads."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(PROSE))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "set" / "train.jsonl").write_text(rows)
    pd.DataFrame({"id": range(len(PROSE)), "body": PROSE}).to_parquet(tmp_path / "rows.parquet")
    return tmp_path


def test_rows_of_tables_and_datasets_are_the_same_documents(tables):
    found = [read_documents([where])[0] for where in (tables / "rows.jsonl", tables / "rows.parquet")]
    found.append(read_documents([f"datasets:{tables}/set"])[0])
    for documents in found:
        assert [d.text for d in documents] == [d.text for d in found[0]]
        assert "\n".join(d.text for d in documents).replace("\n", "") == "".join(PROSE).replace("\n", "")
    assert {d.domain for d in found[2]} == {"set"}
    assert len(read_documents([f"datasets:{tables}/set:train[:2]", tables / "rows.jsonl"])[1]) == 2
    size = len("".join(PROSE).encode())
    assert len(dataset_rows(f"datasets:{tables}/set", size)[1]) == len(PROSE)
    with pytest.raises(BadData, match=f"more than {size - 1} bytes of text; take a part"):
        dataset_rows(f"datasets:{tables}/set", size - 1)


@pytest.mark.slow
def test_an_installed_package_is_a_text_with_version_licence_and_hashes(tmp_path):
    data = prepare(texts=["installed:pluggy"], vocabulary=300, root=tmp_path)
    package = importlib.metadata.distribution("pluggy")
    manifest = data.corpus.manifest
    assert manifest["packages"] == {"pluggy": {"version": package.version, "licence": "MIT"}}
    code = next(file for file in manifest["files"] if file["source"].endswith("pluggy/_hooks.py"))
    content = Path(str(package.locate_file("pluggy/_hooks.py"))).read_bytes()
    assert (code["sha256"], code["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    assert data.domains == ("pluggy",)
    assert 150_000 < len(joined(d.text for d in from_files(["installed:numpy"], max_bytes=200_000).documents)) < 210_000
    with pytest.raises(BadData, match="no package 'no-such-package' is installed here"):
        from_files(["installed:no-such-package"])


@pytest.mark.slow
def test_ids_are_kept_beside_a_corpus_and_made_again_once_damaged(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("\n\n".join(PROSE))
    data = prepare(texts=[tmp_path / "book.txt"], vocabulary=270, bos="first", root=tmp_path)
    first, kept = data.train, data.folder / "train.parquet"
    with monkeypatch.context() as without:
        without.setattr("workbench.data.data_sources.tokenize", None)
        assert open_data(data.describe(), tmp_path).train.hash == first.hash
    content = kept.read_bytes()
    for place in {*range(0, len(content), len(content) // 4), len(content) - 6, len(content) - 100}:  # the footer too
        kept.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        data_sources._text_data.cache_clear()
        assert open_data(data.describe(), tmp_path).train.hash == first.hash
    assert kept.read_bytes() == content


def test_every_sequence_begins_with_a_start_token_in_training_measurement_and_prompts(tmp_path):
    (tmp_path / "book.txt").write_text("\n\n".join(PROSE))
    plain, data = (
        prepare(texts=[tmp_path / "book.txt"], vocabulary=270, bos=bos, root=tmp_path) for bos in (None, "each")
    )
    start = data.tokenizer.bos_id
    batch, sample = data.batch(3, 4, 16, 1), data.sample(4, 16)
    assert batch[:, 0].tolist() == [start] * 4
    assert sample.ids[:, 0].unique().tolist() == [start]
    assert torch.equal(batch[:, 1:], plain.batch(3, 4, 15, 1)), "the same text as without, in chunks one token shorter"
    assert torch.equal(sample.ids[:, 1:], plain.sample(4, 15).ids)
    assert not (data.train.ids == start).any()

    recipe = PRESETS["tiny"].train.replace(steps=1, batch=2, T=16, warmup=1)
    config = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=32, d_vocab=270, n_ctx=32)
    run = train("transformer", data, name="started", runs=tmp_path, model=config, train=recipe)
    model = run.load()
    text = [start, *data.tokenizer.encode("a1 b2")]
    assert model.to_tokens("a1 b2").tolist() == [text]
    assert model.to_tokens("a1 b2", prepend_bos=False).tolist() == [text[1:]]
    assert tokenise(model, "a1 b2").ids.tolist() == [text]
    assert model.to_single_token("a") == data.tokenizer.encode("a")[0]
    for other in (PROSE[0][:40], str(tmp_path / "book.txt")):  # texts that it was not trained on
        assert sample_of(other, Subject(run, 1), 4, 8, 0).ids[:, 0].unique().tolist() == [start]
        assert sample_of(other, Subject(in_hand=model), 4, 8, 0).ids[:, 0].unique().tolist() == [start]
    expected = next_token_loss(model(torch.tensor([text])), torch.tensor([text])).item()
    assert workbench.measure(run, "loss", "a1 b2")["value"].item() == pytest.approx(expected, abs=1e-6)


def test_a_start_token_per_document_stands_anywhere_so_such_runs_are_no_arm_of_a_comparison():
    assert [has_start_tokens({"kind": "text", "bos": bos}) for bos in (None, "each")] == [False, True]
    assert math.isnan(has_start_tokens({"kind": "text", "bos": "first"}))
    assert [has_start_tokens({"kind": "backcopy", **bos}) for bos in ({}, {"bos": "first"}, {"bos": None})] == [
        True,
        True,
        False,
    ]


def test_a_table_trains_and_measures(tables, tiny):
    data = prepare(texts=[tables / "rows.jsonl"], vocabulary=270)
    assert data.batch(0, 2, 16, 0).shape == (2, 16)
    model = tiny(config={"d_vocab": 270})
    model.tokenizer = data.tokenizer
    frames = [
        workbench.measure(model, "loss", str(where), T=16, n=4)
        for where in (tables / "rows.jsonl", tables / "rows.parquet", f"datasets:{tables}/set")
    ]
    assert all(len(frame) == 1 and frame["n"].item() == 4 for frame in frames)
    assert frames[0]["value"].item() == frames[1]["value"].item() == frames[2]["value"].item()


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.jsonl", b'{"text": "x"}\n{', "line 2, is no JSON"),
        ("a.jsonl", b'{"body": "x", "title": "y"}', r"line 1: which column is the text\?"),
        ("a.jsonl", b"[1]", "line 1, is a list"),
        ("a.jsonl", b"\xff", "line 1, is no JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 holds half a character"),
        ("a.jsonl", b"\n", "holds no text"),
        ("a.jsonl", b"[" * 100_000, "line 1, is no JSON"),
        ("a.parquet", b"PAR1", "damaged or no Parquet file"),
    ],
)
def test_tables_that_do_not_fit_are_named(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadData, match=told):
        from_files([tmp_path / name])


def test_a_table_without_one_text_column_is_refused(tmp_path):
    pd.DataFrame({"question": ["a"], "answer": ["b"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadData, match="which column is the text"):
        from_files([tmp_path / "a.parquet"])
    pd.DataFrame({"n": [1]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(BadData, match="which column is the text"):
        from_files([tmp_path / "a.parquet"])


def test_a_dataset_that_cannot_be_had_is_named(tmp_path):
    with pytest.raises(BadData, match=r"the dataset '.*nowhere' cannot be loaded"):
        from_files([f"datasets:{tmp_path}/nowhere"])
    with pytest.raises(BadData, match="names no dataset; write datasets:NAME"):
        from_files(["datasets:"])


def test_example_prompts_that_are_no_utf8_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "prompts.toml").write_bytes(b"[[prompts]]\ntext = '\xb1'")
    monkeypatch.setattr("workbench.data.example_prompts.SHIPPED", tmp_path)
    examples.cache_clear()
    with pytest.raises(BadData, match=r"prompts\.toml holds no prompts .*utf-8"):
        examples()


# ---- token files -----------------------------------------------------------------------------------------------------

IDS = np.random.default_rng(0).integers(0, 61, 1000)


def headed(ids, magic, version, width):
    """A file as llm.c and modded-nanogpt write it."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids)
    return head.tobytes() + ids.astype(f"<u{width}").tobytes()


@pytest.mark.parametrize(
    ("data", "vocabulary"),
    [(IDS.astype("<u2").tobytes(), 61), (IDS.astype("<u4").tobytes(), 2**16 + 1), (headed(IDS, 20240801, 7, 4), 61)],
)
def test_the_width_of_ids_comes_from_the_header_or_the_vocabulary(tmp_path, data, vocabulary):
    (tmp_path / "a.bin").write_bytes(data)
    assert np.array_equal(read_tokens(tmp_path / "a.bin", vocabulary), IDS)


@pytest.mark.parametrize(
    ("data", "vocabulary", "told"),
    [
        (IDS.astype("<u2").tobytes()[:-1], 61, "1999 bytes are no ids of 2 bytes"),
        (
            IDS.astype("<u2").tobytes(),
            60,
            r"holds id 60, outside the vocabulary 0\.\.59: it belongs to another tokenizer",
        ),
        (IDS.astype("<u2").tobytes(), 2**17, "outside the vocabulary|ids of 4 bytes"),
        (headed(IDS, 20240520, 9, 2), 61, "says version 9"),
        (b"", 61, "0 bytes are no ids"),
    ],
)
def test_token_files_that_do_not_fit_are_refused(tmp_path, data, vocabulary, told):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(BadData, match=told):
        read_tokens(tmp_path / "a.bin", vocabulary)


def test_token_files_train_measure_and_are_found_again(tmp_path, tiny):
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    IDS[::-1].astype("<u2").tofile(tmp_path / "val.bin")
    data = open_tokens([tmp_path / "train.bin", tmp_path / "val.bin"], 61)
    assert (len(data.train), len(data.validation)) == (1000, 1000)
    epoch = torch.cat([data.batch(step, 10, 20, seed=3) for step in range(5)])
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, IDS.reshape(50, 20).tolist()))
    sample = data.sample(7, 20, seed=1)
    assert [row.tolist() for row in sample.ids] == [IDS[::-1].reshape(50, 20)[i].tolist() for i in sample.documents]
    again = open_data(data.describe(), tmp_path)
    assert again.hash == data.hash
    frame = workbench.measure(tiny(), "loss", str(tmp_path / "val.bin"), T=20, n=7)
    assert frame["n"].item() == 7
    IDS[:-1].astype("<u2").tofile(tmp_path / "val.bin")
    with pytest.raises(BadCheckpoint, match="no longer what this run was trained on"):
        open_data(data.describe(), tmp_path)


def test_one_token_file_gives_both_sides_and_needs_its_vocabulary(tmp_path):
    IDS.astype("<u2").tofile(tmp_path / "all.bin")
    data = open_tokens([tmp_path / "all.bin"], 61)
    assert np.array_equal(np.concatenate([data.train, data.validation]), IDS)
    assert len(data.validation) == 100
    with pytest.raises(BadData, match="do not say their vocabulary"):
        open_tokens([tmp_path / "all.bin"], None)
    with pytest.raises(BadData, match="fill no window of 500"):
        data.sample(1, 500)


def test_a_run_trained_on_token_files_measures_on_them(tmp_path, tiny):
    from workbench.training.loop import train

    IDS.astype("<u2").tofile(tmp_path / "all.bin")
    recipe = workbench.TrainConfig(steps=2, batch=2, T=16, warmup=1, validation_sequences=2)
    run = train(
        "transformer", open_tokens([tmp_path / "all.bin"], 61), name="ids", runs=tmp_path / "runs", model=tiny().config,
        train=recipe, seed=0,
    )  # fmt: skip
    assert workbench.measure(run, "loss", n=3)["n"].item() == 3
