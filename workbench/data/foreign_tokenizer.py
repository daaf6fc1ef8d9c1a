"""Tokenizers of the `tokenizers` and transformers libraries with our interface, and token ids from their outputs.

as_tokenizer(AutoTokenizer.from_pretrained("gpt2", local_files_only=True)).encode("The cat")
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from workbench.data.tokenizer import VISIBLE, Tokenizer, byte_of_character, visible
from workbench.errors import BadData

PROBE = "The cat sat on the mat: 1 + 2 = 3, and so on.\n"
_BESIDE_IDS = ("attention_mask", "token_type_ids", "position_ids", "length", "special_tokens_mask", "offset_mapping")


class ForeignTokenizer(Tokenizer):
    """A tokenizer of another library; `begin` and `end` are the ids around a document, if its settings name them."""

    def __init__(self, backend: tokenizers.Tokenizer, begin: int | None = None, end: int | None = None) -> None:
        super().__init__(backend)
        self._begin, self._end = begin, end

    @cached_property
    def vocab_size(self) -> int:  # the backend makes a dictionary of all tokens to tell it
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_id(self) -> int:
        """The id that ends a document; raises `BadData` where the tokenizer names none."""
        return self._special(self._end, "end")

    @property
    def bos_id(self) -> int:
        """The id that begins a document; raises `BadData` where the tokenizer names none."""
        return self._special(self._begin, "begin")

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

    The given tokenizer is copied, not changed. The value None is returned unchanged. Text is encoded without special tokens, as with our
    own tokenizers.

    Args:
        given: The tokenizer.
        d_vocab: Size of the model's vocabulary.

    Raises:
        BadData: The tokenizer is of another kind, encodes otherwise than its copy, or has ids beyond the vocabulary.
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
        raise BadData(
            f"tokenizer, a {type(given).__name__}, cannot be copied ({error}): give token ids instead of text"
        ) from error
    if not alike:
        raise BadData(
            f"tokenizer, a {type(given).__name__}, does more than its backend: give token ids instead of text"
        )
    if tokenizer.vocab_size > d_vocab:
        raise BadData(
            f"tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary goes to {d_vocab - 1}: give the tokenizer that "
            "the model was trained with, or none and token ids"
        )
    return tokenizer


def ids_of(example: Any, tokenizer: Any) -> Any:
    """Return token ids of text, texts or a tokenizer's output (`BatchEncoding`, dict); other values are returned unchanged.

    Args:
        example: Text needs `tokenizer`; texts must have one length in tokens; a tokenizer's output must have no padding.
        tokenizer: With our interface, or None.

    Raises:
        BadData: The ids are not in it, or more than ids would have to be passed to the model.
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
        raise BadData(
            f"example_tokens has {', '.join(map(str, example)) or 'nothing'}, no input_ids: give token ids [batch, pos]"
        )
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
