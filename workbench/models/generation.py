"""Text generation token by token: greedy or sampled, complete or streamed.

    p = softmax(logits / temperature), of the `top_k` largest, then of the smallest set whose mass reaches `top_p`

The filters and their order match transformers. Each row of a batch draws one number in [0, 1) per token from its
own generator and takes the token at which the cumulative p exceeds it. The tokens of a row depend only on the seed
and the row's index, not on the cache, the device or the other rows (up to rounding of the logits).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import BadData, WorkbenchError
from workbench.files import digest
from workbench.models.cache import KeyValueCache

HALF = "\ufffd"  # decoded from the bytes of an incomplete character
CONTEXT = 8  # prompt tokens to decode the first new token with: some tokenizers write a first token differently


class Decoder(Protocol):
    """The interface of a model for generation; `HookedModel` has it."""

    config: ModelConfig
    tokenizer: Any

    def to_tokens(self, text: Any) -> Tensor:
        """Return token ids [batch, pos]."""

    def new_cache(self, batch: int = 1, *, reserve: int = 0) -> KeyValueCache:
        """Return an empty key-value cache."""

    def __call__(self, tokens: Tensor, *, past_kv_cache: KeyValueCache | None = None) -> Tensor:
        """Return logits [batch, pos, d_vocab]."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling of the next token; temperature 0 takes the likeliest, with the lowest id among equals."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, d_vocab: int) -> None:
        """Raise `WorkbenchError` with the nearest valid value if a setting is out of range."""
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise WorkbenchError(f"temperature={self.temperature!r}: a finite number from 0 (greedy), 1 as trained")
        if self.top_k is not None and not _is_count(self.top_k, 1, d_vocab):
            nearest = min(max(int(self.top_k), 1), d_vocab) if _is_finite(self.top_k) else d_vocab
            raise WorkbenchError(f"top_k={self.top_k!r}: a whole number 1..{d_vocab} (d_vocab), nearest {nearest}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise WorkbenchError(f"top_p={self.top_p!r}: above 0, at most 1 (everything); 0.9 is usual")

    def choose(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Return token ids [batch] from logits [batch, d_vocab] and numbers in [0, 1) `drawn` [batch]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        mass = self.probabilities(logits).cumsum(-1)
        ids = torch.searchsorted(mass, drawn[:, None] * mass[:, -1:], right=True)[:, 0]
        return ids.minimum((mass < mass[:, -1:]).sum(-1))  # rounding may reach the total mass

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the filtered probabilities [batch, d_vocab], in float32 or better; at least one token is left."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = (wide - wide.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ranked, order = scaled.sort(stable=True, dim=-1, descending=True)
            each = ranked.softmax(-1)
            beyond = each.cumsum(-1) - each >= self.top_p  # the likelier tokens reach top_p already
            beyond[:, 0] = False
            scaled = scaled.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)
        return scaled.softmax(-1)


class Writer:
    """Decodes one row's tokens as they arrive; holds back incomplete characters and possible starts of a stop string."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops, self.stopped = tokenizer, stops, False
        self.ids, self.held = list(prompt[-CONTEXT:]), ""
        self.start, self.read = 0, len(self.ids)  # start and end of the tokens that are decoded again with the next one

    def add(self, token: int) -> str:
        """Add a token and return the text that is certain now."""
        self.ids.append(token)
        before, now = (self.tokenizer.decode(self.ids[self.start : end]) for end in (self.read, None))
        if not now.endswith(HALF):
            self.held += now[len(before) :]
            self.start, self.read = self.read, len(self.ids)
        at = [i for stop in self.stops if (i := self.held.find(stop)) >= 0]
        if at:
            self.stopped = True
            piece, self.held = self.held[: min(at)], ""
            return piece
        begun = max((n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        piece, self.held = self.held[: len(self.held) - begun], self.held[len(self.held) - begun :]
        return piece

    def end(self) -> str:
        """Return the text that was held back, at the end of the row."""
        if self.stopped:
            return ""
        before, now = (self.tokenizer.decode(self.ids[self.start : end]) for end in (self.read, None))
        return self.held + now[len(before) :]


@dataclass(frozen=True)
class Step:
    """One new token of every row: ids [batch], whether the row was running, whether it ends here, and its text."""

    ids: Tensor
    live: list[bool]
    done: list[bool]
    texts: list[str]


@dataclass(frozen=True)
class Generated:
    """Prompt and continuation [batch, pos]; rows that ended early are padded with the end id or their last token.

    `lengths` counts the tokens of every row with its stop. `ended` says whether a row ended by a `stop` or at the requested
    `length`. `texts` are prompt and continuation before the stop, for text prompts.
    """

    ids: Tensor
    lengths: list[int]
    ended: list[Literal["stop", "length"]]
    texts: list[str]


def generate(model: Decoder, prompt: Any, max_new_tokens: int = 64, **options: Any) -> Generated:
    """Return a continuation with its lengths and ends; options as in `HookedModel.generate`."""
    columns = [model.to_tokens(prompt)]
    lengths = [columns[0].shape[1]] * len(columns[0])
    texts = [prompt] if isinstance(prompt, str) else list(prompt) if is_text(prompt) else []
    for step in steps(model, prompt, max_new_tokens, **options):
        columns.append(step.ids[:, None])
        lengths = [n + going for n, going in zip(lengths, step.live, strict=True)]
        texts = [text + piece for text, piece in zip(texts, step.texts, strict=True)] if texts else []
    ended: list[Literal["stop", "length"]] = ["stop" if done else "length" for done in step.done]
    return Generated(torch.cat(columns, 1), lengths, ended, texts)


def stream(model: Decoder, prompt: Any, max_new_tokens: int = 64, **options: Any) -> Iterator[Any]:
    """Yield one item per new token, in the form of the prompt; options are checked at once."""
    items = (step.texts if is_text(prompt) else step.ids for step in steps(model, prompt, max_new_tokens, **options))
    if not is_single(prompt):
        return items
    return (item[0] if isinstance(item, list) else int(item[0]) for item in items)


def is_text(prompt: Any) -> bool:
    """Return whether a prompt is text or a list of texts rather than ids."""
    return isinstance(prompt, str) or (isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], str))


def is_single(prompt: Any) -> bool:
    """Return whether a prompt is one sequence rather than a batch."""
    return isinstance(prompt, str) or (not is_text(prompt) and torch.as_tensor(prompt).ndim == 1)


def steps(
    model: Decoder,
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Any = None,
    use_cache: bool = True,
) -> Iterator[Step]:
    """Yield the new tokens of all rows; every option is checked before the model runs."""
    ids = model.to_tokens(prompt)
    length, n_ctx = ids.shape[1], model.config.n_ctx
    if (room := n_ctx - length) < 1:
        raise BadData(f"the prompt fills the model's context of n_ctx={n_ctx} tokens: shorten it")
    if not _is_count(max_new_tokens, 1, room):
        nearest = min(max(int(max_new_tokens), 1), room) if _is_finite(max_new_tokens) else room
        raise BadData(
            f"max_new_tokens={max_new_tokens!r}: a prompt of {length} tokens leaves room for 1..{room} of n_ctx={n_ctx},"
            f" nearest {nearest}"
        )
    if seed is not None and not _is_count(seed, 0, 2**63 - 1):
        raise WorkbenchError(f"seed={seed!r}: a whole number from 0, or None for another text each time")
    ends, strings = _stops(model, stop)
    writing = bool(strings) or is_text(prompt)  # then ids that the tokenizer cannot decode are not drawn
    vocabulary = min(model.config.d_vocab, model.tokenizer.vocab_size) if writing else model.config.d_vocab
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling.check(vocabulary)
    if seed is None and temperature:
        seed = int(torch.randint(2**63 - 1, ()))
    row_seeds = [int(digest("generate", seed, row), 16) % 2**63 for row in range(len(ids))]
    return _Decoding(
        model=model,
        cache=model.new_cache(len(ids), reserve=ids.shape[1] + max_new_tokens - 1) if use_cache else None,
        sampling=sampling,
        vocabulary=vocabulary,
        generators=[torch.Generator().manual_seed(s) for s in row_seeds] if temperature else [],
        writers=[Writer(model.tokenizer, row, strings) for row in ids.tolist()] if writing else [],
        ends=ends,
        padding=_end_of(model),
    ).run(ids, max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    """The settings of one generation."""

    model: Decoder
    cache: KeyValueCache | None
    sampling: Sampling
    vocabulary: int
    generators: list[torch.Generator]
    writers: list[Writer]
    ends: set[int]
    padding: int | None

    def run(self, ids: Tensor, count: int) -> Iterator[Step]:
        new, done = ids, [False] * len(ids)
        for left in reversed(range(count)):
            live, drawn = [not d for d in done], self._next(ids, new).tolist()
            pads = [self.padding if self.padding is not None else old for old in ids[:, -1].tolist()]
            tokens = [token if going else pad for token, going, pad in zip(drawn, live, pads, strict=True)]
            done = [not going or token in self.ends for token, going in zip(tokens, live, strict=True)]
            texts = []
            for row, writer in enumerate(self.writers):
                text = "" if done[row] else writer.add(tokens[row])  # a stop is not part of the text
                done[row] |= writer.stopped
                texts.append(text + (writer.end() if live[row] and (done[row] or not left) else ""))
            new = torch.tensor(tokens, device=ids.device)[:, None]
            ids = torch.cat((ids, new), 1)
            yield Step(new[:, 0], live, done, texts)
            if all(done):
                return

    @torch.no_grad()
    def _next(self, ids: Tensor, new: Tensor) -> Tensor:
        """Return the next token of every row [batch]."""
        logits = self.model(ids) if self.cache is None else self.model(new, past_kv_cache=self.cache)
        logits, n = logits[:, -1, : self.vocabulary], ids.shape[1]
        if not bool(logits.amax(-1).isfinite().all()):
            raise BadData(f"the logits after {n} tokens have no finite maximum: weights or a hook make NaN or infinity")
        draws = [torch.rand((), generator=g) for g in self.generators] or [torch.zeros(())] * len(ids)
        return self.sampling.choose(logits, torch.stack(draws).to(logits.device))


def _end_of(model: Decoder) -> int | None:
    """Return the tokenizer's id for the end of a document, None if it has none."""
    with contextlib.suppress(BadData):
        return None if model.tokenizer is None else int(model.tokenizer.eos_id)
    return None


def _stops(model: Decoder, stop: Any) -> tuple[set[int], list[str]]:
    """Return the ids and the strings that end a row."""
    stops = list(stop) if isinstance(stop, list | tuple | set | frozenset) else [] if stop is None else [stop]
    end, d_vocab = _end_of(model), model.config.d_vocab
    ends, strings = {end} if end is not None and (stops or stop is None) else set[int](), list[str]()
    for one in stops:
        if isinstance(one, str) and one:
            strings.append(one)
        elif _is_count(one, 0, d_vocab - 1):
            ends.add(int(one))
        else:
            raise BadData(f"stop={one!r}: a token id 0..{d_vocab - 1} or a text that is not empty, or a list of them")
    if strings and model.tokenizer is None:
        raise BadData(f"stop={strings[0]!r}: this model came without a tokenizer, so give token ids 0..{d_vocab - 1}")
    return ends, strings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_count(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
