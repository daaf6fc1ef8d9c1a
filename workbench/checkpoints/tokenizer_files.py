"""Tokenizers beside checkpoints: ours, or any `tokenizer.json` of the `tokenizers` library."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.data.tokenizer import BOS, BOS_ID, EOS, EOS_ID, ForeignTokenizer, Tokenizer
from workbench.data.tokenizer_limits import open_backend
from workbench.errors import BadCheckpoint, BadData
from workbench.file_io import read_text, write_json

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`; raises `BadCheckpoint` for a damaged one."""
    try:
        backend = open_backend(read_text(path))
        ours = [*map(backend.token_to_id, (EOS, BOS))] == [EOS_ID, BOS_ID]
        if not ours:
            settings = path.with_name(SETTINGS)
            values: dict[str, Any] = json.loads(read_text(settings)) if settings.exists() else {}
            tokens = (values.get(key) for key in ("bos_token", "eos_token"))
            names = (n.get("content") if isinstance(n, dict) else n for n in tokens)
            foreign = ForeignTokenizer(
                backend, *(backend.token_to_id(n) if isinstance(n, str) else None for n in names)
            )
            _ = foreign.vocab_size, foreign._legible
            return foreign
    except Exception as error:  # the library raises bare Exception for damaged JSON
        raise BadCheckpoint(f"no readable tokenizer in {path} ({error}); copy it again or remove it") from error
    return Tokenizer.load(path)


def start_token_of(description: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the id that begins every text of a model, None without one.

    Texts begin with it if every sequence of the run's training did, or if the tokenizer of another library puts it there.
    """
    data = description.get("data") or {}
    if (data.get("kind"), data.get("bos")) == ("text", "each"):
        return int(tokenizer.bos_id)
    return getattr(tokenizer, "start_token", None)


def tokenizer_beside(folder: Path, d_vocab: int) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint's folder, None without one; raises `BadCheckpoint` if it has too many tokens."""
    path = folder / TOKENIZER
    if not path.exists():
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > d_vocab:
        raise BadCheckpoint(
            f"{path} does not match the model: its ids go up to {tokenizer.vocab_size - 1}, the vocabulary to {d_vocab - 1}. Put "
            "the tokenizer there that the model was trained with, or remove it and give token ids"
        )
    return tokenizer


def export_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> dict[str, int | None]:
    """Write a tokenizer for transformers, and return the special ids for the model's config."""
    tokenizer.save(folder / TOKENIZER)
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    for name in ("bos", "eos"):
        with contextlib.suppress(BadData):  # a tokenizer that does not say
            ids[f"{name}_token_id"] = number = getattr(tokenizer, f"{name}_id")
            settings[f"{name}_token"] = tokenizer._backend.id_to_token(number)
    write_json(folder / SETTINGS, settings | {"clean_up_tokenization_spaces": False})
    return ids
