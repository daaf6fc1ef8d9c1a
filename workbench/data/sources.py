"""Data sources: text, synthetic tasks and token files. Training batches are a function of (seed, step) alone.

Measuring reads at most one window per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from workbench.config import PRESETS
from workbench.data import corpus as corpora
from workbench.data.embedded import embedded
from workbench.data.tasks import BackcopyTokens, RepeatedTokens
from workbench.data.tokenizer import TokenDocuments, Tokenizer, tokenize, train_tokenizer
from workbench.errors import BadData, UnknownName
from workbench.files import digest, local, write_json


@dataclass(frozen=True)
class Sample:
    """Sequences to measure on: ids [n, T], the document of every sequence, a label and a content hash."""

    ids: Tensor
    documents: Sequence[int]
    label: str
    kind: str = "text"
    source: Any = None  # where training sequences of the same kind come from, if anywhere
    segments: Any = None  # the documents of each row where these are not whole: padding, packing (`Segments`)

    @cached_property
    def hash(self) -> str:
        """Content address of the ids and their documents."""
        return digest(self.ids.numpy().tobytes(), list(self.ids.shape), list(self.documents))


@runtime_checkable
class Data(Protocol):
    """Interface of a data source."""

    @property
    def kind(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def hash(self) -> str: ...
    @property
    def d_vocab(self) -> int: ...
    @property
    def domains(self) -> tuple[str, ...]: ...
    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor: ...
    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample: ...
    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]: ...
    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TextData:
    """A corpus and its tokenizer. `folder` is where `save_corpus` put them, named by the hash."""

    corpus: corpora.Corpus
    tokenizer: Tokenizer
    bos: Literal["first"] | None = None
    kind: str = "text"

    @cached_property
    def hash(self) -> str:
        """Content address of documents, tokenizer and the start-token option."""
        return digest(self.corpus.hash, self.tokenizer.hash, self.bos)

    @property
    def d_vocab(self) -> int:
        """Size of the vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the corpus."""
        return self.corpus.domains

    @cached_property
    def _train(self) -> TokenDocuments:
        return tokenize(self.corpus, self.tokenizer, "train", bos=self.bos)

    @cached_property
    def validation(self) -> TokenDocuments:
        """The validation documents as tokens."""
        return tokenize(self.corpus, self.tokenizer, "validation", bos=self.bos)

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        """Return the batch of a step [size, T]: packed chunks, shuffled each epoch by the seed."""
        return _chunks_of_step(self._train.chunks(T), step, size, seed)

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return at most one window of T tokens from each of n validation documents."""
        ids, documents = self.validation.sequences(n, T, seed=seed, domain=domain)
        return Sample(ids, documents, f"validation/{domain}" if domain else "validation")

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return further training metrics of the loss per token [batch, T - 1]: none for text."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the description of the data in `run.json`."""
        return {"kind": "text", "hash": self.hash, "bos": self.bos, "domains": list(self.domains)}

    def save(self, root: Path) -> Path:
        """Save corpus and tokenizer in `root/<hash>`, unless they are there."""
        folder = root / self.hash
        if not (folder / "data.json").exists():
            corpora.save_corpus(self.corpus, folder)
            self.tokenizer.save(folder / "tokenizer.json")
            write_json(folder / "data.json", self.describe())
        return folder


def _chunks_of_step(chunks: np.ndarray, step: int, size: int, seed: int) -> Tensor:
    epochs, places = divmod(np.arange(step * size, (step + 1) * size), len(chunks))
    picked = [chunks[_order(len(chunks), seed, int(epoch))[i]] for epoch, i in zip(epochs, places, strict=True)]
    return torch.from_numpy(np.stack(picked).astype(np.int64))


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    if seed < 0:
        raise BadData(f"seed is {seed}; give a whole number of at least 0")
    return np.random.default_rng([seed, epoch, 7]).permutation(n)


