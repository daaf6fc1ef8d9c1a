"""An adapter for lm-evaluation-harness (optional: `pip install 'value-residual-workbench[harness]'`).

    import lm_eval
    lm_eval.simple_evaluate(model=workbench.models.lm_eval.for_lm_eval(model), tasks=["arc_easy"])

`Harness` implements the three kinds of request and does not import the harness. Their definition is in
EleutherAI/lm-evaluation-harness, lm_eval/api/model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.errors import BadData, WorkbenchError
from workbench.places import install

MAX_NEW = 256  # the harness's default number of generated tokens


class Harness:
    """The harness's three kinds of request for a model with a tokenizer, in batches of `batch` sequences.

    `prefix` is the token before a text without context, by default the token that ends documents.
    """

    def __init__(self, model: Any, *, batch: int = 8, prefix: int | None = None) -> None:
        if model.tokenizer is None:
            raise BadData("this model has no tokenizer: the harness sends text; set model.tokenizer first")
        if batch < 1:
            raise WorkbenchError(f"batch={batch}: at least 1")
        self.model, self.text, self.batch = model, model.tokenizer, batch
        self.prefix = self.text.eos_id if prefix is None else prefix
        self.start = [] if model.start_token is None else [model.start_token]

    @property
    def longest(self) -> int:
        """The model's context in tokens."""
        return int(self.model.config.n_ctx)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return (log probability in nats, whether greedy decoding gives it) for each (context, continuation)."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            before = [*self.start, *(self.text.encode(context.rstrip() or context) if context else [])]
            ids = [*self.start, *self.text.encode(context + continuation)]
            pairs.append((before or [self.prefix], ids[len(before) :]))
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log probability in nats of each (text,), each token with as much context as fits."""
        pairs, counts = [], []  # consecutive windows, the last one filled up with context
        for request in requests:
            ids = self.text.encode(request.args[0])
            stream, begins = [self.prefix, *ids], range(0, len(ids), self.longest)
            for begin in begins:
                end = min(begin + self.longest, len(ids))
                most = max(0, end - self.longest)
                context = [*self.start, *ids[most:begin]] if self.start else stream[most : begin + 1]
                pairs.append((context, ids[begin:end]))
            counts.append(len(begins))
        scores = iter(self._score(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Return the greedy continuation of each (context, settings), up to a text in `until`, the end of a document or the limit."""
        texts = []
        for context, given in (request.args for request in requests):
            settings = dict(given or {})
            if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                raise WorkbenchError("generation is greedy here; set do_sample: false in the task")
            until = settings.get("until") or []
            stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            room = min(int(settings.get("max_gen_toks", MAX_NEW)), self.longest - 1 - len(self.start))
            ids = [*self.text.encode(context)][len(self.start) + room - self.longest :]
            ids = [*self.start, *ids] or [self.prefix]
            new: list[int] = []
            while len(new) < room and not any(stop in self.text.decode(new) for stop in stops):
                token = int(self.model(torch.tensor([[*ids, *new]]))[0, -1].argmax())
                if token == self.prefix:
                    break
                new.append(token)
            text = self.text.decode(new)
            texts.append(text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))])
        return texts

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        for _, predicted in pairs:
            if len(predicted) > self.longest:
                limit = f"exceeds the model's {self.longest}; shorten it"
                raise BadData(f"a continuation of {len(predicted)} tokens {limit}")
        rows = [([*context, *predicted][-self.longest - 1 :], len(predicted)) for context, predicted in pairs]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        scored: list[tuple[float, bool]] = [(0.0, True)] * len(rows)  # of an empty continuation
        for begin in range(0, len(order), self.batch):
            indices = [i for i in order[begin : begin + self.batch] if rows[i][1]]
            if not indices:
                continue
            width = max(len(rows[i][0]) for i in indices) - 1
            # padding on the right does not change the earlier positions of a causal model
            padded = [rows[i][0][:-1] + [self.prefix] * (width + 1 - len(rows[i][0])) for i in indices]
            for i, scores in zip(indices, self.model(torch.tensor(padded)), strict=True):
                row, n = rows[i]
                log_p = scores[len(row) - 1 - n : len(row) - 1].float().log_softmax(-1)
                targets = torch.tensor(row[-n:], device=log_p.device)
                each = log_p.gather(1, targets[:, None])
                scored[i] = float(each.double().sum()), bool((log_p.argmax(-1) == targets).all())
        return scored


def for_lm_eval(model: Any, **settings: Any) -> Any:
    """Return the model as an `lm_eval.api.model.LM`; raise `WorkbenchError` without the harness."""
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        missing = f"lm-evaluation-harness is not installed ({error})"
        raise WorkbenchError(f"{missing}: {install('harness')}") from error

    class Adapter(Harness, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            Harness.__init__(self, model, **settings)

    return Adapter()
