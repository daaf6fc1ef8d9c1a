"""Capture of activations in one logging step, reduced inside hooks on their device without a synchronisation.

Our models and modules under `workbench.observe` have named hook points. In other modules, a list of similar blocks gives
the streams: each block's input, and the output of the last block. A value projection inside a block gives its own values,
which may differ from the values that its attention uses.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.hook_names import ACTIVATIONS, NamedHookPoints, before_branching, stream_hook
from workbench.kernels.pytorch_switches import COMPILED_CODE
from workbench.metrics import METRICS, Metric
from workbench.metrics.weights import PARTS, part_of
from workbench.observing.interception.documents_and_labels import SeenMasks, Segments, weighted_mean
from workbench.observing.interception.tensor_paths import ids_among
from workbench.training.recorder.quantities import UNITS, Stopped, aliases_of, first_line

VALUE_PROJECTIONS = ("v_proj", "value", "value_proj", "v_lin", "to_v", "wv", "w_v", "W_V")
"""Names of a linear map whose output is a block's values."""
FOREIGN_PARTS = {
    "attn.c_attn": "W_QKV", "attn.c_proj": "W_O", "mlp.c_fc": "W_up", "mlp.c_proj": "W_down",
    "wte": "W_E", "embed_tokens": "W_E", "wpe": "W_pos", "lm_head": "W_U",
}  # fmt: skip
"""Matrices of GPT-2's and Llama's layouts that our own models name otherwise."""


LISTS = (nn.ModuleList, nn.Sequential)
ATTENTION_INPUT = "attention input"
"""Alias of the attention's normalised input, which has no hook point and is read at the module that uses it."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class CapturePoint:
    """A place to read one activation: `part` of the tensor that `find` returns for a module's inputs (`before`) or output."""

    alias: str
    axes: Mapping[str, Any]  # site and layer of records
    module: nn.Module
    find: Callable[[Any], Tensor | None]
    part: Callable[[Tensor], Tensor] = _whole
    before: bool = False
    is_branch: bool = False  # a hook point: its gradient is that of its output alone
    read_only: bool = False  # a copy without a gradient


def has_named_hooks(model: nn.Module) -> bool:
    """Return whether a module has our hook points: our model, or a foreign one under `workbench.observe`."""
    return isinstance(model, NamedHookPoints)


def is_observed(model: nn.Module) -> bool:
    """Return whether it is a foreign module under `workbench.observe`."""
    return isinstance(model, NamedHookPoints) and model.foreign is not None


def capture_points(model: Any, aliases: Iterable[str]) -> list[CapturePoint]:
    """Return every place at which the activations can be read; empty for activations that the module does not show."""
    named, observed = has_named_hooks(model), is_observed(model)
    wanted, points = dict.fromkeys(aliases), list[CapturePoint]()
    reads_inputs = wanted.pop(ATTENTION_INPUT, "absent") is None
    blocks: list[Any] = [*model.blocks] if named and not observed else blocks_of(model.foreign if observed else model)
    n_layers = model.config.n_layers if named else len(blocks)
    for alias in wanted:
        layers: list[Any] = [*range(n_layers), *([n_layers, "final"] if alias == "stream" else [])]
        for layer in layers if named else ():
            name = stream_hook(layer, n_layers) if alias == "stream" else ACTIVATIONS[alias].hook.format(layer=layer)
            if name in model.hook_dict:
                name = before_branching(model, layer, name)
                axes = {"site": "final", "layer": n_layers} if layer == "final" else {"site": alias, "layer": layer}
                copied, module = observed and model.is_read_only(name), model.hook_dict[name]
                points.append(CapturePoint(alias, axes, module, _activation, is_branch=not copied, read_only=copied))
        for layer, block in enumerate([] if named else blocks):
            at = {"site": alias, "layer": layer}
            if alias == "stream":
                points.append(CapturePoint(alias, at, block, _first_states, before=True))
            elif alias == "own_v" and (projection := _value_projection(block)) is not None:
                points.append(CapturePoint(alias, at, projection[0], _activation, projection[1]))
        if alias == "stream" and blocks and not named:
            points.append(CapturePoint(alias, {"site": alias, "layer": n_layers}, blocks[-1], _first_states))
    for layer, block in enumerate(blocks if reads_inputs else ()):
        projection = None if named and not observed else _value_projection(block)
        if (module := block.attn if named and not observed else projection and projection[0]) is not None:
            points.append(CapturePoint(ATTENTION_INPUT, {"layer": layer}, module, _first_states, before=True))
    return points


