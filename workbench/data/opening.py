"""The data that a run was trained on, from its description."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.data import corpus as corpora
from workbench.data.embedded import embedded
from workbench.data.sources import BackcopyData, Data, RepeatedData, TextData, open_tokens
from workbench.data.tokenizer import Tokenizer
from workbench.errors import BadCheckpoint, BadData


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
        raise BadCheckpoint(
            "nothing says what an imported run was trained on; give data= ids, text, a file or a corpus (--text FILE)"
        )
    if kind != "text" or Path(name).name != name or name == "..":
        raise BadCheckpoint(f"unknown data {description!r}; give data= instead")
    if not (root / name / "data.json").exists():
        if tokenizer is not None and tokenizer.is_file():
            data = _of_embedded_text(tokenizer, tokenizer.stat().st_mtime_ns, description.get("bos"))
            if data.hash == name:
                return data
        raise BadCheckpoint(f"the corpus {name} this run was trained on is not under {root}; give data= instead")
    return _open_text(root / name, description.get("bos"))


@lru_cache(maxsize=2)  # named by its content; tokenising it again for each checkpoint would cost more than measuring
def _open_text(folder: Path, bos: Any) -> TextData:
    try:
        data = TextData(corpora.load_corpus(folder), Tokenizer.load(folder / "tokenizer.json"), bos)
    except BadData as error:
        raise BadCheckpoint(str(error)) from error
    if data.hash != folder.name:
        raise BadCheckpoint(f"{folder} holds other data than its name says; remove it and build it again")
    return data


@lru_cache(maxsize=2)
def _of_embedded_text(tokenizer: Path, changed: int, bos: Any) -> TextData:
    return TextData(embedded(), Tokenizer.load(tokenizer), bos)
