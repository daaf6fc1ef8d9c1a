"""Data sources: text, synthetic tasks and token files, made or opened from a run's description.

Training batches are a function of (seed, step) alone. Measuring reads at most one window per document.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.config import PRESETS
from workbench.data import corpus as corpora
from workbench.data.corpus import embedded
from workbench.data.synthetic import SHARPNESS, START, backcopy_tokens, check_numbers, repeated_tokens, task_generator
from workbench.data.token_shards import read_tokens
from workbench.data.tokenizer import (
    TokenDocuments,
    Tokenizer,
    read_tokenized,
    start_tokens,
    tokenize,
    train_tokenizer,
    write_tokenized,
)
from workbench.environment import CACHE, XDG_CACHE, cache_folder, variable
from workbench.errors import BadCheckpoint, BadData, refuse_unknown
from workbench.file_io import digest, local, write_json


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
        return digest(self.ids.numpy().tobytes(), list(self.ids.shape), list(self.documents))


@runtime_checkable
class Data(Protocol):
    """Interface of a data source."""

    @property
    def kind(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...  # None for tokens without text
    @property
    def hash(self) -> str: ...  # content address
    @property
    def d_vocab(self) -> int: ...  # size of the vocabulary
    @property
    def domains(self) -> tuple[str, ...]: ...
    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor: ...  # the training batch of a step [size, T]
    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample: ...
    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]: ...  # of losses [batch, T - 1]
    def describe(self) -> dict[str, Any]: ...  # the description in `run.json`


@dataclass(frozen=True)
class TextData:
    """A corpus and its tokenizer. Each side is tokenised once and stored in `folder`, if there is one."""

    corpus: corpora.Corpus
    tokenizer: Tokenizer
    bos: Literal["first", "each"] | None = None
    kind: str = "text"
    folder: Path | None = field(default=None, compare=False)

    @cached_property
    def hash(self) -> str:
        return digest(self.corpus.hash, self.tokenizer.hash, self.bos)

    @property
    def d_vocab(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def domains(self) -> tuple[str, ...]:
        return self.corpus.domains

    @cached_property
    def train(self) -> TokenDocuments:
        return self._tokenized("train")

    @cached_property
    def validation(self) -> TokenDocuments:
        return self._tokenized("validation")

    def _tokenized(self, split: str) -> TokenDocuments:
        if self.folder is None:
            return tokenize(self.corpus, self.tokenizer, split, bos=self.bos)
        path, key = self.folder / f"{split}.parquet", digest(self.hash, split, importlib.metadata.version("tokenizers"))
        documents = read_tokenized(path, key)
        if documents is None:
            documents = tokenize(self.corpus, self.tokenizer, split, bos=self.bos)
            if os.access(self.folder, os.W_OK):
                write_tokenized(documents, path, key)
        return documents

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        """Return the batch of a step [size, T]: packed chunks, shuffled each epoch by the seed."""
        return self._started(_chunks_of_step(self.train.chunks(T - self.starts), step, size, seed))

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return at most one window of T tokens from each of n validation documents."""
        ids, documents = self.validation.sequences(n, T - self.starts, seed=seed, domain=domain)
        return Sample(self._started(ids), documents, f"validation/{domain}" if domain else "validation")

    @property
    def starts(self) -> bool:
        """True if every sequence begins with the start token, as one of its T tokens."""
        return self.bos == "each"

    def _started(self, ids: Tensor) -> Tensor:
        return F.pad(ids, (1, 0), value=self.tokenizer.bos_id) if self.starts else ids

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"kind": "text", "hash": self.hash, "bos": self.bos, "domains": list(self.domains)}

    def save(self, root: Path) -> TextData:
        """Save corpus and tokenizer in `root/<hash>`, unless they are there, and return the data of that folder."""
        folder = root / self.hash
        if not (folder / "data.json").exists():
            corpora.save_corpus(self.corpus, folder)
            self.tokenizer.save(folder / "tokenizer.json")
            write_json(folder / "data.json", self.describe())
        return replace(self, folder=folder)


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
        return

    @property
    def d_vocab(self) -> int:
        return self.vocabulary

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

    @property
    def hash(self) -> str:
        return digest("repeated", self.vocabulary, self.shortest)

    def _drawn(self, n: int, T: int, generator: torch.Generator, shortest: int | None) -> Tensor:
        if T % 2 or T < 4:
            raise BadData(f"T={T}: repeated sequences need an even length of at least 4")
        if shortest is not None and not 1 <= shortest <= T // 2:
            raise BadData(f"shortest is {shortest}; it must lie within 1..{T // 2}, the longest period")
        return repeated_tokens(n, T // 2, self.vocabulary, generator=generator, shortest=shortest)

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        check_numbers(step=(step, 0), seed=(seed, 0))
        return self._drawn(size, T, task_generator("repeated", seed, step), self.shortest)

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return sequences of the longest period, each a document, apart from all training steps."""
        refuse_unknown("domain", domain, (None, *self.domains))
        check_numbers(seed=(seed, 0))
        ids = self._drawn(n, T, task_generator("repeated validation", seed), None)
        return Sample(ids, range(n), "validation", "repeated")

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return `copy_loss`: the mean loss in the second half from its second token on."""
        return {"copy_loss": per_token[:, (per_token.shape[1] + 1) // 2 :].mean()}

    def describe(self) -> dict[str, Any]:
        return self._described(shortest=self.shortest)


@dataclass(frozen=True)
class BackcopyData(_TokensAlone):
    """Bigram-Backcopy: a bigram chain with trigger tokens, after which the token before them is copied; id 0 starts all sequences.

    After Guo et al. (2024), Active-Dormant Attention Heads (arXiv 2410.13835). Their chain is from letters of Shakespeare; ours is the
    softmax of N(0, 2^2) log odds, the same for every seed. Without `start` a sequence begins inside the chain.
    """

    vocabulary: int = 64
    triggers: int = 4
    start: bool = True
    kind: str = "backcopy"
    domains: tuple[str, ...] = ("backcopy",)

    @property
    def hash(self) -> str:
        return digest("backcopy", self.vocabulary, self.triggers, *([] if self.start else ["no start"]))

    @cached_property
    def chain(self) -> Tensor:
        """Probabilities of the next token [vocabulary, vocabulary]; rows of triggers, the last ids, are unused."""
        check_numbers(vocabulary=(self.vocabulary, 4), triggers=(self.triggers, 1))
        if self.triggers > self.vocabulary - 3:
            most = f"a vocabulary of {self.vocabulary} leaves at most {self.vocabulary - 3}"
            raise BadData(f"triggers is {self.triggers}; {most}")
        odds = SHARPNESS * torch.randn(self.vocabulary, self.vocabulary, generator=task_generator("backcopy chain"))
        odds[:, START] = -torch.inf
        odds[START, -self.triggers :] = -torch.inf
        return odds.softmax(1)

    def _is_trigger(self, tokens: Tensor) -> Tensor:
        return tokens >= self.vocabulary - self.triggers

    def drawn(self, n: int, T: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Return n sequences for each generator: [generator, n, T]."""
        without, triggers = int(not self.start), self._is_trigger(torch.arange(self.vocabulary))
        return backcopy_tokens(n, T + without, self.chain, triggers, generators=generators)[..., without:]

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        check_numbers(step=(step, 0), seed=(seed, 0))
        steps = min(max(MOST_NOISE // max(size * T * self.vocabulary, 1), 1), BLOCK)
        return _backcopy_batches(self, step // steps, steps, size, T, seed)[step % steps].long()

    def sample(self, n: int, T: int, *, seed: int = 0, domain: str | None = None) -> Sample:
        """Return sequences, each a document, apart from all training steps."""
        refuse_unknown("domain", domain, (None, *self.domains))
        check_numbers(seed=(seed, 0))
        ids = self.drawn(n, T, [task_generator("backcopy validation", seed)])[0]
        return Sample(ids, range(n), "validation", "backcopy", self)

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return `copy_loss`, the mean loss of tokens after a trigger (NaN without any), and `chain_loss`, of all others."""
        copied = self._is_trigger(tokens[:, :-1])
        return {"copy_loss": per_token[copied].mean(), "chain_loss": per_token[~copied].mean()}

    def describe(self) -> dict[str, Any]:
        return self._described(triggers=self.triggers, bos="first" if self.start else None)


BLOCK, MOST_NOISE = 16, 2**20  # steps that are drawn at once, and random numbers for them


@lru_cache(maxsize=96)  # 1,536 steps, for the next model of the same seed in this process
def _backcopy_batches(data: BackcopyData, block: int, steps: int, size: int, T: int, seed: int) -> Tensor:
    generators = [task_generator("backcopy", seed, step) for step in range(block * steps, (block + 1) * steps)]
    return data.drawn(size, T, generators).int()


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
        refuse_unknown("domain", domain, (None, *self.domains))
        windows = _windows(self.validation, T)
        order = _order(len(windows), seed, 0)[:n]
        return Sample(torch.from_numpy(windows[order].astype(np.int64)), [int(i) for i in order], "validation")

    def readings(self, per_token: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {}

    def describe(self) -> dict[str, Any]:
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


def prepare(
    *, texts: Sequence[str | Path] | None = None, vocabulary: int | None = None, bos: Any = None,
    root: Path | None = None, max_bytes: int | None = None,
) -> TextData:  # fmt: skip
    """Return a corpus with a tokenizer of its training side.

    Args:
        texts: Files, folders, datasets or installed packages (`installed:NAME`); the embedded text unless given.
        vocabulary: Size of the tokenizer; the `tiny` preset's unless given.
        bos: "each" begins every sequence, of training and of measurement, with a start token. "first" begins each document with one,
            which then stands anywhere in a sequence.
        root: Folder to save the data in.
        max_bytes: Size of a sample of the text; all of it unless given.
    """
    start_tokens(bos)  # before the work
    corpus = corpora.from_files([Path(t) for t in texts], max_bytes=max_bytes) if texts else embedded(max_bytes)
    training = (document.text for document in corpus.split("train"))
    data = TextData(corpus, train_tokenizer(training, vocabulary or PRESETS["tiny"].vocabulary), bos)
    return data if root is None else data.save(root)


def open_data(description: dict[str, Any], root: Path, tokenizer: Path | None = None) -> Data:
    """Return the data that a run was trained on, from its description.

    The embedded text needs only its `tokenizer`. Raises `BadCheckpoint` if another corpus is not in `root`.
    """
    kind, name = description.get("kind"), str(description.get("hash"))
    sizes = {key for key, value in description.items() if type(value) is int and 0 < value < 2**31}
    if kind == "tokens":
        try:
            tokens = open_tokens([str(f) for f in description["files"]], int(description["vocabulary"]))
        except (BadData, KeyError, TypeError, ValueError) as error:
            what = f"the token files this run was trained on cannot be read: {error}"
            raise BadCheckpoint(f"{what}; give data= instead") from error
        if tokens.hash != name:
            changed = f"{', '.join(tokens.files)} are no longer what this run was trained on"
            raise BadCheckpoint(f"{changed}; give data= instead")
        return tokens
    if kind == "repeated" and "vocabulary" in sizes and ("shortest" in sizes or description.get("shortest") is None):
        return RepeatedData(description["vocabulary"], description.get("shortest"))
    if kind == "backcopy" and {"vocabulary", "triggers"} <= sizes:
        with_start = description.get("bos", "first") is not None  # older runs say nothing of it, and all had one
        return BackcopyData(description["vocabulary"], description["triggers"], with_start)
    if kind == "imported":
        ways = "give data= ids, text, a file or a corpus (--text FILE)"
        raise BadCheckpoint(f"nothing says what an imported run was trained on; {ways}")
    if kind != "text" or Path(name).name != name or name == "..":
        raise BadCheckpoint(f"unknown data {description!r}; give data= instead")
    if not (root / name / "data.json").exists():
        if tokenizer is not None and tokenizer.is_file():
            data = _text_data(None, tokenizer, tokenizer.stat().st_mtime_ns, description.get("bos"))
            if data.hash == name:
                return data
        raise BadCheckpoint(f"the corpus {name} this run was trained on is not under {root}; give data= instead")
    try:  # named by its content
        text = _text_data(root / name, root / name / "tokenizer.json", 0, description.get("bos"))
    except BadData as error:
        raise BadCheckpoint(str(error)) from error
    if text.hash != name:
        raise BadCheckpoint(f"{root / name} holds other data than its name says; remove it and build it again")
    return text


@lru_cache(maxsize=4)  # tokenising a corpus again for each checkpoint would cost more than measuring
def _text_data(folder: Path | None, tokenizer: Path, changed: int, bos: Any) -> TextData:
    """Return the corpus of a folder (None: the embedded text) with a tokenizer that `changed` at this time."""
    if folder is not None:
        return TextData(corpora.load_corpus(folder), Tokenizer.load(tokenizer), bos, folder=folder)
    data = TextData(embedded(), Tokenizer.load(tokenizer), bos)
    with contextlib.suppress(OSError, RuntimeError):  # no cache, or no home
        ids = cache_folder(variable(CACHE), variable(XDG_CACHE)) / "tokens" / data.hash
        ids.mkdir(parents=True, exist_ok=True)
        return replace(data, folder=ids)
    return data
