"""Hooks for the length of one logging step: activations are reduced where they pass, on their device, without a sync."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.metrics import METRICS, Metric
from workbench.names import ACTIVATIONS
from workbench.recording.quantities import UNITS, aliases_of
from workbench.recording.taps import Tap

PULL = "activation_gradient_norm"


class _Uncompiled:
    """Compiled code runs as it was written while anybody listens, for it calls no hooks; then as it did before."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self.stance: Any = None

    def begin(self, who: object) -> None:
        """From now on; several listeners may overlap."""
        self.wanted.add(id(who))
        if self.stance is None and "torch._dynamo" in sys.modules:
            self.stance = torch.compiler.set_stance("force_eager")

    def end(self, who: object) -> None:
        """No longer, where nobody else listens."""
        self.wanted.discard(id(who))
        if not self.wanted and self.stance is not None:
            self.stance.__exit__(None, None, None)
            self.stance = None


UNCOMPILED = _Uncompiled()


class Listener:
    """Means over the sequences of all forward passes between `start` and `stop`, and sums of squared gradients."""

    def __init__(
        self, taps: Sequence[Tap], metrics: Sequence[Metric], gradients: Sequence[str], observed: Any = None
    ) -> None:
        self.observed, self.runs = observed, list[ExitStack]()
        self.plan: list[tuple[Tap, list[Metric], bool]] = []
        for tap in taps:
            found, wanted = [m for m in metrics if tap.alias in aliases_of(m)], tap.alias in gradients and not tap.inert
            if found or wanted:
                self.plan.append((tap, found, wanted))
        self.names = {m.name for _, found, _ in self.plan for m in found}
        self.names |= {PULL for _, _, wanted in self.plan if wanted}
        self.seconds = 0.0  # spent in the hooks
        self.handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was heard."""
        self.sums: dict[tuple[int, str], tuple[Tensor, int]] = {}  # (place in the plan, metric) -> sum, sequences
        self.squares: dict[int, Tensor] = {}
        self.lengths: set[int] = set()
        self.short: dict[str, str] = {}  # metric -> why it could not be taken

    def start(self) -> None:
        """Listen from now on."""
        self.reset()
        if not self.plan:
            return
        UNCOMPILED.begin(self)
        if self.observed is not None:
            foreign = self.observed.foreign
            self.handles.append(foreign.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(foreign.register_forward_hook(self._leave, always_call=True))
        for index, (tap, _, _) in enumerate(self.plan):
            hook = partial(self._heard, index)
            register = tap.module.register_forward_pre_hook if tap.before else tap.module.register_forward_hook
            self.handles.append(register(hook, with_kwargs=True))

    def stop(self) -> None:
        """Listen no longer."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        UNCOMPILED.end(self)

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        """An observed module is about to run: its hook points hear that run, unless `Observed` itself started it."""
        from workbench.observing.listening import Listening

        self.runs.append(ExitStack())
        given = [
            t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()
        ]
        if given and torch.is_grad_enabled() and not self.observed.lock._is_owned():
            self.runs[-1].enter_context(Listening(self.observed, given[0]).open())

    def _leave(self, *_: Any) -> None:
        if self.runs:
            self.runs.pop().close()

    def _heard(self, index: int, module: Any, args: Any, kwargs: Any, output: Any = None) -> Tensor | None:
        if not torch.is_grad_enabled():  # a validation in between
            return None
        began = time.perf_counter()
        tap, metrics, wanted = self.plan[index]
        found = tap.take((args, kwargs) if tap.before else output)
        branch = None
        if found is not None:
            self._reduce(index, tap, metrics, tap.part(found.detach()))
            if wanted and found.requires_grad:
                branch = found.view_as(found) if tap.branch else None
                (found if branch is None else branch).register_hook(partial(self._pulled, index))
        self.seconds += time.perf_counter() - began
        return branch

    @torch.no_grad()
    def _reduce(self, index: int, tap: Tap, metrics: Sequence[Metric], found: Tensor) -> None:
        length = found.shape[ACTIVATIONS[tap.alias].axes.split().index("pos")]
        self.lengths.add(length)
        for metric in metrics:
            if length < metric.min_length:
                self.short[metric.name] = f"needs sequences of {metric.min_length} tokens; these have {length}"
                continue
            value = metric.function(found)
            if "pos" in metric.axes:
                value = value.mean(1 + metric.axes.index("pos"))
            total, n = self.sums.get((index, metric.name), (0, 0))
            self.sums[index, metric.name] = total + value.sum(0), n + len(value)

    @torch.no_grad()
    def _pulled(self, index: int, gradient: Tensor) -> None:
        began = time.perf_counter()
        square = torch.linalg.vector_norm(self.plan[index][0].part(gradient), dtype=torch.float32).square()
        self.squares[index] = self.squares[index] + square if index in self.squares else square
        self.seconds += time.perf_counter() - began

    def missing(self) -> dict[str, str]:
        """Why each quantity that was listened for was not heard."""
        heard = {name for _, name in self.sums} | ({PULL} if self.squares else set())
        silent = "no hook was called: is the step compiled as a whole, or exported?"
        why = "nothing passed as [batch, pos, width]" if self.lengths else silent
        return {name: self.short.get(name, why) for name in sorted(self.names - heard)}

    def readings(self, scale: Tensor | None) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """(axes, value or one value per head) of everything heard; `scale`: by which the loss was multiplied."""
        shared = {"data": "train", "T": next(iter(self.lengths)) if len(self.lengths) == 1 else None}
        for (index, name), (total, n) in self.sums.items():
            metric, axes = METRICS[name], dict(self.plan[index][0].axes)
            site = {} if metric.sites else {"site": None}
            yield {"metric": name, "n": n, "unit": metric.unit} | axes | site | shared, total / n
        for index, square in self.squares.items():
            norm = square.sqrt() if scale is None else square.sqrt() / scale.to(square.device)
            yield {"metric": PULL, "unit": UNITS[PULL]} | dict(self.plan[index][0].axes) | shared, norm
