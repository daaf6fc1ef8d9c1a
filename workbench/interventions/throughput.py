"""How fast a model trains, reads and writes on this machine, and how much memory its tensors take meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.registered_experiments import intervention, trainable
from workbench.models import build
from workbench.models.hooked import next_token_loss
from workbench.models.tensor_memory import LiveBytes

ROUNDS = 5  # that count; one before them does not
DECODED = 16  # tokens, one at a time
MAX_TOKENS, MAX_TOKENS_ELSEWHERE = {"cpu": 2**11}, 2**16  # of a batch


@dataclass(frozen=True)
class Work:
    """What is timed: `run` on what `prepare` made, which is not. `held`: tensors that are there all the time."""

    tokens: int
    prepare: Callable[[], Any]
    run: Callable[[Any], object]
    held: Sequence[Tensor]


@intervention(
    unit="tokens/s", range="> 0", reading="higher: faster on this machine", timed=True,
    source="wall clock, median of five rounds after a warm-up; bytes counted from the tensors alive",
)  # fmt: skip
def throughput(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Tokens per second of a training step, of reading a prompt (prefill) and of decoding, by the clock.

    `n` is the batch size in documents (at most 2,048 tokens on a CPU, 65,536 elsewhere) and T their length. Data type and device are
    in the provenance. Training: loss, gradients, clipping and AdamW, on a copy of the weights. Prefill and decode: T - 16 tokens at
    once, then 16 one at a time, with a key-value cache. `peak`: bytes of the tensors alive at the worst moment, weights and moments
    included, workspaces inside kernels not. Control `vanilla`: the plain decoder of the same shape, timed alternately with the model.
    `of_vanilla`: median over rounds of its time divided by the model's (above 1: faster than vanilla; for a vanilla model it shows
    the noise). Caution: no two runs of a clock agree and a busy machine is slow. Trust the ratio; compare tokens per second from one
    idle machine only. Hooks that are set are timed too. Bytes repeat exactly.
    """
    device = model.embed.weight.device
    most = max(1, MAX_TOKENS.get(device.type, MAX_TOKENS_ELSEWHERE) // sample.ids.shape[1])
    ids = sample.ids[:most].to(device)
    works: dict[str | None, dict[str, Work]] = {None: _works(model, ids)}
    if getattr(model, "foreign", None) is None:
        works["vanilla"] = _works(build("transformer", model.config, dtype=model.embed.weight.dtype).to(device), ids)
    for part, mine in works[None].items():
        turns = {control: by_part[part] for control, by_part in works.items()}
        seconds: dict[str | None, list[float]] = {name: [] for name in turns}
        for number in range(1 + ROUNDS):  # all models in turns, so that other load affects them equally
            for name, work in turns.items():
                ready = work.prepare()
                _finish(device)
                begin = perf_counter()
                work.run(ready)
                _finish(device)
                took = perf_counter() - begin
                if number:
                    seconds[name].append(took)
        for control, work in turns.items():
            with LiveBytes(work.held) as live:
                ready = work.prepare()
                live.peak = live.now
                work.run(ready)
            axes = {"part": part, "control": control, "n": len(ids)}
            yield axes | {"value": mine.tokens / statistics.median(seconds[control]), "unit": "tokens/s"}
            yield axes | {"variant": "peak", "value": live.peak, "unit": "bytes"}
        if "vanilla" in seconds:
            ratio = statistics.median(b / a for a, b in zip(seconds[None], seconds["vanilla"], strict=True))
            yield {"part": part, "variant": "of_vanilla", "n": len(ids), "value": ratio, "unit": "ratio"}


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _works(model: Any, ids: Tensor) -> dict[str, Work]:
    """Timings by part; models without our cache are timed in training only."""
    if not model.caches:
        return {"training": _training(model, ids)}
    weights, new = list(model.parameters()), min(DECODED, ids.shape[1] - 1)
    prompt = ids[:, : ids.shape[1] - new]

    def read(cache: Any) -> tuple[Any, Tensor]:
        return cache, model(prompt, past_kv_cache=cache)[:, -1:].argmax(-1)

    def write(ready: tuple[Any, Tensor]) -> None:
        cache, token = ready
        for _ in range(new):
            token = model(token, past_kv_cache=cache)[:, -1:].argmax(-1)

    def empty() -> Any:
        return model.new_cache(len(ids), reserve=ids.shape[1])

    return {
        "training": _training(model, ids),
        "prefill": Work(prompt.numel(), empty, read, weights),
        "decode": Work(len(ids) * new, lambda: read(empty()), write, weights),
    }


def _training(model: Any, ids: Tensor) -> Work:
    """Steps of AdamW on a copy of the weights; gradients always come from the unchanged model."""
    weights = list(model.parameters())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in weights]
    optimiser = torch.optim.AdamW(copies, lr=1e-4, fused=True)
    every = getattr(model, "everywhere", None)  # a foreign module's logits

    def step(_: object) -> None:
        with torch.enable_grad(), trainable(weights):
            loss = next_token_loss(every(ids), ids) if every else model(ids, return_type="loss")
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        optimiser.step()
        optimiser.zero_grad()

    step(None)  # the optimiser makes its moments
    moments = [tensor for state in optimiser.state.values() for tensor in state.values()]
    return Work(ids.numel(), lambda: None, step, [*weights, *moments])
