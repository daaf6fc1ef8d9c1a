"""Backends of the `tokenizers` library whose time and memory are bounded, whatever a tokenizer.json holds.

A tokenizer runs in this process if its patterns match in time proportional to the text and its replacements lengthen the text by
a bounded factor. Any other tokenizer encodes and decodes in a worker process with limits (`tokenizer_worker.py`).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
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
WAYS = 64  # in which the bounded part of a pattern may match at one place
GROWTH = 64  # times that replacements may lengthen a text in this process
LONGEST_WORD = 1000  # characters of a word in WordPiece, whose time grows with their square
PATTERNS = (  # branches of published tokenizers that the rule below cannot tell from slow ones; their other branches end such runs
    r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+$", r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)  # fmt: skip
_parser: Any = re._parser  # type: ignore[attr-defined]  # the standard library's own parser of patterns
CHARACTERS = ("LITERAL", "NOT_LITERAL", "IN", "ANY")
_ONIGURUMA = re.compile(r"\[\[|\[:|&&|\\[ghkKRXGyYOQ]|\(\?[~@{*<](?![=!])|\\[pP](?!\{\^?[\w ]+\})")


def open_backend(text: str) -> Any:
    """Return the backend of a tokenizer.json's text, with limits if it needs them.

    Raises:
        ValueError: The text is no JSON object, or a key is given twice.
        Exception: The `tokenizers` library refuses it.
    """
    settings = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(settings, dict):
        raise ValueError("it holds no JSON object")
    limited = unbounded(settings)
    with without_panics("the tokenizers library cannot read it"):
        return LimitedBackend(text, settings) if limited else tokenizers.Tokenizer.from_str(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it gives a key twice")
    return values


@contextlib.contextmanager
def without_panics(what: str) -> Iterator[None]:
    """Raise `BadData` for a panic of a Rust library, which is a `BaseException`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadData(f"{what}: {_short(error)}") from error


def _short(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


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
        growth *= _longest_replacement(part.get("precompiled_charsmap"))
        if part.get("type") == "FixedLength" and not part.get("length"):  # the library panics, with pages of text
            return True
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    return growth > GROWTH or (isinstance(longest, int) and longest > LONGEST_WORD)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object inside of nested objects and lists."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(inner)


def _longest_replacement(encoded: Any) -> float:
    """Bytes of the longest replacement in a SentencePiece character map: a trie's size, the trie, replacements ended by NUL."""
    if not isinstance(encoded, str):
        return 1
    try:
        data = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    return max(1, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def linear(pattern: str) -> bool:
    """Return whether a pattern's search surely takes time proportional to the text.

    In every branch, what follows the first unbounded repeat cannot fail, so that nothing is tried again.
    """
    branches = list(_branches(pattern))
    return pattern in PATTERNS or all(branch in PATTERNS or _settles(branch) for branch in branches)


def _branches(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern that are not inside of a group or a class."""
    depth, begin, inside, i = 0, 0, False, 0
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
            yield pattern[begin:i]
            begin = i + 1
        i += 1
    yield pattern[begin:]


def _settles(branch: str) -> bool:
    if _ONIGURUMA.search(branch):  # Python's parser reads it otherwise
        return False
    try:
        plain = re.sub(r"(?s)\\(?:[pP]\{\^?[\w ]+\}|.)", lambda m: r"\w" if len(m[0]) > 2 else m[0], branch)
        return (ways := _ways(_parser.parse(plain))) is not None and ways[1] <= WAYS
    except (re.error, RecursionError, OverflowError):
        return False


def _ways(sequence: Iterable[tuple[Any, Any]]) -> tuple[bool, int] | None:
    """(has an unbounded repeat, ways in which the bounded part can match) of a sequence; None if something may be tried too often.

    That is the case if something after an unbounded repeat can fail, or if a repeat holds more than one character.
    """
    unbounded_before, ways = False, 1
    for operation, argument in sequence:
        name, inner = str(operation), None
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, repeated = argument
            if least > WAYS or (unbounded_before and least):
                return None
            if most == 1:
                inner = _ways(repeated)
            elif len(repeated) == 1 and str(repeated[0][0]) in CHARACTERS:
                inner = (most - least >= WAYS, 1 if most - least >= WAYS else 1 + most - least)
            inner = inner and (inner[0], inner[1] + (most == 1 > least))
        elif unbounded_before:
            return None
        elif name == "SUBPATTERN":
            inner = _ways(argument[3])
        elif name == "BRANCH":
            branches = [_ways(branch) for branch in argument[1]]
            if None not in branches:
                inner = any(b[0] for b in branches if b), sum(b[1] for b in branches if b)
        elif name in ("ASSERT", "ASSERT_NOT"):
            ahead = _ways(argument[1])
            inner = ahead if ahead and not ahead[0] else None
        elif name in (*CHARACTERS, "AT"):
            inner = False, 1
        if inner is None:
            return None
        unbounded_before, ways = unbounded_before or inner[0], ways * inner[1]
    return unbounded_before, ways


class LimitedBackend:
    """A backend that encodes and decodes in a worker process with limits; its vocabulary is here."""

    def __init__(self, text: str, settings: Mapping[str, Any]) -> None:
        self._text, self._settings, self._lock = text, settings, threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        harmless = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder", "truncation", "padding"))
        self._vocabulary = tokenizers.Tokenizer.from_str(json.dumps(dict(settings) | harmless))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_vocabulary"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitedBackend, (self._text, self._settings)

    def to_str(self, pretty: bool = False) -> str:
        """The text of the tokenizer.json."""
        return self._text

    def encode(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        """An encoding with `ids`; raises `BadData` beyond the limits."""
        return SimpleNamespace(ids=self._ask("encode", text, len(text)))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids; raises `BadData` beyond the limits."""
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
                cause = (
                    f"more than {seconds} s" if code == -signal.SIGXCPU else f"more than {MEMORY >> 30} GiB of memory"
                )
                raise BadData(f"this tokenizer takes {cause} to {what} {size} {UNITS[what]}; {CURE}")
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
        weakref.finalize(self, _end, worker)
        self._worker, self._owner = worker, os.getpid()
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(self._text).encode() + b"\n")


UNITS = {"encode": "characters", "decode": "ids"}
CURE = "its patterns or replacements are not usable: put another tokenizer.json there, or remove it and give token ids"


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    worker.wait()
