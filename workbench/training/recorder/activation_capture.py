"""Hooks for the length of one logging step: activations are reduced where they pass, on their device, without a sync."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.kernels.switches import COMPILED_CODE
from workbench.metrics import METRICS, Metric
from workbench.names import ACTIVATIONS
from workbench.training.recorder.capture_points import ATTENTION_INPUT, CapturePoint, is_observed
from workbench.training.recorder.quantities import UNITS, aliases_of

GRADIENT_NORM, GRADIENT_SINK, BY_POSITION = "activation_gradient_norm", "gradient_sink", "gradient_by_position"
GATHERED = 32  # positions among which a gradient sink is sought, as in `measure`


class ActivationCapture:
    """Means over the sequences of all forward passes between `start` and `stop`, sums of squared gradients, and of gradients.

    `gradients`: aliases of the activations whose gradients are summed, for these `quantities`. `model`: what the points are of.
    """

    def __init__(
        self,
        model: Any,
        points: Sequence[CapturePoint],
        metrics: Sequence[Metric],
        gradients: Sequence[str],
        quantities: Sequence[str] = (),
    ) -> None:
        self.observed: Any = model if is_observed(model) else None
        self.calls: Any = None  # of an observed module, which fire its hook points while this captures
        self.plan: list[tuple[CapturePoint, list[Metric], bool]] = []
        for point in points:
            its_metrics = [m for m in metrics if point.alias in aliases_of(m)]
            with_gradient = point.alias in gradients and not point.read_only
            if its_metrics or with_gradient:
                self.plan.append((point, its_metrics, with_gradient))
        self.names = {m.name for _, its_metrics, _ in self.plan for m in its_metrics}
        self.gathers = [
            q for q in (GRADIENT_SINK, BY_POSITION) if q in quantities
        ]  # of gradients summed over the batch
        self.names |= {q for point, _, pulled in self.plan if pulled for q in self._quantities(point)}
        self.seconds = 0.0  # spent in the hooks
        self.handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Drop what was captured."""
        self.sums: dict[tuple[int, str], tuple[Tensor, int]] = {}  # (place in the plan, metric) -> sum, sequences
        self.squares: dict[int, Tensor] = {}
        self.gathered: dict[int, Tensor] = {}  # place in the plan -> gradients summed over sequences [pos, width]
        self.forward: set[int] = set()  # places in the plan that a forward pass outside `backward` has passed
        self.lengths: set[int] = set()
        self.short: dict[str, str] = {}  # metric -> why it could not be taken

    def start(self) -> None:
        """Capture from now on."""
        self.reset()
        if not self.plan:
            return
        if "torch._dynamo" in sys.modules:  # compiled code calls no hooks
            COMPILED_CODE.begin(self)
        if self.observed is not None:
            self.calls = self.observed.listen_to_calls()
        for index, (point, _, _) in enumerate(self.plan):
            hook = partial(self._capture, index)
            hook.only_reads = True  # type: ignore[attr-defined]  # see `hook_points.reading`
            register = point.module.register_forward_pre_hook if point.before else point.module.register_forward_hook
            self.handles.append(register(hook, with_kwargs=True))

    def stop(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.calls is not None:
            self.calls.close()
        COMPILED_CODE.end(self)

    def _capture(self, index: int, module: Any, args: Any, kwargs: Any, output: Any = None) -> Tensor | None:
        if not torch.is_grad_enabled():  # a validation in between
            return None
        if torch._C._current_graph_task_id() == -1:
            self.forward.add(index)
        elif index in self.forward:  # a checkpoint computes again what has been captured
            return None
        began = time.perf_counter()
        point, metrics, with_gradient = self.plan[index]
        tensor = point.find((args, kwargs) if point.before else output)
        branch = None
        if tensor is not None:
            self._reduce(index, point, metrics, point.part(tensor.detach()))
            if with_gradient and tensor.requires_grad:
                branch = tensor.view_as(tensor) if point.is_branch else None
                (tensor if branch is None else branch).register_hook(partial(self._add_gradient, index))
        self.seconds += time.perf_counter() - began
        return branch

    @torch.no_grad()
    def _reduce(self, index: int, point: CapturePoint, metrics: Sequence[Metric], tensor: Tensor) -> None:
        known = ACTIVATIONS.get(point.alias)
        length = tensor.shape[known.axes.split().index("pos") if known else 1]
        self.lengths.add(length)
        for metric in metrics:
            if length < metric.min_length:
                self.short[metric.name] = f"needs sequences of {metric.min_length} tokens; these have {length}"
                continue
            value = metric.function(tensor)
            if "pos" in metric.axes:
                value = value.mean(1 + metric.axes.index("pos"))
            total, n = self.sums.get((index, metric.name), (0, 0))
            self.sums[index, metric.name] = total + value.sum(0), n + len(value)

    @torch.no_grad()
    def _add_gradient(self, index: int, gradient: Tensor) -> None:
        began, point = time.perf_counter(), self.plan[index][0]
        if point.alias == ATTENTION_INPUT:
            total = gradient[:, :GATHERED].sum(0, dtype=torch.float32)
            known = self.gathered.get(index, total[:0])
            self.gathered[index] = nn.functional.pad(known, (0, 0, 0, len(total) - len(known))) + total
        else:
            square = torch.linalg.vector_norm(point.part(gradient), dtype=torch.float32).square()
            self.squares[index] = self.squares[index] + square if index in self.squares else square
        self.seconds += time.perf_counter() - began

    def missing(self) -> dict[str, str]:
        """Why each quantity that was to be captured was not."""
        seen = (*self.squares, *self.gathered)
        captured = {name for _, name in self.sums} | {q for i in seen for q in self._quantities(self.plan[i][0])}
        no_call = "no hook was called: is the step compiled as a whole, or exported?"
        why = "nothing passed as [batch, pos, width]" if self.lengths else no_call
        return {name: self.short.get(name, why) for name in sorted(self.names - captured)}

    def results(self, scale: Tensor | None) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """(axes, value or one value per head) of everything captured; `scale`: by which the loss was multiplied."""
        shared = {"data": "train", "T": next(iter(self.lengths)) if len(self.lengths) == 1 else None}
        for (index, name), (total, n) in self.sums.items():
            metric, axes = METRICS[name], dict(self.plan[index][0].axes)
            site = {} if metric.sites else {"site": None}
            yield {"metric": name, "n": n, "unit": metric.unit} | axes | site | shared, total / n
        for index, square in self.squares.items():
            norm = square.sqrt() if scale is None else square.sqrt() / scale.to(square.device)
            named = {"metric": GRADIENT_NORM, "unit": UNITS[GRADIENT_NORM]}
            yield named | dict(self.plan[index][0].axes) | shared, norm
        for index, total in self.gathered.items():
            norms = total.norm(dim=-1) if scale is None else total.norm(dim=-1) / scale.to(total.device)
            found = {GRADIENT_SINK: norms[0] / norms[1:].mean(), BY_POSITION: norms}
            for name in self.gathers:
                named = {"metric": name, "unit": UNITS[name], "along": "position"}
                yield named | dict(self.plan[index][0].axes) | shared, found[name]

    def _quantities(self, point: CapturePoint) -> list[str]:
        """What is recorded of a point's gradient."""
        return self.gathers if point.alias == ATTENTION_INPUT else [GRADIENT_NORM]