class _TokensAlone:
    """Base class of sources without text, with one domain."""

    kind: str
    vocabulary: int
    domains: tuple[str, ...]
    hash: Any  # a property of each source

    @property
    def tokenizer(self) -> None:
        """Return None: the tokens have no text."""
        return

    @property
    def d_vocab(self) -> int:
        """Size of the vocabulary."""
        return self.vocabulary

    def _refuse_other(self, domain: str | None) -> None:
        if domain not in (None, *self.domains):
            raise UnknownName("domain", domain, self.domains)

    def _described(self, **options: Any) -> dict[str, Any]:
        facts = {"kind": self.kind, "hash": self.hash, "vocabulary": self.d_vocab, **options}
        return facts | {"domains": list(self.domains)}


@dataclass(frozen=True)
class RepeatedData(_TokensAlone):
    """Repeated random tokens with period T / 2, or a period drawn from shortest..T / 2 in training."""

    vocabulary: int = 64
    shortest: int | None = None
    kind: str = "repeated"
    domains: tuple[str, ...] = ("repeated",)

    def _task(self, T: int) -> RepeatedTokens:
        if T % 2 or T < 4:
            raise BadData(f"T={T}: repeated sequences need an even length of at least 4")
        return RepeatedTokens(vocabulary=self.vocabulary, period=T // 2, shortest=self.shortest)

    @property
    def hash(self) -> str:
        """Content address of the task."""
        return digest("repeated", self.vocabulary, self.shortest)

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        """Return the batch of a step [size, T]."""
        return self._task(T).batch(step, size, seed)

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return validation sequences, each a document."""
        self._refuse_other(domain)
        return Sample(self._task(T).validation(n, seed), range(n), "validation", "repeated")

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return `copy_loss`: the mean loss in the second half from its second token on."""
        return {"copy_loss": per_token[:, (per_token.shape[1] + 1) // 2 :].mean()}

    def describe(self) -> dict[str, Any]:
        """Return the description of the data in `run.json`."""
        return self._described(shortest=self.shortest)


@dataclass(frozen=True)
class BackcopyData(_TokensAlone):
    """A bigram chain with trigger tokens, after which the token before them is copied; id 0 starts all sequences or none."""

    vocabulary: int = 64
    triggers: int = 4
    start: bool = True
    kind: str = "backcopy"
    domains: tuple[str, ...] = ("backcopy",)

    @cached_property
    def _task(self) -> BackcopyTokens:
        return BackcopyTokens(vocabulary=self.vocabulary, triggers=self.triggers, start=self.start)

    @property
    def hash(self) -> str:
        """Content address of the task."""
        return self._task.hash

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        """Return the batch of a step [size, T]."""
        return self._task.batch(step, size, T, seed)

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return validation sequences, each a document."""
        self._refuse_other(domain)
        return Sample(self._task.validation(n, T, seed), range(n), "validation", "backcopy", self)

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return `copy_loss`, the mean loss of tokens after a trigger (NaN without any), and `chain_loss`, of all others."""
        copied = self._task.is_trigger(tokens[:, :-1])
        return {"copy_loss": per_token[copied].mean(), "chain_loss": per_token[~copied].mean()}

    def describe(self) -> dict[str, Any]:
        """Return the description of the data in `run.json`."""
        return self._described(triggers=self.triggers, bos="first" if self.start else None)


HEADERS = {20240520: (1, 2), 20240801: (7, 4)}  # magic -> (version, bytes of an id), as llm.c and modded-nanogpt write
HEADER = 1024  # bytes: 256 int32, of which magic, version and the number of ids are used


@dataclass(frozen=True, eq=False)
class TokenData(_TokensAlone):
    """Token ids of `.bin` files, training and validation side, without text and documents."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    files: tuple[str, ...]
    kind: str = "tokens"
    domains: tuple[str, ...] = ("tokens",)

    @cached_property
    def hash(self) -> str:
        """Content address of the ids of both sides."""
        sha = hashlib.sha256()
        for ids in (self.train, self.validation):
            for begin in range(0, len(ids), 1 << 22):  # a piece at a time: the files may be larger than memory
                sha.update(np.ascontiguousarray(ids[begin : begin + (1 << 22)], dtype="<u4"))
        return digest(sha.hexdigest(), len(self.train), self.d_vocab)

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        """Return the batch of a step [size, T]: full chunks, shuffled each epoch by the seed."""
        return _chunks_of_step(_windows(self.train, T), step, size, seed)

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return at most n windows of T tokens without overlap, each a document."""
        self._refuse_other(domain)
        windows = _windows(self.validation, T)
        order = _order(len(windows), seed, 0)[:n]
        return Sample(torch.from_numpy(windows[order].astype(np.int64)), [int(i) for i in order], "validation")

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return further training metrics of the loss per token [batch, T - 1]: none."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the description of the data in `run.json`."""
        return self._described(files=list(self.files))


def _windows(ids: np.ndarray, T: int) -> np.ndarray:
    if T < 2 or len(ids) < T:
        raise BadData(f"{len(ids)} tokens fill no window of {T}; choose a length of 2 to {len(ids)}")
    return ids[: len(ids) // T * T].reshape(-1, T)


def open_tokens(paths: Sequence[str | Path], vocabulary: int | None) -> TokenData:
    """Return the token ids of `.bin` files; the validation side is the files named `val...`, or the last tenth of a single file."""
    if vocabulary is None:
        raise BadData(f"{paths[0]}: ids alone do not say their vocabulary; give its size (vocabulary=, --vocabulary)")
    files = [local(path).resolve() for path in paths]
    held_out = [f for f in files if "val" in f.name.lower()] if len(files) > 1 else []
    ids = {f: read_tokens(f, vocabulary) for f in files}
    train = [ids[f] for f in files if f not in held_out]
    if not train:
        raise BadData(f"all of {', '.join(f.name for f in files)} are named as validation; name a training file too")
    joined = train[0] if len(train) == 1 else np.concatenate(train)
    if held_out:
        return TokenData(joined, np.concatenate([ids[f] for f in held_out]), vocabulary, tuple(map(str, files)))
    cut = len(joined) - len(joined) // 10
    return TokenData(joined[:cut], joined[cut:], vocabulary, tuple(map(str, files)))


def read_tokens(path: Path, vocabulary: int) -> np.ndarray:
    """Return the ids [n] of a `.bin` file as a memory map; two or four bytes each, by its header or the vocabulary.

    Raises `BadData` for files that are cut off and ids outside the vocabulary.
    """
    if not path.is_file():
        raise BadData(f"{path} does not exist; give a .bin file of token ids")
    size, start = path.stat().st_size, 0
    head = np.fromfile(path, "<i4", 3)
    width, header = 2 if vocabulary <= 2**16 else 4, len(head) == 3 and size >= HEADER and int(head[0]) in HEADERS
    if header:
        version, width = HEADERS[int(head[0])]
        start, count = HEADER, int(head[2])
        if int(head[1]) != version or size != HEADER + count * width:
            what = f"version {head[1]} and {count} ids"
            raise BadData(f"{path} says {what}, which its {size} bytes do not hold: it is cut off")
    if size <= start or (size - start) % width:
        raise BadData(f"{path}: {size} bytes are no ids of {width} bytes, the width of a vocabulary of {vocabulary}")
    ids = np.memmap(path, f"<u{width}", "r", start)
    for begin in range(0, len(ids), 1 << 24):
        if (high := int(ids[begin : begin + (1 << 24)].max())) >= vocabulary:
            raise BadData(
                f"{path} holds id {high}, outside the vocabulary 0..{vocabulary - 1}: it belongs to another tokenizer, or its "
                f"ids are not {width} bytes wide"
            )
    return ids


def prepare(
    *, texts: Sequence[str | Path] | None = None, vocabulary: int | None = None, bos: Any = None,
    root: Path | None = None, max_bytes: int | None = None,
) -> TextData:  # fmt: skip
    """Return a corpus with a tokenizer of its training side.

    Args:
        texts: Files, folders or datasets; the embedded text unless given.
        vocabulary: Size of the tokenizer; the `tiny` preset's unless given.
        bos: "first" begins each document with a start token.
        root: Folder to save the data in.
        max_bytes: Size of a sample of the embedded text; all of it unless given.
    """
    if bos not in (None, "first"):
        raise UnknownName("bos option", bos, ["first"])
    corpus = corpora.from_files([Path(t) for t in texts]) if texts else embedded(max_bytes)
    training = (document.text for document in corpus.split("train"))
    data = TextData(corpus, train_tokenizer(training, vocabulary or PRESETS["tiny"].vocabulary), bos)
    if root is not None:
        data.save(root)
    return data
