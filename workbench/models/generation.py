"""Text generation token by token, greedy or sampled, complete or streamed, and its key-value cache.

    p = softmax(logits / temperature), of the `top_k` largest, then of the smallest set whose mass reaches `top_p`

The filters and their order match transformers. Each row of a batch draws one number in [0, 1) per token from its
own generator and takes the token at which the cumulative p exceeds it. The tokens of a row depend only on the seed
and the row's index, not on the cache, the device or the other rows (up to rounding of the logits).

The cache has rotated keys and effective values; a tensor that layers share is stored once. Capacity (`nbytes`) and traffic
(`traffic`) differ. SVFormer's cache has (L + 1) / (2 L) of the decoder's bytes, but each layer's attention reads the shared values
again. Decoding therefore moves as many bytes as in the decoder, unless a nearer memory keeps them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.file_io import digest


class KeyValueCache:
    """Keys and values of past tokens; `model.new_cache` makes a cache and cached forward passes fill it."""

    def __init__(
        self, model: Any, batch: int, capacity: int, *, reserve: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self.batch, self.capacity, self.reserve, self.dtype = batch, capacity, reserve, dtype
        self.length = 0
        self.entries: dict[tuple[str, int], Tensor] = {}  # (k or v, layer) -> [batch, reserved, kv_head, d_head]
        self._read = self._traffic = 0
        self._made: list[tuple[str, int]] = []  # entries that the current pass has added

    def check(self, model: Any, ids: Tensor) -> None:
        """Raise `BadData` if ids [batch, pos] of a model cannot continue this cache."""
        for key in self._made:  # by an interrupted pass; its entries in other buffers are beyond `length`
            del self.entries[key]
        self._made, self._read = [], 0
        owner: Any = self._model()
        if owner is not model:
            raise BadData("this cache belongs to another model: make one with model.new_cache(batch)")
        if len(ids) != self.batch:
            n = len(ids)
            raise BadData(f"the cache holds {self.batch} sequences, these are {n}; make one with new_cache({n})")
        if self.length + ids.shape[1] > self.capacity:
            raise BadData(
                f"{self.length} cached and {ids.shape[1]} new tokens exceed the cache's {self.capacity}"
                f" (the model's context is n_ctx={model.config.n_ctx}); room for {self.capacity - self.length}"
            )

    def extend(
        self, name: str, layer: int, new: Tensor, *, source: Any = None, shared: bool = False, own_heads: int = 0
    ) -> Tensor:
        """Add new keys or values of a layer and return the keys or values of all positions [batch, pos, kv_head, d_head].

        With `shared` the tensor, or its heads from `own_heads` on, equals that of the layer `source`, so nothing is stored. After a
        hook changes a shared tensor, the layer gets a separate entry with the source's past.
        """
        if not own_heads:
            return self._extended((name, layer), new, self.entries.get((name, source)), shared)
        own, others = new[:, :, :own_heads], new[:, :, own_heads:]
        past = self.entries[name, source][:, :, own_heads:]
        both = (
            self._extended((name, layer), own, None),
            self._extended((f"{name} of others", layer), others, past, shared),
        )
        return torch.cat(both, 2)

    def _extended(self, key: tuple[str, int], new: Tensor, source: Tensor | None, shared: bool = False) -> Tensor:
        end = self.length + new.shape[1]
        if shared and key not in self.entries:
            assert source is not None
            full = source[:, :end]
        else:
            held = self.entries.get(key)
            if held is None or held.shape[1] < end:
                size = max(end, self.reserve) if held is None else min(self.capacity, max(end, 2 * held.shape[1]))
                with torch.inference_mode(False):  # a tensor of inference mode could not be written outside it
                    buffer = new.new_empty((self.batch, size, *new.shape[2:]), dtype=self.dtype or new.dtype)
                past = source if held is None else held
                if self.length:
                    assert past is not None, f"{key[0]} of layer {key[1]} has no past"
                    buffer[:, : self.length] = past[:, : self.length]
                if held is None:
                    self._made.append(key)
                self.entries[key] = buffer
            else:
                buffer = held
            buffer[:, self.length : end] = new
            full = buffer[:, :end]
        self.note(full)
        return full if full.dtype == new.dtype else full.to(new.dtype)

    def note(self, read: Tensor) -> None:
        """Count the bytes that an attention reads."""
        self._read += read.numel() * (self.dtype or read.dtype).itemsize

    def advance(self, new: int) -> None:
        """End a forward pass over `new` tokens."""
        self.length += new
        self._traffic, self._read, self._made = self._read, 0, []

    @torch.inference_mode(False)
    def clone(self) -> KeyValueCache:
        """Return an independent copy, for two continuations of one prompt."""
        twin = copy.copy(self)
        twin.entries, twin._made = {key: entry.clone() for key, entry in self.entries.items()}, list(self._made)
        return twin

    def truncate(self, length: int) -> None:
        """Remove everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise BadData(f"length={length}: the cache holds {self.length} tokens, choose from 0..{self.length}")
        self.length = length
        if not length:
            self.entries, self._made = {}, []  # layers with a separate entry may share again

    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values, without memory reserved for later tokens."""
        return sum(entry[:, : self.length].nbytes for entry in self.entries.values())

    def traffic(self) -> int:
        """Return the bytes that the attentions of the last pass read; shared tensors count once per reader."""
        return self._traffic


HALF = "\ufffd"  # decoded from the bytes of an incomplete character
CONTEXT = 8  # prompt tokens to decode the first new token with: some tokenizers write a first token differently


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


def generate(model: Any, prompt: Any, max_new_tokens: int = 64, **options: Any) -> Generated:
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


def stream(model: Any, prompt: Any, max_new_tokens: int = 64, **options: Any) -> Iterator[Any]:
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
    model: Any,
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    do_sample: bool | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Any = None,
    use_cache: bool | None = None,
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
    end, ends, strings = _stops(model, stop)
    writing = bool(strings) or is_text(prompt)  # then ids that the tokenizer cannot decode are not drawn
    vocabulary = min(model.config.d_vocab, model.tokenizer.vocab_size) if writing else model.config.d_vocab
    if do_sample and temperature == 0:
        raise WorkbenchError("do_sample=True needs a temperature above 0; temperature=0 takes the likeliest token")
    temperature = 0 if do_sample is False else temperature
    use_cache = model.decodes_with_cache if use_cache is None else use_cache
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling.check(vocabulary)
    if seed is None and temperature:
        seed = int(torch.randint(2**63 - 1, ()))
    row_seeds = [int(digest("generate", seed, row), 16) % 2**63 for row in range(len(ids))]
    generators = [torch.Generator().manual_seed(s) for s in row_seeds] if temperature else []
    writers = [Writer(model.tokenizer, row, strings) for row in ids.tolist()] if writing else []
    cache = model.new_cache(len(ids), reserve=length + max_new_tokens - 1) if use_cache else None

    @torch.no_grad()
    def drawn(ids: Tensor, new: Tensor) -> list[int]:
        """Return the next token of every row."""
        logits = model(ids) if cache is None else model(new, past_kv_cache=cache)
        logits = logits[:, -1, :vocabulary]
        if not bool(logits.amax(-1).isfinite().all()):
            what = f"the logits after {ids.shape[1]} tokens have no finite maximum"
            raise BadData(f"{what}: weights or a hook make NaN or infinity")
        draws = [torch.rand((), generator=g) for g in generators] or [torch.zeros(())] * len(ids)
        return sampling.choose(logits, torch.stack(draws).to(logits.device)).tolist()

    def run(ids: Tensor) -> Iterator[Step]:
        new, done = ids, [False] * len(ids)
        for left in reversed(range(max_new_tokens)):
            live, candidates = [not d for d in done], drawn(ids, new)
            pads = [end if end is not None else old for old in ids[:, -1].tolist()]
            tokens = [token if going else pad for token, going, pad in zip(candidates, live, pads, strict=True)]
            done = [not going or token in ends for token, going in zip(tokens, live, strict=True)]
            texts = []
            for row, writer in enumerate(writers):
                text = "" if done[row] else writer.add(tokens[row])  # a stop is not part of the text
                done[row] |= writer.stopped
                texts.append(text + (writer.end() if live[row] and (done[row] or not left) else ""))
            new = torch.tensor(tokens, device=ids.device)[:, None]
            ids = torch.cat((ids, new), 1)
            yield Step(new[:, 0], live, done, texts)
            if all(done):
                return

    return run(ids)


def _stops(model: Any, stop: Any) -> tuple[int | None, set[int], list[str]]:
    """Return the id that ends a document, if any, and the ids and strings that end a row."""
    stops = list(stop) if isinstance(stop, list | tuple | set | frozenset) else [] if stop is None else [stop]
    end, d_vocab = None, model.config.d_vocab
    if model.tokenizer is not None:
        with contextlib.suppress(BadData):  # a tokenizer without an end of documents
            end = int(model.tokenizer.eos_id)
    ends = {end} if end is not None and (stops or stop is None) else set[int]()
    strings = [one for one in stops if isinstance(one, str) and one]
    for one in stops:
        if _is_count(one, 0, d_vocab - 1):
            ends.add(int(one))
        elif one not in strings:
            raise BadData(f"stop={one!r}: a token id 0..{d_vocab - 1} or a text that is not empty, or a list of them")
    if strings and model.tokenizer is None:
        raise BadData(f"stop={strings[0]!r}: this model came without a tokenizer, so give token ids 0..{d_vocab - 1}")
    return end, ends, strings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_count(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
