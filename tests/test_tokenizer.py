"""Round trips of hostile text, legible tokens, and windows that never leave their document."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from workbench.checkpoints.tokenizer_files import load_tokenizer
from workbench.data import tokenizer_limits
from workbench.data.corpus import Corpus, Document
from workbench.data.tokenizer import BOS, EOS, ForeignTokenizer, TokenDocuments, Tokenizer, tokenize, train_tokenizer
from workbench.errors import BadCheckpoint, BadData, UnknownName

ROOT = Path(__file__).parents[1]
TRAINING = ["def f(x):\n    return x + 1\n", "the cat and the hat sat on the mat; naïve café, das größte Übel\n"] * 20
HOSTILE = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\n\n\t\t \r\n\r",
    "a\0b\x01\x02\x7f\x85\xa0",
    "".join(map(chr, range(0x300))),
    "日本語のテキスト",
    "עברית العربية \u202e flipped \u202c",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \ufeff\ufffd\uffff\U0010ffff",
    "\u2028\u2029\u200b\u00ad",
    "<|endoftext|><|bos|><|endoftext|",
    "Ġ Ċ ĉ · ↵ → \\x00 \\n",
    "x" * 10_000,
    "don't I'll we've  'S",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TRAINING, 300)


@pytest.mark.parametrize("text", HOSTILE)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(2 <= i < tokenizer.vocab_size for i in ids)


def test_text_never_becomes_a_special_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for one in (tokenizer, Tokenizer.load(tmp_path / "tokenizer.json")):
        ids = one.encode(f"a{EOS}b{BOS}")
        assert one.eos_id not in ids
        assert one.bos_id not in ids
    assert (tokenizer.eos_id, tokenizer.bos_id) == (0, 1)
    assert tokenizer.decode([0, 1]) == EOS + BOS


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadData, match=r"half a character \('\\ud800'\) at position 2"):
        tokenizer.encode("ab\ud800")


def test_every_token_is_legible(tokenizer: Tokenizer) -> None:
    names = tokenizer.token_strings(range(tokenizer.vocab_size))
    assert all(name and name.isprintable() and " " not in name for name in names)
    assert names[:2] == [EOS, BOS]
    assert tokenizer.token_strings(torch.tensor(tokenizer.encode("\n"))) == ["↵"]


@pytest.mark.parametrize("bad", [-1, 300])
def test_unknown_ids_are_refused(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(BadData, match=f"token id {bad} is not in the vocabulary; ids go from 0 to 299"):
        tokenizer.decode([5, bad])
    with pytest.raises(BadData, match="ids go from 0 to 299"):
        tokenizer.token_strings([bad])


def test_impossible_vocabularies_are_refused() -> None:
    with pytest.raises(BadData, match="a vocabulary of 257 is too small"):
        train_tokenizer(TRAINING, 257)
    with pytest.raises(BadData, match=r"the text yields \d+ tokens, not 5000; ask for at most"):
        train_tokenizer(TRAINING, 5000)
    assert train_tokenizer(["no merges needed"], 258).vocab_size == 258


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.hash == tokenizer.hash
    assert all(again.encode(text) == tokenizer.encode(text) for text in HOSTILE)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("content", ["{}", None])
def test_damaged_tokenizers_are_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_a_truncated_or_foreign_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(BadCheckpoint):
        Tokenizer.load(path)
    path.write_text(text.replace(BOS, "<s>"), encoding="utf-8")
    with pytest.raises(BadCheckpoint):
        Tokenizer.load(path)


def test_training_is_the_same_in_other_processes(tokenizer: Tokenizer) -> None:
    command = f"from workbench.data.tokenizer import train_tokenizer; print(train_tokenizer({TRAINING!r}, 300).hash)"
    for seed, parallel in (("1", "true"),):
        run = subprocess.run(
            [sys.executable, "-c", command],
            env=os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel},
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert run.stdout.strip() == tokenizer.hash


# token streams


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [("train", "a", "the cat"), ("validation", "a", "x"), ("train", "b", "sat on the mat"), ("train", "b", EOS)]
    return Corpus(tuple(Document(f"s{i}", d, split, text) for i, (split, d, text) in enumerate(texts)), {})


@pytest.fixture(scope="module")
def stream() -> TokenDocuments:
    """Documents of 3, 8, 5, 8 and 20 tokens; a token says its document (tens) and its place (ones)."""
    lengths = [3, 8, 5, 8, 20]
    ids = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)]).astype(np.int32)
    return TokenDocuments(ids, np.cumsum([0, *lengths]), list("xxyyx"), [f"s{i}" for i in range(5)])


def test_documents_end_with_the_end_token(corpus: Corpus, tokenizer: Tokenizer) -> None:
    found = tokenize(corpus, tokenizer, "train")
    assert found.ids.dtype == np.int32
    assert [tokenizer.decode(found.document(i)) for i in range(3)] == ["the cat" + EOS, "sat on the mat" + EOS, EOS * 2]
    assert int((found.ids == tokenizer.eos_id).sum()) == 3
    assert not (found.ids == tokenizer.bos_id).any()
    assert (found.domains, found.sources) == (["a", "b", "b"], ["s0", "s2", "s3"])
    none = tokenize(Corpus((), {}), tokenizer, "train")
    assert (len(none.ids), len(none.domains)) == (0, 0)


def test_the_begin_token_is_an_option(corpus: Corpus, tokenizer: Tokenizer) -> None:
    plain, begun = tokenize(corpus, tokenizer, "train"), tokenize(corpus, tokenizer, "train", bos="first")
    for i in range(3):
        assert begun.document(i).tolist() == [tokenizer.bos_id, *plain.document(i).tolist()]
    with pytest.raises(UnknownName, match="bos option"):
        tokenize(corpus, tokenizer, "train", bos="every")  # type: ignore[arg-type]


def test_the_hash_follows_content(corpus: Corpus, tokenizer: Tokenizer) -> None:
    one, same = tokenize(corpus, tokenizer, "train"), tokenize(corpus, tokenizer, "train")
    assert one.hash == same.hash
    moved = TokenDocuments(one.ids, one.starts + np.array([0, 1, 0, 0]), one.domains, one.sources)
    renamed = TokenDocuments(one.ids, one.starts, ["z", "b", "b"], one.sources)
    assert len({one.hash, moved.hash, renamed.hash, tokenize(corpus, tokenizer, "validation").hash}) == 4


def test_chunks_are_a_view_without_the_remainder(stream: TokenDocuments) -> None:
    chunks = stream.chunks(10)
    assert chunks.shape == (4, 10)
    assert chunks.flatten().tolist() == stream.ids[:40].tolist()
    assert np.shares_memory(chunks, stream.ids)
    with pytest.raises(BadData, match="44 tokens fill no chunk of 45"):
        stream.chunks(45)
    with pytest.raises(BadData, match="a length of 1 tokens"):
        stream.chunks(1)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_never_cross_documents(stream: TokenDocuments, seed: int) -> None:
    ids, documents = stream.sequences(10, 5, seed=seed)
    assert ids.dtype == torch.int64
    assert sorted(documents) == [1, 2, 3, 4]
    for row, document in zip(ids.tolist(), documents, strict=True):
        assert row == list(range(row[0], row[0] + 5))
        assert row[0] // 100 == row[-1] // 100 == document


def test_every_start_occurs_and_the_seed_matters(stream: TokenDocuments) -> None:
    starts = {document: set() for document in (1, 2, 3, 4)}
    orders = set()
    for seed in range(200):
        ids, documents = stream.sequences(4, 5, seed=seed)
        orders.add(tuple(documents))
        for row, document in zip(ids[:, 0].tolist(), documents, strict=True):
            starts[document].add(row % 100)
    assert starts == {1: set(range(4)), 2: {0}, 3: set(range(4)), 4: set(range(16))}
    assert len(orders) == 24


def test_impossible_sequences_are_refused(stream: TokenDocuments) -> None:
    with pytest.raises(BadData, match="no document has 21 tokens; the longest has 20"):
        stream.sequences(4, 21, seed=0)
    with pytest.raises(BadData, match="no y document has 9 tokens; the longest has 8"):
        stream.sequences(4, 9, seed=0, domain="y")
    with pytest.raises(UnknownName, match="unknown domain 'z'; choose from x, y"):
        stream.sequences(4, 5, seed=0, domain="z")
    with pytest.raises(BadData, match="n is 0"):
        stream.sequences(0, 5, seed=0)
    with pytest.raises(BadData, match="seed is -1"):
        stream.sequences(1, 5, seed=-1)
    assert stream.sequences(1, 2, seed=0)[0].shape == (1, 2)
    with pytest.raises(BadData, match="a length of 1 tokens predicts nothing"):
        stream.sequences(1, 1, seed=0)


WORDS = ["the", " cat", " sat", "  ", "a", "b", "!", " 12", "\n", "é"]
"""Pieces of text on which limited and ordinary tokenizers are compared."""


def written(tokenizer: Tokenizer, folder: Path, **changes: object) -> Path:
    """The tokenizer.json of another library: ours with other settings and without our special tokens."""
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []} | changes))
    return path


def split_by(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "asked",
    [
        {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
                "pad_token": "x",
            }
        },
    ],
)  # fmt: skip
def test_a_text_is_neither_cut_nor_padded_whatever_the_file_asks_for(
    tokenizer: Tokenizer, tmp_path: Path, asked: dict, ours: bool
) -> None:
    special = {} if not ours else {"added_tokens": json.loads(tokenizer._backend.to_str())["added_tokens"]}
    text = TRAINING[0]
    assert load_tokenizer(written(tokenizer, tmp_path, **asked, **special)).encode(text) == tokenizer.encode(text)


PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?"
    r"[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+""",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[0-9][0-9][0-9]",
    r" {2,}",
    r"(?<=\d)(?=\d)",
]
OTHERS = [r"(a+)+$", r"a+b", r"\s+|(a|a)*b", r"(\w+\s?)*$", r"(.*)x", r"(", r"\s+(?!\S))|(a+)+$"]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_published_tokenizers_are_run_here(pattern: str) -> None:
    assert tokenizer_limits.linear(pattern)


