"""Byte-level BPE tokenizers with decode(encode(text)) == text, token streams of documents, and tokenizers of other libraries.

tokenizer = train_tokenizer((d.text for d in corpus.split("train")), 1024)
ids, documents = tokenize(corpus, tokenizer, "validation").sequences(64, 128, seed=0)
as_tokenizer(AutoTokenizer.from_pretrained("gpt2", local_files_only=True), 50257).encode("The cat")
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tokenizers

from workbench.data.tokenizer_limits import open_backend, without_panics
from workbench.errors import BadCheckpoint, BadData, refuse_unknown
from workbench.file_io import digest, read_text, table_bytes, write_table, write_text

if TYPE_CHECKING:
    import torch

    from workbench.data.corpus import Corpus


EOS, BOS = "<|endoftext|>", "<|bos|>"
START_TOKENS = ("each", "first")  # where start tokens stand: in each sequence, or first in a document
SPECIALS = [EOS, BOS]
EOS_ID, BOS_ID = 0, 1
MIN_VOCABULARY = 256 + len(SPECIALS)
VISIBLE = {" ": "·", "\n": "↵", "\t": "→"}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A byte-level BPE; text never becomes a special token."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_truncation()  # a file may ask for both; transformers, too, obeys its caller alone
        backend.no_padding()
        # "<|endoftext|>" written inside a text is text: only `tokenize` places the real one
        backend.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens and padding; raises `BadData` for invalid text."""
        if (broken := LONE_SURROGATE.search(text)) is not None:
            raise BadData(f"half a character ({broken[0]!a}) at position {broken.start()}; give valid Unicode text")
        with without_panics("the tokenizer cannot encode this text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; incomplete characters become U+FFFD, special tokens their names."""
        with without_panics("the tokenizer cannot decode these ids"):
            return self._backend.decode(self._checked(ids), skip_special_tokens=False)

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """Return a printable string for each id: · for space, ↵ for newline, → for tab, \\xNN for other bytes."""
        return [self._legible[i] for i in self._checked(ids)]

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self._backend.get_vocab_size()

    @property
    def eos_id(self) -> int:
        """The id that ends each document."""
        return EOS_ID

    @property
    def bos_id(self) -> int:
        """The id that begins a document, if requested."""
        return BOS_ID

    @cached_property
    def hash(self) -> str:
        """Hash of vocabulary and merges."""
        return digest(self._backend.to_str())

    def save(self, path: Path) -> None:
        """Write tokenizer.json in the format of the `tokenizers` library, atomically."""
        write_text(path, self._backend.to_str(pretty=True))

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a saved tokenizer; a missing, damaged or different one is refused."""
        try:
            tokenizer = cls(open_backend(read_text(path)))
            special = [*map(tokenizer._backend.token_to_id, SPECIALS), len(tokenizer._legible)]
        except Exception as error:  # the library raises bare Exception for damaged JSON
            cause = f"no readable tokenizer in {path} ({error})"
            raise BadCheckpoint(f"{cause}; copy it again or train it again") from error
        if special != [EOS_ID, BOS_ID, tokenizer.vocab_size]:
            wanted = f"{EOS} and {BOS} must have ids {EOS_ID} and {BOS_ID}"
            raise BadCheckpoint(f"{path} is not a tokenizer of the workbench: {wanted}")
        return tokenizer

    @cached_property
    def _legible(self) -> list[str]:
        tokens = [self._backend.id_to_token(i) or "" for i in range(self.vocab_size)]
        byte = byte_of_character()
        return SPECIALS + [visible(bytes(byte[character] for character in token)) for token in tokens[2:]]

    def _checked(self, ids: Iterable[int]) -> list[int]:
        checked = [int(i) for i in ids]
        wrong = next((i for i in checked if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise BadData(f"token id {wrong} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}")
        return checked


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer with exactly `vocab_size` ids."""
    if vocab_size < MIN_VOCABULARY:
        needed = f"256 bytes and {len(SPECIALS)} special tokens need {MIN_VOCABULARY}"
        raise BadData(f"a vocabulary of {vocab_size} is too small; {needed}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    if (size := backend.get_vocab_size()) < vocab_size:
        raise BadData(f"the text yields {size} tokens, not {vocab_size}; ask for at most {size} or give more text")
    return Tokenizer(backend)


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Token ids of documents in one flat array: document i is ids[starts[i]:starts[i + 1]]."""

    ids: np.ndarray
    starts: np.ndarray
    domains: list[str]
    sources: list[str]

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, a view."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @cached_property
    def hash(self) -> str:
        return digest(self.ids.tobytes(), self.starts.tobytes(), self.domains, self.sources)

    def chunks(self, length: int) -> np.ndarray:
        """Documents one after another, cut into [n, length] full chunks; the remainder is dropped. A view."""
        _check_length(length)
        count = len(self.ids) // length
        if not count:
            raise BadData(f"{len(self.ids)} tokens fill no chunk of {length}; choose a smaller length or more text")
        return self.ids[: count * length].reshape(count, length)

    def sequences(self, n: int, length: int, *, seed: int, domain: str | None = None) -> tuple[torch.Tensor, list[int]]:
        """At most `n` windows [m, length], one per document, in seeded order, with the documents they come from.

        Windows start anywhere in their document and never cross into another one; documents shorter than `length` are
        left out. The first k of n sequences are the k sequences one gets when asking for k.
        """
        import torch

        _check_length(length)
        if n < 1 or seed < 0:
            raise BadData(f"n is {n} and seed is {seed}; n must be at least 1 and seed at least 0")
        refuse_unknown("domain", domain, {None, *self.domains})
        order, where = np.random.default_rng(seed).random((2, len(self.domains)))  # of all: domains share windows
        spare = np.diff(self.starts) - length
        chosen = [int(i) for i in np.argsort(order) if spare[i] >= 0 and domain in (None, self.domains[i])][:n]
        if not chosen:
            lengths = [len(self.document(i)) for i, own in enumerate(self.domains) if domain in (None, own)]
            which = f"{domain} document" if domain else "document"
            raise BadData(f"no {which} has {length} tokens; the longest has {max(lengths, default=0)}")
        begin = [self.starts[i] + int(where[i] * (spare[i] + 1)) for i in chosen]
        return torch.from_numpy(np.stack([self.ids[b : b + length] for b in begin]).astype(np.int64)), chosen


def start_tokens(bos: Any) -> Literal["first", "each"] | None:
    """Return a checked option: no start tokens (None), one for each document ("first") or for each sequence ("each")."""
    refuse_unknown("bos option", bos, (None, *START_TOKENS))
    return bos


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, split: str, *, bos: Literal["first", "each"] | None = None
) -> TokenDocuments:
    """Return the documents of one side as ids; each ends with <|endoftext|> and, with bos="first", begins with <|bos|>."""
    documents = corpus.split(split)
    begin = [tokenizer.bos_id] if start_tokens(bos) == "first" else []
    arrays = [np.array([*begin, *tokenizer.encode(d.text), tokenizer.eos_id], dtype=np.int32) for d in documents]
    starts = np.cumsum([0] + [len(array) for array in arrays])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
    return TokenDocuments(flat, starts, [d.domain for d in documents], [d.source for d in documents])


def write_tokenized(documents: TokenDocuments, path: Path, key: str) -> None:
    """Write documents as Parquet, atomically, with checksums and the `key` of their source."""
    import pyarrow as pa

    ids = pa.ListArray.from_arrays(pa.array(documents.starts, pa.int32()), pa.array(documents.ids, pa.int32()))
    columns = {"source": documents.sources, "domain": documents.domains, "ids": ids}
    write_table(pa.table(columns, metadata={"key": key}), path, compression="zstd")


def read_tokenized(path: Path, key: str) -> TokenDocuments | None:
    """Return the documents of `write_tokenized`; None if the file is missing, damaged or of another key."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(table_bytes(path)), page_checksum_verification=True) as file:
            if (file.schema_arrow.metadata or {}).get(b"key") != key.encode():
                return None
            table = file.read()
        ids, sources, domains = (table[name].combine_chunks() for name in ("ids", "source", "domain"))
    except (OSError, KeyError, pa.ArrowException):
        return None
    starts = ids.offsets.to_numpy().astype(np.int64)
    return TokenDocuments(ids.values.to_numpy(), starts, domains.to_pylist(), sources.to_pylist())


def _check_length(length: int) -> None:
    if length < 2:
        raise BadData(f"a length of {length} tokens predicts nothing; choose at least 2")


def byte_of_character() -> dict[str, int]:
    """Return the byte of every character in the byte-level alphabet of GPT-2."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(others)}


def visible(token: bytes) -> str:
    """Return a token's bytes as printable text."""

    def escaped(character: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in character.encode())

    shown = token.decode("utf-8", errors="backslashreplace")
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else escaped(c)) for c in shown)


