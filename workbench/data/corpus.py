"""Text as documents: a Python's standard library (no network) or the user's files, split by source into two sides.

A *document* is one source file's code (domain `python`, docstrings removed), one file's docstrings joined (`prose`), or
one topic of the language reference (`prose`). A source lies wholly on one side, `train` or `validation`, decided by a
hash of its name alone, so code and docstrings of a file never face each other. The text differs between builds of
Python: the manifest records what was read.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import itertools
import json
import os
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workbench.data.texts import TABLES, dataset_rows, is_dataset, joined, rows_of_file
from workbench.errors import BadData, UnknownName
from workbench.files import open_regular, read_bytes, read_json, replacing, write_json

SPLITS = ("train", "validation")
DEFAULT_BYTES = 8_000_000  # all prose of the library and half of its code; 5 to 6 MB once copies are dropped
VALIDATION = 0.1
SUFFIXES = (".txt", ".md", ".py", *TABLES)
MIN_BYTES, MAX_BYTES = 20_000, 64_000_000  # of the user's own text, which is held in memory
PIECE, LONGEST_PIECE = 4_000, 16_000  # characters
MIN_DOCUMENT = 200  # characters; what is left of a file after its copies are gone is noise below this

WORD = re.compile(r"\w+|[^\w\s]")
BLANK = re.compile(r"\n(?:[ \t\f]*\n)+")
WINDOW = 25  # words and signs, about 50 tokens of a small vocabulary
MIN_REPEAT = 8  # shorter paragraphs (`else: return None`) repeat by nature

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TOPICS = "pydoc_data/topics.py"
SKIPPED_FILES = re.compile(rf"(.*/)?_sysconfig(data|_vars).*|{TOPICS}")  # machine paths; the topics come as prose


@dataclass(frozen=True)
class Document:
    """One coherent text, its source, its domain and its side of the split."""

    source: str
    domain: str
    split: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents and the manifest that says where they come from."""

    documents: tuple[Document, ...]
    manifest: dict[str, Any]

    def split(self, name: str) -> tuple[Document, ...]:
        """The documents of one side, `train` or `validation`."""
        if name not in SPLITS:
            raise UnknownName("split", name, SPLITS)
        return tuple(document for document in self.documents if document.split == name)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains in alphabetical order."""
        return tuple(sorted({document.domain for document in self.documents}))

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the documents, in order; the manifest does not enter."""
        sha = hashlib.sha256()
        for document in self.documents:
            sha.update(json.dumps(asdict(document)).encode() + b"\n")
        return sha.hexdigest()


def library(max_bytes: int = DEFAULT_BYTES) -> Corpus:
    """The running Python's standard library: at most `max_bytes` of text, at most half of it in each domain.

    Sources are taken in the order of a hash of their names, so a smaller corpus is a sample and not the letters A to C.
    """
    room, least = _room(max_bytes), max_bytes // 100
    manifest: dict[str, Any] = {"origin": "standard library", "max_bytes": max_bytes, "files": [], "skipped": []}
    documents: list[Document] = []
    for source, origin in sorted(library_sources(), key=lambda pair: _fraction("order", pair[0])):
        if max(room.values()) < least:
            break
        split = "validation" if _fraction("split", source) < VALIDATION else "train"
        for domain, text in zip(room, _read_source(source, origin, manifest), strict=True):
            if text and _fits(text, room, domain):
                documents.append(Document(source, domain, split, text))
    return _finish(documents, manifest)


def within(corpus: Corpus, max_bytes: int) -> Corpus:
    """A sample of a library's corpus in the same order: at most `max_bytes` of text, at most half of it in each domain."""
    room = _room(max_bytes)
    chosen = {
        (d.source, d.domain)
        for d in sorted(corpus.documents, key=lambda d: _fraction("order", d.source))
        if _fits(d.text, room, d.domain)
    }
    kept = tuple(d for d in corpus.documents if (d.source, d.domain) in chosen)
    return Corpus(kept, corpus.manifest | {"max_bytes": max_bytes})


