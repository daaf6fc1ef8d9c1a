"""Tokenizer backends with bounded time and memory, for any tokenizer.json.

A tokenizer runs in this process if its patterns occur in published tokenizers and its replacements hardly lengthen the text. Any
other tokenizer runs in a worker process with limits (`tokenizer_worker.py`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers

from workbench.errors import BadData

SECONDS, CHARACTERS_PER_SECOND = 10, 20_000
"""Processor time of a worker for one text: so many seconds, and one more for so many characters."""
MEMORY = 4 << 30  # bytes of address space of a worker
GROWTH = 64  # times that replacements may lengthen a text in this process
LONGEST_WORD = 1000  # characters of a word in WordPiece, whose time grows with their square
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _CONTRACTIONS = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINEAR = {  # alternatives in the patterns of published tokenizers, each of which takes time proportional to the text
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)", r"'(?:[sdmt]|ll|ve|re)",
    r" ?\p{L}+", r"\s?\p{L}+", rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}+\p{{L}}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    rf"{_BEFORE}{_UPPER}+{_LOWER}*", rf"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
    r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\d", r"\d+", r"\d{1,3}", r"[0-9]", r"[0-9]+", r"[0-9][0-9][0-9]", r"(?<=\d)(?=\d)",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*", r"\s?\p{P}+", r"\p{P}", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\s", r"\s+", r"\s+(?!\S)", r"[\r\n]", r"\n", r"\t", " ", " +", r" {2,}", r"\s{2,}", "[一-龥ࠀ-一가-퟿]+",
}  # fmt: skip
ENDED = {  # alternatives that take linear time only if another alternative ends the run of characters
    r"\s*[\r\n]+": r"\s+", r"\s*[\r\n]": r"\s+", r"\s+$": r"\s+",
    **{f"{_BEFORE}{_UPPER}*{_LOWER}+{end}": f"{_BEFORE}{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_CONTRACTIONS}?")},
}  # fmt: skip


def open_backend(text: str) -> Any:
    """Return the backend of a tokenizer.json's text, with limits if it needs them; raises `ValueError` for other than one JSON object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("it gives a key twice")
        return values

    settings = json.loads(text, object_pairs_hook=unique)
    if not isinstance(settings, dict):
        raise ValueError("it holds no JSON object")
    limited = unbounded(settings)
    with without_panics("the tokenizers library cannot read it"):
        return LimitedBackend(text, settings) if limited else tokenizers.Tokenizer.from_str(text)


@contextlib.contextmanager
def without_panics(what: str) -> Iterator[None]:
    """Raise `BadData` for a panic of a Rust library, which is a `BaseException`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        first = next(iter(str(error).strip().splitlines()), "")[:300]
        raise BadData(f"{what}: {first}") from error


def unbounded(settings: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's patterns or replacements may take more than a bounded time or memory per character."""
    growth, model = 1.0, settings.get("model")
    for part in _parts([settings.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]):
        pattern = part.get("pattern")
        regex, plain = (pattern.get("Regex"), pattern.get("String")) if isinstance(pattern, dict) else (None, None)
        if isinstance(regex, str) and not linear(regex):
            return True
        if isinstance(content := part.get("content"), str) and pattern is not None:
            growth *= max(1.0, len(content.encode()) / len(plain.encode()) if plain else 1 + len(content.encode()))
        # SentencePiece: a trie's size, the trie, replacements, NUL
        if isinstance(encoded := part.get("precompiled_charsmap"), str):
            with contextlib.suppress(ValueError):  # the library refuses what is no Base64
                data = base64.b64decode(encoded)
                growth *= max(1, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        if part.get("type") == "FixedLength" and not part.get("length"):  # the library panics, with pages of text
            return True
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    return growth > GROWTH or (isinstance(longest, int) and longest > LONGEST_WORD)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object inside nested objects and lists."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(inner)


def linear(pattern: str) -> bool:
    """Return whether a pattern consists of alternatives that published tokenizers have, and takes linear time."""
    branches, depth, begin, inside, i = set(), 0, 0, False, 0  # the alternatives outside of groups and classes
    while i < len(pattern):
        sign = pattern[i]
        if sign == "\\":
            i += 1
        elif inside:
            inside = sign != "]" or pattern[i - 1] == "[" or pattern[i - 2 : i] == "[^"
        elif sign == "[":
            inside = True
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and not depth:
            branches.add(pattern[begin:i])
            begin = i + 1
        i += 1
    branches.add(pattern[begin:])
    return pattern in LINEAR or all(b in LINEAR or ENDED.get(b) in branches for b in branches)


class LimitedBackend:
    """A backend that encodes and decodes in a worker process with limits; its vocabulary is here."""

    def __init__(self, text: str, settings: Mapping[str, Any]) -> None:
        self._text, self._settings, self._lock = text, settings, threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        harmless = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder", "truncation", "padding"))
        self.vocabulary = tokenizers.Tokenizer.from_str(json.dumps(dict(settings) | harmless))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["vocabulary"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitedBackend, (self._text, self._settings)

    def to_str(self, pretty: bool = False) -> str:
        return self._text

    def encode(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(ids=self._ask("encode", text, len(text)))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = list(ids)
        return str(self._ask("decode", ids, len(ids)))

    def _ask(self, what: str, value: Any, size: int) -> Any:
        seconds = SECONDS + size // CHARACTERS_PER_SECOND
        with self._lock:
            if self._worker is None or self._owner != os.getpid():
                self._start()
            worker = self._worker
            assert worker is not None
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                worker.stdin.write(json.dumps([what, value, seconds]).encode() + b"\n")
                worker.stdin.flush()
                answer = worker.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if not answer.endswith(b"\n"):
                self._worker, code = None, worker.wait()
                worker.stdin.close()
                worker.stdout.close()
                cause = f"{seconds} s" if code == -signal.SIGXCPU else f"{MEMORY >> 30} GiB of memory"
                raise BadData(f"this tokenizer takes more than {cause} to {what} {size} {UNITS[what]}; {CURE}")
        result, error = json.loads(answer)
        if error is not None:
            raise BadData(f"this tokenizer cannot {what} {size} {UNITS[what]} ({error}); {CURE}")
        return result

    def _start(self) -> None:
        script = Path(__file__).with_name("tokenizer_worker.py")
        worker = subprocess.Popen(
            [sys.executable, "-P", str(script), str(MEMORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

        def end() -> None:
            worker.kill()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            worker.wait()

        weakref.finalize(self, end)
        self._worker, self._owner = worker, os.getpid()
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(self._text).encode() + b"\n")


UNITS = {"encode": "characters", "decode": "ids"}
CURE = "its patterns or replacements are not usable: put another tokenizer.json there, or remove it and give token ids"