@pytest.mark.parametrize("pattern", OTHERS)
def test_other_patterns_are_limited(pattern: str) -> None:
    assert not tokenizer_limits.linear(pattern)


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "a"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 60}}, "aa"),
        ({"normalizer": DOUBLING | {"pattern": {"Regex": "(a+)+$"}}}, "a" * 40 + "!"),
    ],
)
def test_a_tokenizer_that_explodes_is_a_named_error(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "SECONDS", 1)
    monkeypatch.setattr(tokenizer_limits, "MEMORY", 1 << 28)
    one = load_tokenizer(written(tokenizer, tmp_path, **settings))
    for _ in range(2 if text == "a" else 1):  # the next text has a worker of its own; the others take a second each
        with pytest.raises(BadData, match=r"this tokenizer (takes more than|cannot encode) .*another tokenizer\.json"):
            one.encode(text)


def test_a_limited_tokenizer_gives_the_ids_of_an_ordinary_one_and_leaves_no_process(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = [split_by(r"(?:[^\s]+\s?)+x?"), bytes_only]
    path = written(tokenizer, tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": parts})
    limited, ordinary = load_tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    assert isinstance(limited._backend, tokenizer_limits.LimitedBackend)
    for text in ("", "".join(WORDS), " ".join(WORDS * 9)):
        ids = limited.encode(text)
        assert ids == ordinary.encode(text).ids
        assert limited.decode(ids) == ordinary.decode(ids, skip_special_tokens=False)
    assert limited.vocab_size == ordinary.get_vocab_size()
    limited.save(tmp_path / "again.json")
    assert load_tokenizer(tmp_path / "again.json").hash == limited.hash
    worker = limited._backend._worker
    assert worker is not None
    del limited
    gc.collect()
    assert worker.poll() is not None


def test_a_panic_of_the_library_is_a_named_error() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(BadData, match="the text: of Rust"), tokenizer_limits.without_panics("the text"):
        raise PanicException("of Rust")
    with pytest.raises(KeyboardInterrupt), tokenizer_limits.without_panics("the text"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("limited", [False, True])
def test_the_start_token_of_a_template_is_found_also_of_a_tokenizer_with_limits(
    tokenizer: Tokenizer, tmp_path: Path, limited: bool
) -> None:
    template = tokenizers.processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    post = json.loads(template.__getstate__())
    slow = {"pre_tokenizer": split_by(r"(?:[^\s]+\s?)+x?")} if limited else {}
    path = written(tokenizer, tmp_path, post_processor=post, **slow)
    one = ForeignTokenizer(tokenizer_limits.open_backend(path.read_text()))
    assert isinstance(one._backend, tokenizer_limits.LimitedBackend) == limited
    assert one.start_token == 0
    assert getattr(one._backend, "_worker", None) is None, "no process is started for it"