def _room(max_bytes: int) -> dict[str, int]:
    if max_bytes < 100_000:
        raise BadData(f"max_bytes is {max_bytes}; give at least 100000")
    return dict.fromkeys(("python", "prose"), max_bytes // 2)


def _fits(text: str, room: dict[str, int], domain: str) -> bool:
    """Whether a text still fits into its domain's room, which it then takes."""
    size = len(text.encode())
    if fits := size <= room[domain]:
        room[domain] -= size
    return fits


def _read_source(source: str, origin: Path | str, manifest: dict[str, Any]) -> tuple[str, str]:
    """The (code, prose) of a library source, noted in the manifest; two empty texts where it cannot be read."""
    try:
        data = origin.encode() if isinstance(origin, str) else read_bytes(origin)
        texts = ("", origin) if isinstance(origin, str) else code_and_prose(data.decode("utf-8-sig"))
        "".join(texts).encode()  # an escape in a docstring can be half a character
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        manifest["skipped"].append({"source": source, "reason": f"{type(error).__name__}: {error}"})
        return "", ""
    manifest["files"].append(_entry(source, data))
    return texts


def from_files(paths: Iterable[Path | str], *, validation: float = VALIDATION) -> Corpus:
    """The user's own UTF-8 text: files, folders of .txt, .md, .py, .jsonl and .parquet files, `datasets:NAME`.

    Every file is cut into documents of roughly 4 to 16 kB at blank lines (at line ends where there are none), so that
    even one big file has two sides. With ten files or more a file lies wholly on one side; with fewer, each document
    does. A folder's domain is its name; files given one by one are the domain `text`.
    """
    if not 0 < validation < 1:
        raise BadData(f"validation is {validation}; give a share between 0 and 1, such as {VALIDATION}")
    documents, files = read_documents(paths)
    size = sum(file["bytes"] for file in files)
    if size < MIN_BYTES:
        raise BadData(f"{size} bytes of text in {len(files)} files are too little; give at least {MIN_BYTES} bytes")
    manifest = {"origin": "files", "validation": validation, "files": files, "skipped": []}
    return _finish(_choose_sides(documents, validation), manifest)


def read_documents(paths: Iterable[Path | str], *, split: str = "train") -> tuple[list[Document], list[dict[str, Any]]]:
    """Files and datasets cut into documents, all on one side, and an entry for each of them."""
    paths = list(paths)
    named = [str(path) for path in paths if is_dataset(path)]
    given = [Path(path) for path in paths if not is_dataset(path)]
    contents = _text_files(given) if given or not named else {}
    common = os.path.commonpath([path.parent for path in contents]) if contents else ""
    documents, files = [], []
    for path, (domain, data) in contents.items():
        source = path.relative_to(common).as_posix().encode("utf-8", "backslashreplace").decode()
        files.append(_entry(source, data))
        rows = rows_of_file(path, data) if path.suffix in TABLES else [_checked_text(path, data)]
        documents += _cut(source, domain, split, rows)
    for name in named:
        domain, rows = dataset_rows(name, MAX_BYTES)
        files.append(_entry(name, joined(rows)))
        documents += _cut(name, domain, split, rows)
    return documents, files


def _cut(source: str, domain: str, split: str, rows: Iterable[str]) -> list[Document]:
    texts = (text for row in rows for text in pieces(row))
    return [Document(f"{source}#{i}", domain, split, text) for i, text in enumerate(texts)]


def save(corpus: Corpus, folder: Path) -> None:
    """Write documents.parquet and manifest.json, each whole or absent, the manifest last."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([asdict(document) for document in corpus.documents])
    with replacing(folder / "documents.parquet") as part:
        pq.write_table(table, part)
    write_json(folder / "manifest.json", {"hash": corpus.hash} | corpus.manifest)


def load(folder: Path) -> Corpus:
    """Read what `save` wrote; a missing or damaged folder is refused."""
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


def code_and_prose(text: str) -> tuple[str, str]:
    """One Python file as (its code without docstrings, its docstrings as paragraphs)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(text)
    scopes = list(_scopes(tree))
    notes = [note for scope in scopes if (note := ast.get_docstring(scope, clean=False))]
    return _without_docstrings(text, scopes), "\n\n".join(inspect.cleandoc(note) for note in notes)


def _without_docstrings(text: str, scopes: list[Any]) -> str:
    """Cut the docstrings out of the source text, which keeps comments and layout; a body never becomes empty."""
    lines: list[bytes | None] = [line.encode() for line in text.split("\n")]  # ast counts columns in bytes
    for scope in scopes:
        strings = list(itertools.takewhile(_is_string, scope.body))
        needs_body = len(strings) == len(scope.body) and not isinstance(scope, ast.Module)
        for node in reversed(strings):  # from the end, so that columns to the left stay valid
            before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
            alone = not before.strip() and after.strip()[:1] in (b"", b"#")
            rest = before + (b"" if alone and not needs_body else b"pass") + after
            lines[node.lineno - 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
            lines[node.lineno - 1] = rest if rest.strip() else None
    return b"\n".join(line for line in lines if line is not None).decode().strip("\n") + "\n"


def _scopes(tree: ast.Module) -> Iterator[Any]:
    """The module, classes and functions, found through statements only: most nodes are expressions and hold none."""
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for field in ("cases", "finalbody", "orelse", "handlers", "body"):
            stack.extend(reversed(getattr(node, field, ())))


def _is_string(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def library_sources() -> list[tuple[str, Path | str]]:
    """Every source of the standard library: (relative path, the file) or (topic name, its text)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[tuple[str, Path | str]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        paths = [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
        sources += [(path, root / path) for path in paths if not SKIPPED_FILES.fullmatch(path)]
    if len(sources) < 20:
        raise BadData(f"this Python has {len(sources)} source files in {root}; name text files of your own instead")
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        topics = {}
    return sources + [(f"{TOPICS}#{name}", text) for name, text in topics.items()]


def pieces(text: str) -> list[str]:
    """Cut a text at the first blank line past 4,000 characters, or else before 16,000 at a line end or space."""
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
    """Each file under `paths` once, with its domain and its bytes; empty files inside folders are passed over."""
    contents: dict[Path, tuple[str, bytes]] = {}
    total = 0
    for path in paths:
        if not path.exists():
            raise BadData(f"{path} does not exist; give text files, or folders of {', '.join(SUFFIXES)} files")
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
        domain = (path.resolve().name if path.is_dir() else "") or "text"
        for file in inside:
            if (total := total + file.stat().st_size) > MAX_BYTES:
                raise BadData(f"more than {MAX_BYTES} bytes of text; it is held in memory, so give fewer files")
            try:
                data = read_bytes(file, MAX_BYTES)
            except OSError as error:
                raise BadData(f"cannot read {file} ({error.strerror}); leave it out") from error
            if data.strip() or not path.is_dir():
                contents.setdefault(file.resolve(), (domain, data))
    if not contents:
        raise BadData(f"no text in {', '.join(map(str, paths)) or 'no paths'}; give {', '.join(SUFFIXES)} files")
    return contents


def _checked_text(path: Path, data: bytes) -> str:
    if not data.strip():
        raise BadData(f"{path} is empty; leave it out")
    if (position := data.find(b"\0")) >= 0:
        raise BadData(f"{path} is binary (a NUL byte at offset {position}); give text")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8 (byte offset {error.start}); convert it to UTF-8 first") from error


def _choose_sides(documents: list[Document], share: float) -> list[Document]:
    """Move units, in the order of a hash of their names, to validation until `share` of the text is there."""
    files = {document.source.rpartition("#")[0] for document in documents}
    unit = {d.source: d.source.rpartition("#")[0] if len(files) >= 10 else d.source for d in documents}
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[unit[document.source]] += len(document.text)
    room, chosen = share * sizes.total(), set()
    for name in sorted(sizes, key=lambda name: _fraction("split", name)):
        if sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    chosen = chosen or {min(sizes, key=lambda name: (sizes[name], name))}
    return [replace(d, split="validation") if unit[d.source] in chosen else d for d in documents]


def _entry(source: str, data: bytes) -> dict[str, Any]:
    return {"source": source, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _fraction(purpose: str, name: str) -> float:
    """A number in [0, 1) that depends on the name and on nothing else."""
    return int.from_bytes(hashlib.sha256(f"workbench {purpose} {name}".encode()).digest()[:6], "big") / 2**48


def _finish(documents: Sequence[Document], manifest: dict[str, Any]) -> Corpus:
    """Drop repeats, train first so that validation loses; refuse a corpus with an empty side."""
    ordered = sorted(documents, key=lambda document: SPLITS.index(document.split))
    blocks = [(owner, block) for owner, document in enumerate(ordered) for block in _blocks(document.text)]
    repeated = _repeats([block for _, block in blocks], [ordered[o].split == "validation" for o, _ in blocks])
    texts = [""] * len(ordered)
    for (owner, block), drop in zip(blocks, repeated, strict=True):
        texts[owner] += "" if drop else block
    kept = tuple(replace(d, text=t) for d, t in zip(ordered, texts, strict=True) if len(t.strip()) >= MIN_DOCUMENT)
    dropped = {"dropped_paragraphs": int(repeated.sum()), "dropped_documents": len(ordered) - len(kept)}
    corpus = Corpus(kept, {"python": platform.python_version()} | manifest | dropped)
    for split in SPLITS:
        if not corpus.split(split):
            raise BadData(f"no {split} text is left once repeats are dropped; give more text, or more varied text")
    return corpus


def _blocks(text: str) -> list[str]:
    """Paragraphs with the blank lines after them; their concatenation is the text."""
    ends = [match.end() for match in BLANK.finditer(text)]
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)]) if a < b]


def _repeats(blocks: list[str], strict: list[bool]) -> np.ndarray:
    """Which blocks repeat earlier ones: half of their windows of 25 words or, where strict, a single window."""
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
