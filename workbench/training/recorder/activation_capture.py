"""Hooks of one logging step: they reduce activations on their device, without a synchronisation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.kernels.switches import COMPILED_CODE
from workbench.metrics import METRICS, Metric
from workbench.names import ACTIVATIONS
from workbench.observing.interception.segments import SeenMasks, Segments, weighted_mean
from workbench.observing.interception.tensor_layouts import ids_among
from workbench.training.recorder.capture_points import ATTENTION_INPUT, CapturePoint, is_observed
from workbench.training.recorder.quantities import UNITS, Stopped, aliases_of, first_line

PADDING_SHARE = "padding_share"
GRADIENT_NORM, GRADIENT_SINK, BY_POSITION = "activation_gradient_norm", "gradient_sink", "gradient_by_position"
OUTSIDE = ("stream", "own_v", ATTENTION_INPUT)  # activations outside of attention calls
GATHERED = 32  # positions among which a gradient sink is measured, as in `measure`


class _Hook:
    """A hook for one entry of the plan, which edits no tensor. Copies and pickles of the module get an empty hook."""

    only_reads = True  # see `hook_points.reading`

    def __init__(self, function: Callable[..., Any], index: int) -> None:
        self.function, self.index = function, index

    def __call__(self, *inputs: Any) -> Any:
        return self.function(self.index, *inputs)

    def __reduce__(self) -> Any:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # accepts all arguments, returns None, and can be loaded without workbench


class ActivationCapture:
    """Means of metrics over all sequences between `start` and `stop`, and sums of gradients and of their squares.

    The hooks never raise in the loop's forward and backward passes: a quantity that fails is `stopped`.

    Args:
        model: The module that the capture points belong to.
        stopped: Quantities that are no longer recorded, shared with the recorder.
        quantities: All recorded quantities.
    """

    def __init__(self, model: Any, stopped: Stopped, quantities: Sequence[str] = ()) -> None:
        self.observed: Any = model if is_observed(model) else None
        self.root: Any = model.foreign if is_observed(model) else model
        self.segments: Segments | None = None  # of a forward pass with padding or packed rows
        self.stopped = stopped
        self.calls: Any = None  # of an observed module, which fire its hook points while this captures
        self.gathers = [
            q for q in (GRADIENT_SINK, BY_POSITION) if q in quantities
        ]  # of gradients summed over the batch
        self.seconds = 0.0  # spent in the hooks
        self.handles: list[Any] = []
        self.aim((), (), ())

    def aim(self, points: Sequence[CapturePoint], metrics: Sequence[Metric], gradients: Sequence[str]) -> None:
        """Set the capture points, their metrics, and the aliases of activations with summed gradients."""
        self.plan: list[tuple[CapturePoint, list[Metric], bool]] = []
        for point in points:
            its_metrics = [m for m in metrics if point.alias in aliases_of(m)]
            with_gradient = point.alias in gradients and not point.read_only
            if its_metrics or with_gradient:
                self.plan.append((point, its_metrics, with_gradient))
        self.names = {m.name for _, its_metrics, _ in self.plan for m in its_metrics}
        self.names |= {q for point, _, pulled in self.plan if pulled for q in self._quantities(point)}
        self.reset()

    def reset(self) -> None:
        """Drop all captured numbers."""
        self.sums: dict[tuple[int, str], tuple[Tensor, int]] = {}  # (place in the plan, metric) -> sum, sequences
        self.squares: dict[int, Tensor] = {}
        self.gathered: dict[int, Tensor] = {}  # place in the plan -> gradients summed over sequences [pos, width]
        self.forward: set[int] = set()  # places in the plan reached by a forward pass outside `backward`
        self.lengths: set[int] = set()
        self.short: dict[str, str] = {}  # metric -> why it could not be taken
        self.padded = self.positions = 0  # of all forward passes

    def start(self) -> None:
        """Install all hooks."""
        self.reset()
        if not self.plan:
            return
        if "torch._dynamo" in sys.modules:  # compiled code calls no hooks
            COMPILED_CODE.begin(self)
        self.handles.append(self.root.register_forward_pre_hook(_Hook(self._read_masks, 0), with_kwargs=True))
        if self.observed is not None:
            self.calls = self.observed.listen_to_calls(self._attention_failed)
        for index, (point, _, _) in enumerate(self.plan):
            hook = _Hook(self._capture, index)
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

    def _read_masks(self, _: int, module: Any, args: Any, kwargs: Any) -> None:
        """Read from the mask arguments of a forward pass which positions are padding."""
        self.segments = None
        ids = ids_among(args, kwargs)
        if ids is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        masks = SeenMasks(ids)
        masks.given(module, args, kwargs)
        masks.arguments = [(name, mask) for name, mask in masks.arguments if "mask" in name]
        self.positions += ids.numel()
        if not masks.arguments:  # nothing to wait for
            return
        segments = self.stopped.attempt(self.names - {GRADIENT_NORM}, masks.segments)
        if segments is not None and not bool((segments.ids == 1).all()):
            self.segments = segments
            self.padded += int((segments.ids == 0).sum())

    def _attention_failed(self, error: Exception) -> None:
        """Stop quantities inside attention, which a module may not show, for example under dropout."""
        inside = {m.name for point, metrics, _ in self.plan if point.alias not in OUTSIDE for m in metrics}
        self.stopped.reasons |= {name: first_line(error) for name in inside - self.stopped.reasons.keys()}

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
            for metric in metrics:
                self.stopped.attempt([metric.name], self._reduce, index, point, metric, tensor.detach())
            if with_gradient and tensor.requires_grad:
                branch = self.stopped.attempt(self._quantities(point), self._follow, index, point, tensor)
        self.seconds += time.perf_counter() - began
        return branch

    @torch.no_grad()
    def _reduce(self, index: int, point: CapturePoint, metric: Metric, output: Tensor) -> None:
        known, tensor = ACTIVATIONS.get(point.alias), point.part(output)
        length = tensor.shape[known.axes.split().index("pos") if known else 1]
        self.lengths.add(length)
        if length < metric.min_length:
            self.short[metric.name] = f"needs sequences of {metric.min_length} tokens; these have {length}"
            return
        value = _averaged(metric, tensor) if self.segments is None else self._by_document(metric, point.alias, tensor)
        total, n = self.sums.get((index, metric.name), (0, 0))
        self.sums[index, metric.name] = total + value.sum(0), n + len(value)

    def _by_document(self, metric: Metric, alias: str, tensor: Tensor) -> Tensor:
        """Return values [batch, ...] of rows without padding; packed documents are weighted by length."""
        assert self.segments is not None
        if alias in ACTIVATIONS and ACTIVATIONS[alias].axes.split().index("pos") != 1:
            raise WorkbenchError("batches hold padding or packed documents, which statistics of attention would count")
        if tensor.shape[:2] != self.segments.ids.shape:
            raise WorkbenchError(
                f"{alias} {list(tensor.shape)} of a padded batch {list(self.segments.ids.shape)} is laid out otherwise"
            )
        rows = []
        for row in range(len(tensor)):
            documents = [at for at in self.segments.documents_in(row) if len(at) >= metric.min_length]
            values = [_averaged(metric, tensor[row : row + 1, at]) for at in documents]
            if documents:
                rows.append(weighted_mean(values, [len(at) for at in documents]))
        if not rows:
            raise WorkbenchError(f"needs documents of {metric.min_length} tokens; these are shorter")
        return torch.cat(rows)

    def _follow(self, index: int, point: CapturePoint, tensor: Tensor) -> Tensor | None:
        """Sum an activation's gradient in the backward pass; returns the branch that replaces the activation, if any."""
        branch, names = tensor.view_as(tensor) if point.is_branch else None, self._quantities(point)

        def add(gradient: Tensor) -> None:
            self.stopped.attempt(names, self._add_gradient, index, point, gradient)

        (tensor if branch is None else branch).register_hook(add)
        return branch

    @torch.no_grad()
    def _add_gradient(self, index: int, point: CapturePoint, gradient: Tensor) -> None:
        began = time.perf_counter()
        if point.alias == ATTENTION_INPUT:
            if self.padded:
                raise WorkbenchError("batches hold padding, so positions of different rows are not the same")
            total = gradient[:, :GATHERED].sum(0, dtype=torch.float32)
            known = self.gathered.get(index, total[:0])
            self.gathered[index] = nn.functional.pad(known, (0, 0, 0, len(total) - len(known))) + total
        else:
            square = torch.linalg.vector_norm(point.part(gradient), dtype=torch.float32).square()
            self.squares[index] = self.squares[index] + square if index in self.squares else square
        self.seconds += time.perf_counter() - began

    def missing(self) -> dict[str, str]:
        """Return why each quantity that should have been captured is missing."""
        seen = (*self.squares, *self.gathered)
        captured = {name for _, name in self.sums} | {q for i in seen for q in self._quantities(self.plan[i][0])}
        no_call = "no hook was called: is the step compiled as a whole, or exported?"
        why = "nothing passed as [batch, pos, width]" if self.lengths else no_call
        return {name: self.short.get(name, why) for name in sorted(self.names - captured - self.stopped.reasons.keys())}

    def results(self, scale: Tensor | None) -> Iterator[tuple[dict[str, Any], Tensor | float]]:
        """Yield (axes, value or one value per head) of all captured quantities; `scale` is the loss scale."""
        shared = {"data": "train", "T": next(iter(self.lengths)) if len(self.lengths) == 1 else None}
        if self.padded:
            yield {"metric": PADDING_SHARE, "unit": UNITS[PADDING_SHARE], "data": "train"}, self.padded / self.positions
        for (index, name), (total, n) in self.sums.items():
            if name in self.stopped.reasons:  # some of its sums are incomplete
                continue
            metric, axes = METRICS[name], dict(self.plan[index][0].axes)
            site = {} if metric.sites else {"site": None}
            yield {"metric": name, "n": n, "unit": metric.unit} | axes | site | shared, total / n
        for index, square in self.squares.items() if GRADIENT_NORM not in self.stopped.reasons else ():
            norm = square.sqrt() if scale is None else square.sqrt() / scale.to(square.device)
            named = {"metric": GRADIENT_NORM, "unit": UNITS[GRADIENT_NORM]}
            yield named | dict(self.plan[index][0].axes) | shared, norm
        for index, total in self.gathered.items():
            norms = total.norm(dim=-1) if scale is None else total.norm(dim=-1) / scale.to(total.device)
            values = {GRADIENT_SINK: norms[0] / norms[1:].mean(), BY_POSITION: norms}
            for name in self.gathers:
                if name not in self.stopped.reasons:
                    named = {"metric": name, "unit": UNITS[name], "along": "position"}
                    yield named | dict(self.plan[index][0].axes) | shared, values[name]

    def _quantities(self, point: CapturePoint) -> list[str]:
        """Return the quantities of a point's gradient."""
        return self.gathers if point.alias == ATTENTION_INPUT else [GRADIENT_NORM]


def _averaged(metric: Metric, tensor: Tensor) -> Tensor:
    """Return values [batch, ...] of a metric, averaged over its position axis if it has one."""
    value: Tensor = metric.function(tensor)
    return value.mean(1 + metric.axes.index("pos")) if "pos" in metric.axes else value