PROBE = "The cat sat on the mat: 1 + 2 = 3, and so on.\n"
_BESIDE_IDS = ("attention_mask", "token_type_ids", "position_ids", "length", "special_tokens_mask", "offset_mapping")


class ForeignTokenizer(Tokenizer):
    """A tokenizer of another library; `begin` and `end` are the ids around a document, if its settings name them."""

    def __init__(self, backend: tokenizers.Tokenizer, begin: int | None = None, end: int | None = None) -> None:
        super().__init__(backend)
        self._begin, self._end = begin, end

    @cached_property
    def vocab_size(self) -> int:  # the backend makes a dictionary of all tokens to tell it
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_id(self) -> int:
        return self._special(self._end, "end")

    @property
    def bos_id(self) -> int:
        return self._special(self._begin, "begin")

    @cached_property
    def start_token(self) -> int | None:
        """The id that this tokenizer's template puts before every text, None without one."""
        backend = getattr(self._backend, "vocabulary", self._backend)  # of one with limits, the part in this process
        full, bare = (backend.encode("a", add_special_tokens=each).ids for each in (True, False))
        return int(full[0]) if len(full) > len(bare) and full[1 : 1 + len(bare)] == bare else None

    def _special(self, number: int | None, what: str) -> int:
        if number is None:
            raise BadData(f"this tokenizer names no token that {what}s a document; work without one")
        return number

    @cached_property
    def _legible(self) -> list[str]:
        byte = byte_of_character()
        names = [self._backend.id_to_token(i) or "" for i in range(self.vocab_size)]
        if isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return [visible(bytes(byte[c] for c in n)) if all(c in byte for c in n) else n for n in names]
        return ["".join(VISIBLE.get(c, c) for c in name.replace("▁", " ")) for name in names]


