"""Text corpora: documents of a user's files, of `datasets` or the embedded text, split by source into training and validation.

A hash of a source's name decides its side. Rows of JSON Lines and Parquet files and of datasets are one document each. A dataset is
named `datasets:NAME`, `datasets:NAME@CONFIG` or with its split, `datasets:NAME:validation` (else `train`). `installed:NAME` is the code
and documentation of a Python package of this environment. The embedded text has the domains `python` (code) and `prose` (docstrings).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import BadData, refuse_unknown, suggest
from workbench.file_io import MAX_CORPUS, open_regular, read_bytes, read_json, replacing, write_json
from workbench.places import SHIPPED

COLUMNS = ("text", "content")
TABLES = (".jsonl", ".parquet")
INSTALLED = "installed:"
NAME = re.compile(r"datasets:(?P<name>[^@:]+)(?:@(?P<config>[^:]+))?(?::(?P<split>.+))?")


def is_named(source: object) -> bool:
    """Return whether a source is the name of a dataset or of an installed package, not a path or text."""
    return str(source).startswith(("datasets:", INSTALLED))


def rows_of_file(path: Path, data: bytes) -> list[str]:
    """Return the texts of a .jsonl or .parquet file; raises `BadData` with the line or the columns that do not fit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = list[str]()
    for number, line in enumerate(data.splitlines() if path.suffix == ".jsonl" else (), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{where}, is no JSON: {error}") from error
        if isinstance(row, dict):
            row = row[_column([key for key, value in row.items() if isinstance(value, str)], list(row), where)]
        if not isinstance(row, str):
            raise BadData(f"{where}, is a {type(row).__name__}; give objects with a text, or texts")
        texts.append(_whole(row, where))
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
                schema = file.schema_arrow
                names = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
                column = file.read(columns=[_column(names, schema.names, str(path))]).column(0)
                texts = [_whole(text, str(path)) for text in column.to_pylist() if text is not None]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadData(f"{path} is damaged or no Parquet file: {error}") from error
    if not any(text.strip() for text in texts):
        raise BadData(f"{path} holds no text; leave it out")
    return [text for text in texts if text.strip()]


def dataset_rows(name: str, most_bytes: int) -> tuple[str, list[str]]:
    """Return (domain, texts) of a dataset by name; raises `BadData` if it is unavailable or larger than `most_bytes`."""
    match = NAME.fullmatch(name)
    if match is None:
        raise BadData(f"{name!r} names no dataset; write datasets:NAME, datasets:NAME@CONFIG or datasets:NAME:SPLIT")
    import datasets

    try:
        table: Any = datasets.load_dataset(match["name"], match["config"], split=match["split"] or "train")
    except Exception as error:  # whatever network, cache and other people's files come to
        reason = next(iter(str(error).splitlines()), "")
        raise BadData(f"the dataset {match['name']!r} cannot be loaded: {type(error).__name__}: {reason}") from error
    strings = [k for k, f in table.features.items() if getattr(f, "dtype", None) in ("string", "large_string")]
    column, texts, size = _column(strings, table.column_names, name), [], 0
    for text in table[column]:
        size += len((text or "").encode("utf-8", "surrogatepass"))
        if size > most_bytes:
            raise BadData(f"{name} has more than {most_bytes} bytes of text; take a part, such as :train[:1%]")
        if text and text.strip():
            texts.append(_whole(text, name))
    return Path(match["name"]).name, texts


def package_of(source: str) -> importlib.metadata.Distribution:
    """Return the package of `installed:NAME`; raises `BadData` if it is not installed."""
    name = source.removeprefix(INSTALLED)
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise BadData(f"no package {name!r} is installed here; `pip list` names those that are") from error


def package_texts(source: str, most_bytes: int) -> dict[str, bytes]:
    """Return the text files of `installed:NAME` that are valid UTF-8, by path, in order of their paths."""
    package, contents, size = package_of(source), dict[str, bytes](), 0
    listed = [
        file for file in package.files or () if file.suffix in (".py", ".md", ".rst", ".txt") and ".." not in file.parts
    ]
    for file in sorted(listed, key=str):
        path = Path(str(package.locate_file(file)))
        if not path.is_file():
            continue
        data = read_bytes(path, most_bytes)
        if (size := size + len(data)) > most_bytes:
            raise BadData(
                f"{source} has more text than the {most_bytes} bytes that are left of memory for texts; give fewer or smaller packages"
            )
        if data.strip() and b"\0" not in data:
            with contextlib.suppress(UnicodeDecodeError):
                data.decode()
                contents[f"{package.name}-{package.version}/{file.as_posix()}"] = data
    return contents


def _column(texts: Sequence[str], names: Iterable[str], where: str) -> str:
    """Return the text column: `text`, `content`, or the only one with text."""
    columns = [c for c in COLUMNS if c in texts] or list(texts)
    if not columns or (len(columns) > 1 and columns[0] not in COLUMNS):
        raise BadData(f"{where}: which column is the text? Call it {COLUMNS[0]!r}; {suggest(COLUMNS[0], list(names))}")
    return columns[0]


def _whole(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadData(f"{where} holds half a character; give valid Unicode text") from error
    return text.replace("\r\n", "\n")


def joined(texts: Iterable[str]) -> bytes:
    """Return the bytes of texts, for hashing."""
    return b"".join(itertools.chain.from_iterable((text.encode(), b"\0") for text in texts))


SPLITS = ("train", "validation")
VALIDATION = 0.1
SUFFIXES = (".txt", ".md", ".py", *TABLES)
MIN_BYTES = 20_000
PIECE, LONGEST_PIECE = 4_000, 16_000  # characters
MIN_DOCUMENT = 200  # characters of a document that is left after repeats are removed

WORD = re.compile(r"\w+|[^\w\s]")
BLANK = re.compile(r"\n(?:[ \t\f]*\n)+")
WINDOW = 25  # words and signs, about 50 tokens of a small vocabulary
MIN_REPEAT = 8  # words of a paragraph that can count as a repeat; shorter ones (`else: return None`) repeat by nature


@dataclass(frozen=True)
class Document:
    """A text with its source, domain and side of the split."""

    source: str
    domain: str
    split: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents, and a manifest of their sources."""

    documents: tuple[Document, ...]
    manifest: dict[str, Any]

    def split(self, name: str) -> tuple[Document, ...]:
        """The documents of one side, `train` or `validation`."""
        refuse_unknown("split", name, SPLITS)
        return tuple(document for document in self.documents if document.split == name)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(sorted({document.domain for document in self.documents}))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the documents, in order, without the manifest."""
        sha = hashlib.sha256()
        for document in self.documents:
            sha.update(json.dumps(asdict(document)).encode() + b"\n")
        return sha.hexdigest()


def within(corpus: Corpus, max_bytes: int) -> Corpus:
    """Return a sample of at most `max_bytes`, with equal shares of all domains."""
    if max_bytes < 100_000:
        raise BadData(f"max_bytes is {max_bytes}; give at least 100000")
    room = dict.fromkeys(corpus.domains, max_bytes // len(corpus.domains))
    selected = set()
    for document in sorted(corpus.documents, key=lambda d: _fraction("order", d.source)):
        size = len(document.text.encode())
        if size <= room[document.domain]:
            room[document.domain] -= size
            selected.add((document.source, document.domain))
    documents = tuple(d for d in corpus.documents if (d.source, d.domain) in selected)
    return Corpus(documents, corpus.manifest | {"max_bytes": max_bytes})


def from_files(paths: Iterable[Path | str], *, validation: float = VALIDATION, max_bytes: int | None = None) -> Corpus:
    """Return a corpus of UTF-8 text: files, folders of .txt, .md, .py, .jsonl and .parquet files, `datasets:NAME`, `installed:NAME`.

    Files are cut into documents of roughly 4 to 16 kB at blank lines or line ends. From ten files on, a file lies on one side; with fewer,
    each document does. A folder's or package's domain is its name; single files are the domain `text`. Repeated paragraphs are dropped,
    from validation first; an empty side is refused. The manifest has the SHA-256 of every file, and version and licence of packages.
    `max_bytes` takes a sample.
    """
    paths = list(paths)
    if not 0 < validation < 1:
        raise BadData(f"validation is {validation}; give a share between 0 and 1, such as {VALIDATION}")
    documents, files = read_documents(paths)
    if max_bytes is not None:
        documents = list(within(Corpus(tuple(documents), {}), max_bytes).documents)
    size = sum(file["bytes"] for file in files)
    if size < MIN_BYTES:
        raise BadData(f"{size} bytes of text in {len(files)} files are too little; give at least {MIN_BYTES} bytes")
    packages = [package_of(str(path)) for path in paths if str(path).startswith(INSTALLED)]
    terms = {
        p.name: p.metadata.get("License-Expression") or p.metadata.get("License") or "see its files" for p in packages
    }
    manifest = {"origin": "files", "validation": validation, "files": files, "skipped": []}
    if packages:
        licences = {name: text.strip().partition("\n")[0] for name, text in terms.items()}
        manifest["packages"] = {p.name: {"version": p.version, "licence": licences[p.name]} for p in packages}
    # files (or documents, of fewer than ten files) go to validation by hashed name, up to its share of the text
    names = {document.source.rpartition("#")[0] for document in documents}
    unit = {d.source: d.source.rpartition("#")[0] if len(names) >= 10 else d.source for d in documents}
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[unit[document.source]] += len(document.text)
    room, selected = validation * sizes.total(), set()
    for name in sorted(sizes, key=lambda name: _fraction("split", name)):
        if sizes[name] <= room:
            selected.add(name)
            room -= sizes[name]
    selected = selected or {min(sizes, key=lambda name: (sizes[name], name))}
    sides = [replace(d, split="validation") if unit[d.source] in selected else d for d in documents]
    return without_repeats(sides, manifest)


def read_documents(paths: Iterable[Path | str], *, split: str = "train") -> tuple[list[Document], list[dict[str, Any]]]:
    """Return files, datasets and packages as documents, all on one side, and an entry for each file."""
    paths = list(paths)
    named = [str(path) for path in paths if is_named(path)]
    given = [Path(path) for path in paths if not is_named(path)]
    contents = _text_files(given) if given or not named else {}
    common = os.path.commonpath([path.parent for path in contents]) if contents else ""
    sources: list[tuple[str, str, bytes, list[str]]] = []  # name, domain, bytes, texts
    for path, (domain, data) in contents.items():
        source = path.relative_to(common).as_posix().encode("utf-8", "backslashreplace").decode()
        if path.suffix in TABLES:
            rows = rows_of_file(path, data)
        elif not data.strip():
            raise BadData(f"{path} is empty; leave it out")
        elif (position := data.find(b"\0")) >= 0:
            raise BadData(f"{path} is binary (a NUL byte at offset {position}); give text")
        else:
            try:
                rows = [data.decode("utf-8-sig").replace("\r\n", "\n")]
            except UnicodeDecodeError as error:
                raise BadData(f"{path} is not UTF-8 (byte offset {error.start}); convert it to UTF-8 first") from error
        sources.append((source, domain, data, rows))
    for name in named:
        if name.startswith(INSTALLED):
            texts = package_texts(name, MAX_CORPUS - sum(len(data) for _, _, data, _ in sources))
            domain = package_of(name).name
            sources += [(file, domain, data, [data.decode().replace("\r\n", "\n")]) for file, data in texts.items()]
        else:
            domain, rows = dataset_rows(name, MAX_CORPUS)
            sources.append((name, domain, joined(rows), rows))
    documents, files = [], []
    for source, domain, data, rows in sources:
        documents += [
            Document(f"{source}#{i}", domain, split, text)
            for i, text in enumerate(text for row in rows for text in pieces(row))
        ]
        files.append({"source": source, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
    return documents, files


def save_corpus(corpus: Corpus, folder: Path) -> None:
    """Write documents.parquet, then manifest.json, each atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([asdict(document) for document in corpus.documents])
    with replacing(folder / "documents.parquet") as part:
        pq.write_table(table, part, compression="zstd", compression_level=19)
    write_json(folder / "manifest.json", {"hash": corpus.hash} | corpus.manifest)


def load_corpus(folder: Path) -> Corpus:
    """Read a saved corpus; a missing or damaged folder is refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        manifest = read_json(folder / "manifest.json")
        with open_regular(folder / "documents.parquet") as raw, pq.ParquetFile(raw) as file:
            rows = file.read().to_pylist()
        corpus = Corpus(tuple(Document(**row) for row in rows), manifest)
        expected = manifest.pop("hash")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        raise BadData(f"no readable corpus in {folder} ({error}); delete the folder and build it again") from error
    if corpus.hash != expected:
        raise BadData(f"the documents in {folder} do not match their manifest; delete the folder and build it again")
    return corpus


def pieces(text: str) -> list[str]:
    """Cut a text at the first blank line after 4,000 characters, or before 16,000 at a line end or space."""
    parts, start = [], 0
    while start < len(text):
        limit = start + LONGEST_PIECE
        if blank := BLANK.search(text, start + PIECE, limit):
            end = blank.end()
        elif limit >= len(text):
            end = len(text)
        else:
            end = text.rfind("\n", start, limit) + 1 or text.rfind(" ", start, limit) + 1 or limit
        parts.append(text[start:end])
        start = end
    return parts


def _text_files(paths: list[Path]) -> dict[Path, tuple[str, bytes]]:
    """Return domain and bytes of every file under `paths`, once, without the empty files of folders."""
    contents: dict[Path, tuple[str, bytes]] = {}
    total = 0
    for path in paths:
        if not path.exists():
            raise BadData(f"{path} does not exist; give text files, or folders of {', '.join(SUFFIXES)} files")
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
        domain = (path.resolve().name if path.is_dir() else "") or "text"
        for file in inside:
            if (total := total + file.stat().st_size) > MAX_CORPUS:
                raise BadData(f"more than {MAX_CORPUS} bytes of text; it is held in memory, so give fewer files")
            try:
                data = read_bytes(file, MAX_CORPUS)
            except OSError as error:
                raise BadData(f"cannot read {file} ({error.strerror}); leave it out") from error
            if data.strip() or not path.is_dir():
                contents.setdefault(file.resolve(), (domain, data))
    if not contents:
        raise BadData(f"no text in {', '.join(map(str, paths)) or 'no paths'}; give {', '.join(SUFFIXES)} files")
    return contents


def _fraction(purpose: str, name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(f"workbench {purpose} {name}".encode()).digest()[:6], "big") / 2**48


def without_repeats(documents: Sequence[Document], manifest: dict[str, Any]) -> Corpus:
    """Return a corpus without repeated paragraphs, which validation loses first; an empty side is refused."""
    ordered = sorted(documents, key=lambda document: SPLITS.index(document.split))
    blocks = []  # (document, paragraph with the blank lines after it)
    for owner, document in enumerate(ordered):
        ends = [0, *(match.end() for match in BLANK.finditer(document.text)), len(document.text)]
        blocks += [(owner, document.text[a:b]) for a, b in itertools.pairwise(ends) if a < b]
    repeated = _repeats([block for _, block in blocks], [ordered[o].split == "validation" for o, _ in blocks])
    texts = [""] * len(ordered)
    for (owner, block), drop in zip(blocks, repeated, strict=True):
        texts[owner] += "" if drop else block
    left = tuple(replace(d, text=t) for d, t in zip(ordered, texts, strict=True) if len(t.strip()) >= MIN_DOCUMENT)
    dropped = {"dropped_paragraphs": int(repeated.sum()), "dropped_documents": len(ordered) - len(left)}
    corpus = Corpus(left, {"python": platform.python_version()} | manifest | dropped)
    for split in SPLITS:
        if not corpus.split(split):
            raise BadData(f"no {split} text is left once repeats are dropped; give more text, or more varied text")
    return corpus


def _repeats(blocks: list[str], strict: list[bool]) -> np.ndarray:
    """Return whether each block repeats earlier ones: in half of its windows of 25 words or, if strict, in one window."""
    vocabulary: dict[str, int] = {}
    numbers = [[vocabulary.setdefault(word, len(vocabulary) + 1) for word in WORD.findall(block)] for block in blocks]
    lengths = np.array([len(ids) for ids in numbers])
    padded = [ids + [0] * (WINDOW - len(ids)) for ids in numbers]
    flat = np.concatenate([np.array(ids, dtype=np.uint64) for ids in padded])
    windows = np.zeros(len(flat) - WINDOW + 1, dtype=np.uint64)
    for offset in range(WINDOW):  # a polynomial hash, modulo 2**64
        windows = windows * np.uint64(0x9E3779B97F4A7C15) + flat[offset : offset + len(windows)]
    counts = np.where(lengths < MIN_REPEAT, 0, np.maximum(lengths - WINDOW + 1, 1))
    starts = np.cumsum([0] + [len(ids) for ids in padded[:-1]])
    owner = np.repeat(np.arange(len(blocks)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[owner]
    _, first, same = np.unique(windows[place], return_index=True, return_inverse=True)
    seen = np.bincount(owner, weights=owner[first][same] < owner, minlength=len(blocks))
    return (seen > 0) & (np.array(strict) | (2 * seen >= counts))


cached_corpus = lru_cache(maxsize=1)(load_corpus)


def embedded(max_bytes: int | None = None) -> Corpus:
    """Return the embedded corpus, or a sample of at most `max_bytes`; raises `BadData` if it does not match its manifest."""
    corpus = cached_corpus(SHIPPED / "corpus")
    return corpus if max_bytes is None else within(corpus, max_bytes)