def _activation(output: Any) -> Tensor | None:
    return output if isinstance(output, Tensor) and output.ndim > 2 else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's blocks: the outermost list of similar modules that is nearest to the token embedding, else the longest.

    This excludes experts inside blocks and a separate vision tower. Modules are similar if they have one class, or if their
    children share a name (hybrids).
    """
    tables = {n: m.num_embeddings for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    table = max(tables, key=lambda name: tables[name], default="")

    def alike(parts: nn.ModuleList | nn.Sequential) -> bool:
        names = [{name for name, child in part.named_children() if not isinstance(child, LISTS)} for part in parts]
        one_class = len({type(part) for part in parts}) == 1 and all(any(part.children()) for part in parts)
        return one_class or (isinstance(parts, nn.ModuleList) and bool(names and set.intersection(*names)))

    lists = {n: m for n, m in model.named_modules() if isinstance(m, LISTS) and alike(m)}
    inside = {n: m for n, m in lists.items() if not _holds(n, table)}  # else it contains the decoder
    outermost = {n: m for n, m in inside.items() if not any(_holds(other, n) for other in inside)}

    def nearness(name: str) -> tuple[int, int]:
        one, other = name.split("."), table.split(".")
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        return 2 * shared - len(one) - len(other), len(outermost[name])

    return list(outermost[max(outermost, key=nearness)]) if outermost else []


def _holds(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.") or (outer == "" != inner)


def _value_projection(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    for name, module in block.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in VALUE_PROJECTIONS and hasattr(module, "weight"):
            return module, _whole
        if last == "c_attn" and getattr(module, "weight", None) is not None:
            rows, columns = sorted(module.weight.shape)
            if columns == 3 * rows:  # GPT-2's queries, keys and values in one
                return module, lambda tensor: tensor.chunk(3, -1)[2]
    return None


def _first_states(tensors: Any) -> Tensor | None:
    """Return the first tensor [batch, pos, width] among inputs (args, kwargs) or outputs."""
    if isinstance(tensors, Tensor):
        return tensors if tensors.ndim == 3 and tensors.is_floating_point() else None
    parts = tensors.values() if isinstance(tensors, Mapping) else tensors if isinstance(tensors, tuple | list) else ()
    return next((state for part in parts if (state := _first_states(part)) is not None), None)


Places = dict[str, tuple[str, int | None]]


def matrix_places(model: nn.Module, known: Places | None = None) -> Places:
    """Return a unique (part, layer) of each trained matrix by parameter name; parts of foreign modules start with `W_`.

    Matrices in `known` stay as they were, and new ones are added.
    """
    known = known or {}
    names = [name for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad and name not in known]
    ours = has_named_hooks(model) and not is_observed(model)
    places = {}
    for name in names:
        match = re.search(r"(?:^|\.)(\d+)\.(.+)$", _stripped(name))
        stem = match[2] if match else _stripped(name)
        last = stem.rsplit(".", 1)[-1]
        part = PARTS.get(last) or FOREIGN_PARTS.get(".".join(stem.split(".")[-2:])) or FOREIGN_PARTS.get(last)
        places[name] = part_of(name) if ours else (part or f"W_{stem}", int(match[1]) if match else None)
    counts = Counter([*places.values(), *known.values()])
    new = {name: at if counts[at] == 1 else (f"W_{_stripped(name)}", at[1]) for name, at in places.items()}
    return known | new


def _stripped(name: str) -> str:
    return name.replace("_orig_mod.", "").removesuffix(".weight")


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
        # a function that accepts all arguments, returns None, and can be loaded without workbench
        return getattr, (nullcontext(), "__exit__")


class ActivationCapture:
    """Means of metrics over all sequences between `start` and `stop`, and sums of gradients and of their squares.

    The hooks never raise in the loop's forward and backward passes: a quantity that fails is `stopped`, which the recorder shares.
    """

    def __init__(self, model: Any, stopped: Stopped, quantities: Sequence[str] = ()) -> None:
        self.observed: Any = model if is_observed(model) else None
        self.root: Any = model.foreign if is_observed(model) else model
        self.segments: Segments | None = None  # of a forward pass with padding or packed rows
        self.turned: Sequence[int] = ()  # (pos, batch) of a forward pass; empty where it equals (batch, pos)
        self.stopped = stopped
        self.calls: Any = None  # of an observed module, which fire its hook points while this captures
        self.gathers = [q for q in (GRADIENT_SINK, BY_POSITION) if q in quantities]  # of gradients summed over rows
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
        self.sums: dict[tuple[int, str], tuple[Tensor, int]] = {}  # (place in the plan, metric) -> sum, sequences
        self.squares: dict[int, Tensor] = {}
        self.gathered: dict[int, Tensor] = {}  # place in the plan -> gradients summed over sequences [pos, width]
        self.forward: set[int] = set()  # places in the plan reached by a forward pass outside `backward`
        self.lengths: set[int] = set()
        self.short: dict[str, str] = {}  # metric -> why it could not be taken
        self.padded = self.positions = 0  # of all forward passes

    def start(self) -> None:
        self.reset()
        if not self.plan:
            return
        if "torch._dynamo" in sys.modules:  # compiled code calls no hooks
            COMPILED_CODE.begin(self)
        self.handles.append(self.root.register_forward_pre_hook(_Hook(self._read_masks, 0), with_kwargs=True))
        if self.observed is not None:
            inside = {m.name for point, metrics, _ in self.plan if point.alias not in OUTSIDE for m in metrics}

            def failed(error: Exception) -> None:  # a module may not show its attention, for example under dropout
                self.stopped.reasons |= {name: first_line(error) for name in inside - self.stopped.reasons.keys()}

            self.calls = self.observed.listen_to_calls(failed)
        for index, (point, _, _) in enumerate(self.plan):
            hook = _Hook(self._capture, index)
            register = point.module.register_forward_pre_hook if point.before else point.module.register_forward_hook
            self.handles.append(register(hook, with_kwargs=True))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.calls is not None:
            self.calls.close()
        COMPILED_CODE.end(self)

    def _read_masks(self, _: int, module: Any, args: Any, kwargs: Any) -> None:
        """Read from the mask arguments of a forward pass which positions are padding."""
        self.segments, ids = None, ids_among(args, kwargs)
        self.turned = () if ids is None or ids.shape[0] == ids.shape[1] else ids.shape[::-1]
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
        self._refuse_turned(point, tensor)
        length = tensor.shape[known.axes.split().index("pos") if known else 1]
        self.lengths.add(length)
        if length < metric.min_length:
            self.short[metric.name] = f"needs sequences of {metric.min_length} tokens; these have {length}"
            return
        options = self._more_inputs(point, metric)
        value = (
            _averaged(metric, tensor, **options)
            if self.segments is None
            else self._by_document(metric, point.alias, tensor)
        )
        total, n = self.sums.get((index, metric.name), (0, 0))
        self.sums[index, metric.name] = total + value.sum(0), n + len(value)

    def _more_inputs(self, point: CapturePoint, metric: Metric) -> dict[str, Any]:
        """Return the second input of a metric; raises `WorkbenchError` if attention also goes to no token: no hook has that share."""
        layer, model = point.axes.get("layer"), self.observed or self.root
        # of these two only the shares count it, and no shares are recorded
        counts_null = "null" in metric.optional and metric.name not in ("row_entropy", "effective_keys")
        if counts_null and ACTIVATIONS["null"].hook.format(layer=layer) in model.hook_dict:
            raise WorkbenchError(
                "it counts attention to no token (sink logits), which is recorded apart: use workbench.measure"
            )
        return {"window": model.attention_window(layer)} if "window" in metric.optional else {}

    def _refuse_turned(self, point: CapturePoint, tensor: Tensor) -> None:
        if not point.is_branch and not point.read_only and self.turned and tensor.shape[:2] == self.turned:
            advice = "; give workbench.observe(model, ids) instead" if self.observed is None else ""
            raise WorkbenchError(f"{point.alias} {list(tensor.shape)} holds positions before the batch{advice}")

    def _by_document(self, metric: Metric, alias: str, tensor: Tensor) -> Tensor:
        """Return values [batch, ...] of rows without padding; packed documents are weighted by length."""
        assert self.segments is not None
        if alias in ACTIVATIONS and ACTIVATIONS[alias].axes.split().index("pos") != 1:
            raise WorkbenchError("batches hold padding or packed documents, which statistics of attention would count")
        if tensor.shape[:2] != self.segments.ids.shape:
            batch = list(self.segments.ids.shape)
            raise WorkbenchError(f"{alias} {list(tensor.shape)} of a padded batch {batch} is laid out otherwise")
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
            self._refuse_turned(point, gradient)
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
        return self.gathers if point.alias == ATTENTION_INPUT else [GRADIENT_NORM]


def _averaged(metric: Metric, tensor: Tensor, **options: Any) -> Tensor:
    """Return values [batch, ...] of a metric, averaged over its position axis if it has one."""
    value: Tensor = metric.function(tensor, **options)
    return value.mean(1 + metric.axes.index("pos")) if "pos" in metric.axes else value