def as_tokenizer(given: Any, d_vocab: int) -> Any:
    """Return a tokenizer with our interface, from the `tokenizers` library or a fast tokenizer of transformers.

    A tokenizer of this package, or None, is returned unchanged, others are copied. `encode` adds no special tokens. Raises `BadData` for
    a tokenizer of another kind, one that encodes otherwise than its copy, or one with ids beyond the vocabulary of `d_vocab`.
    """
    ours = ("encode", "decode", "token_strings", "vocab_size")
    if given is None or all(hasattr(given, name) for name in ours):
        return given
    backend = given if isinstance(given, tokenizers.Tokenizer) else getattr(given, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise BadData(
            f"tokenizer is a {type(given).__name__}, which is not read: give a fast tokenizer of transformers, as AutoTokenizer."
            "from_pretrained(...) returns it, a tokenizers.Tokenizer, or none and token ids instead of text"
        )
    try:
        copied = tokenizers.Tokenizer.from_str(backend.to_str())
        ends = (getattr(given, name, None) for name in ("bos_token_id", "eos_token_id"))
        begin, end = (n if isinstance(n, int) and not isinstance(n, bool) else None for n in ends)
        tokenizer = ForeignTokenizer(copied, begin, end)
        encoded: Any = given.encode(PROBE, add_special_tokens=False)
        alike = tokenizer.encode(PROBE) == list(encoded.ids if isinstance(given, tokenizers.Tokenizer) else encoded)
    except Exception as error:  # of parts written in Python, which cannot be copied
        cause = f"a {type(given).__name__}, cannot be copied ({error})"
        raise BadData(f"tokenizer, {cause}: give token ids instead of text") from error
    if not alike:
        raise BadData(f"tokenizer, a {type(given).__name__}, does more than its backend: give token ids, not text")
    if tokenizer.vocab_size > d_vocab:
        raise BadData(
            f"tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary goes to {d_vocab - 1}: give the tokenizer that "
            "the model was trained with, or none and token ids"
        )
    return tokenizer


def ids_of(example: Any, tokenizer: Any) -> Any:
    """Return token ids of text, texts of one length or a tokenizer's output (`BatchEncoding`, dict); other values are returned unchanged.

    Raises `BadData` where there is no tokenizer for a text, or an output has padding, no ids, or more than ids to pass to the model.
    """
    texts = [example] if isinstance(example, str) else example
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise BadData(
                "example_tokens is text, and there is no tokenizer: give observe(..., tokenizer=AutoTokenizer.from_pretrained(...)), or "
                "token ids [batch, pos]"
            )
        rows = [tokenizer.encode(text) for text in texts]
        if len(lengths := sorted({len(row) for row in rows})) > 1:
            raise BadData(f"example_tokens are texts of {lengths} tokens: give one text, or texts of one length")
        return rows
    if not isinstance(example, Mapping):
        return example
    if "input_ids" not in example:
        names = ", ".join(map(str, example)) or "nothing"
        raise BadData(f"example_tokens has {names}, no input_ids: give token ids [batch, pos]")
    if more := [str(key) for key in example if key not in ("input_ids", *_BESIDE_IDS)]:
        raise BadData(
            f"example_tokens has {', '.join(more)} beside input_ids: give example_tokens=batch['input_ids'] and pass the rest on, "
            f"call=lambda m, ids: m(ids, {more[0]}=batch[{more[0]!r}][:len(ids)])"
        )
    ids, mask = example["input_ids"], example.get("attention_mask", ())
    flat = [bit for row in mask for bit in (row if getattr(row, "ndim", 1) and hasattr(row, "__iter__") else [row])]
    if padded := sum(not bit for bit in flat):
        raise BadData(
            f"{padded} of {len(flat)} positions of example_tokens are padding (attention_mask): observe one row without padding, "
            "example_tokens=batch['input_ids'][:1][batch['attention_mask'][:1] == 1]"
        )
    return ids
