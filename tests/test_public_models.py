"""The table of public models: tiny random models of the same families in a fake Hub cache become rows; the page shows the table."""

from __future__ import annotations

import csv
import json
import warnings

import pytest
import strangers_page
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from workbench.checkpoints import hub
from workbench.cli import app
from workbench.data.corpus import from_files
from workbench.errors import ObservedInstead

SIZES = {"vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES = {
    "openai-community/gpt2": transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "EleutherAI/pythia-160m": transformers.GPTNeoXConfig(**SIZES, hidden_size=32, intermediate_size=48),
    "meta-llama/Llama-3.2-1B": transformers.LlamaConfig(**LLAMA),
    "Qwen/Qwen3-0.6B": transformers.Qwen3Config(**LLAMA, head_dim=8),
    "allenai/OLMo-2-0425-1B": transformers.Olmo2Config(**LLAMA),
    "HuggingFaceTB/SmolLM2-135M": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "openai/gpt-oss-20b": transformers.GptOssConfig(
        **LLAMA, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    ),
}  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Put a tiny random model of a family into a fake cache, under its own name and revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(strangers_page, "TABLE", tmp_path / "strangers.csv")
    monkeypatch.setattr(strangers_page, "PAGE", tmp_path / "strangers.md")
    monkeypatch.setattr(strangers_page, "DOCUMENTS", 4)
    monkeypatch.setattr(strangers_page, "T", 32)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"A short text of number {i}, with few words in it. " * 40)
    monkeypatch.setattr("workbench.data.corpus.embedded", lambda: from_files([tmp_path / "text"]))

    def put(name):
        revision = strangers_page.MODELS[name]
        home = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        folder = home / "snapshots" / revision
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(folder)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        backend.add_special_tokens(["<end>"])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(revision)

    return put


def measured(name, capsys):
    with pytest.raises(SystemExit) as end:
        strangers_page.main([f"{name}@{strangers_page.MODELS[name]}"])
    said = capsys.readouterr()
    assert end.value.code == 0, said.out + said.err
    return next(row for row in strangers_page.stored() if row["model"] == name)


def check(row, name):
    assert row["revision"] == strangers_page.MODELS[name]
    assert "2 × 4 heads" in row["architecture"]
    assert row["sinks"].startswith("0 of 8; ")
    for column in ("loss", "first", "drain", "peak", "identity", "zero", "token_mean"):
        assert "±" in row[column], (column, row[column])
    assert row["shuffled"] == "0 of 32" or row["shuffled"].endswith(" of 32")


@pytest.mark.slow
def test_a_model_in_the_cache_becomes_a_row_and_replaces_its_own(cache, capsys, monkeypatch):
    name = "openai-community/gpt2"
    cache(name)
    row = measured(name, capsys)
    check(row, name)
    assert "Coverage: attention of 2 of 2 layers" in row["coverage"]
    monkeypatch.setattr(strangers_page, "measure", lambda *_: row | {"loss": "1.0"})
    assert measured(name, capsys)["loss"] == "1.0"
    assert len(strangers_page.stored()) == 1
    page = strangers_page.PAGE.read_text()
    assert f"{name} @ 607a30d7" in page
    assert row["zero"] in page


@pytest.mark.slow
def test_the_command_says_what_a_measurement_covers(cache, tmp_path):
    cache("openai-community/gpt2")
    words = ["measure", "openai-community/gpt2", "-m", "loss", "-T", "32", "--text", str(tmp_path / "text"), "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObservedInstead)
        done = CliRunner().invoke(app, words)
    assert "Coverage: attention of 2 of 2 layers" in done.stderr, done.output
    assert json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_list_becomes_a_row(cache, capsys, name):
    cache(name)
    check(measured(name, capsys), name)


def test_the_page_shows_the_stored_rows():
    rows = strangers_page.stored()
    assert strangers_page.PAGE.read_text(encoding="utf-8") == strangers_page.page(rows)
    assert {"stories260K.bin", *strangers_page.SHIPPED} <= {row["model"] for row in rows}
    with strangers_page.TABLE.open(newline="", encoding="utf-8") as file:
        assert tuple(next(csv.reader(file))) == strangers_page.COLUMNS
    assert set(FAMILIES) == set(strangers_page.MODELS)
    assert all(len(revision) == 40 and hub.split(name) for name, revision in strangers_page.MODELS.items())
