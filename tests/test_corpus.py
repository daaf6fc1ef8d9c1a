"""Documents, their split and their refusals; most of them of the embedded text."""

from pathlib import Path

import numpy as np
import pytest

from workbench.data import corpus as corpora
from workbench.data.corpus import Corpus, Document, embedded, from_files, load_corpus, pieces, save_corpus
from workbench.data.tokenizer import TokenDocuments, tokenize, train_tokenizer
from workbench.errors import BadData, UnknownName
from workbench.places import SHIPPED

SMALL = 500_000


@pytest.fixture(scope="module")
def small() -> Corpus:
    return embedded(SMALL)


def prose(name: str, words: int = 900) -> str:
    """Paragraphs of numbered words, all different from each other and between names."""
    return "\n\n".join(" ".join(f"{name}{i + j}" for j in range(20)) for i in range(0, words, 20)) + "\n"


def test_a_source_lies_on_one_side(small: Corpus) -> None:
    train, validation = ({d.source for d in small.split(side)} for side in ("train", "validation"))
    assert not train & validation
    assert 0.02 < len(validation) / len(train | validation) < 0.25


def token_windows(stream: TokenDocuments, width: int = 50) -> np.ndarray:
    """Each window of 50 tokens inside a document as one number."""
    hashes = np.zeros(len(stream.ids) - width + 1, dtype=np.uint64)
    for offset in range(width):
        hashes = hashes * np.uint64(6364136223846793005) + stream.ids[offset : offset + len(hashes)].astype(np.uint64)
    place = np.arange(len(hashes))
    owner = np.searchsorted(stream.starts, place, side="right") - 1
    return hashes[place + width <= stream.starts[owner + 1]]


@pytest.mark.slow
def test_train_and_validation_hardly_overlap(small: Corpus) -> None:
    tokenizer = train_tokenizer((d.text for d in small.split("train")), 512)
    train, validation = (token_windows(tokenize(small, tokenizer, side)) for side in ("train", "validation"))
    assert len(validation) > 1000
    assert np.isin(validation, train).mean() < 0.005


def test_a_tiny_budget_and_an_unknown_split_are_refused(small: Corpus) -> None:
    with pytest.raises(BadData, match="max_bytes is 10; give at least 100000"):
        embedded(10)
    with pytest.raises(UnknownName, match="unknown split 'valid'; did you mean validation"):
        small.split("valid")


# the embedded text


def test_the_embedded_text_is_pinned_whatever_python_runs() -> None:
    corpus = embedded()
    assert corpus.hash == "9d5264c458aafc94bf7eba36206df6051e17febde4fb6d34869ee2f60d74bc7f"
    assert [len(corpus.split(side)) for side in ("train", "validation")] == [730, 87]
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (SHIPPED / "corpus" / "LICENSE.txt").read_text()


# repeats


def test_repeats_are_dropped_and_validation_loses() -> None:
    shared, own = prose("shared", 200), prose("own", 400)
    documents = [Document("v", "text", "validation", shared + "\n" + own), Document("t", "text", "train", shared)]
    corpus = corpora.without_repeats(documents, {})
    assert [d.text for d in corpus.split("train")] == [shared]
    assert [d.text for d in corpus.split("validation")] == [own]


def test_half_new_paragraphs_stay_in_train_only() -> None:
    old, new = (" ".join(f"{name}{i}" for i in range(60)) for name in ("old", "new"))
    first = Document("a", "text", "train", old)
    kept = corpora.without_repeats([first, Document("b", "text", "train", f"{old} {new} {new.upper()}"), other()], {})
    assert [d.source for d in kept.documents] == ["a", "b", "c"]
    lost = corpora.without_repeats(
        [first, Document("b", "text", "validation", f"{old} {new} {new.upper()}"), other()], {}
    )
    assert [d.source for d in lost.documents] == ["a", "c"]


def other() -> Document:
    return Document("c", "text", "validation", prose("c", 100))


# the user's files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"abc\0def" * 9000, "binary .a NUL byte at offset 3."),
        (b"caf\xe9 " * 9000, "not UTF-8 .byte offset 3."),
        (b"hello\n" * 10, "60 bytes of text in 1 files are too little"),
        (b"the same line again and again and again\n\n" * 2000, "once repeats are dropped"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(data)
    with pytest.raises(BadData, match=message):
        from_files([path])


def test_bad_paths_and_shares_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadData, match=r"nowhere\.txt does not exist"):
        from_files([tmp_path / "nowhere.txt"])
    with pytest.raises(BadData, match="no text in"):
        from_files([tmp_path])
    with pytest.raises(BadData, match="no text in no paths"):
        from_files([])
    with pytest.raises(BadData, match=r"validation is 1\.5"):
        from_files([tmp_path], validation=1.5)
    (tmp_path / "a.txt").write_text(prose("w", 9000), encoding="utf-8")
    monkeypatch.setattr(corpora, "MAX_CORPUS", 1000)
    with pytest.raises(BadData, match="more than 1000 bytes"):
        from_files([tmp_path])


@pytest.mark.parametrize("text", ["", "x" * 40_000, "word " * 9000, "é" * 16_001])
def test_pieces_are_the_text(text: str) -> None:
    found = pieces(text)
    assert "".join(found) == text
    assert all(0 < len(piece) <= 16_000 for piece in found)
    if "\n" in text:
        assert all(piece.endswith("\n") for piece in found)
    elif " " in text:
        assert all(piece.endswith(" ") for piece in found)


# the cache


def test_save_and_load(tmp_path: Path, small: Corpus) -> None:
    save_corpus(small, tmp_path / "cache")
    again = load_corpus(tmp_path / "cache")
    assert again == small
    assert again.hash == small.hash
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["documents.parquet", "manifest.json"]


@pytest.mark.parametrize("damage", ["documents.parquet", "manifest.json", "swap"])
def test_a_damaged_cache_is_refused(tmp_path: Path, small: Corpus, damage: str) -> None:
    few = Corpus(small.documents[:3], {})
    save_corpus(few, tmp_path)
    if damage == "swap":
        manifest = (tmp_path / "manifest.json").read_bytes()
        save_corpus(Corpus(small.documents[:2], {}), tmp_path)
        (tmp_path / "manifest.json").write_bytes(manifest)
    else:
        (tmp_path / damage).write_bytes((tmp_path / damage).read_bytes()[:20])
    with pytest.raises(BadData, match="build it again"):
        load_corpus(tmp_path)
    with pytest.raises(BadData, match="build it again"):
        load_corpus(tmp_path / "nothing")
