"""One run of an observed decoder with hooks: its position in the module, its hook points, and values that later layers read."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.hook_names import NULL, STATISTICS, is_statistic
from workbench.models.hook_points import HookPoint, frozen_copy, has_hooks, may_write, refuse_graph
from workbench.observing.interception.call_sites import CallSite, Line, lines_within, running_frames
from workbench.observing.interception.documents_and_labels import SeenMasks, Segments
from workbench.observing.interception.function_mode import Failed, InterceptionMode
from workbench.observing.interception.position_axes import Positions
from workbench.observing.interception.sdpa_and_flex_attention import APPLIED, COMPLETE
from workbench.observing.listening.gradient_checkpoints import follow_checkpoints
from workbench.observing.listening.hook_points import OWN, DecoderPoints
from workbench.observing.recognition.decoder_structure import DecoderStructure, Part, Projection, TensorLocation
from workbench.observing.recognition.least_squares import fit, weights_by_token
from workbench.observing.recognition.module_runs import LOOKUP
from workbench.observing.recognition.value_paths import TABLE

_INTERCEPTED = ("v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "v_mix", "v_weights", *STATISTICS, NULL)
_BY_KEY_VALUE_HEAD = ("v", OWN, "k", "rot_k", "own values", "effective values")
_MAX_FITTED = 4096  # positions in a fit, enough for coefficients to 1e-7


@dataclass(eq=False)
class HookedAttention:
    """One attention in one run: its hook points with hooks, and tensors that one of its calls leaves for the next."""

    layer: int
    number: int  # index among the layer's attentions
    of: int  # number of the layer's attentions
    part: Part
    points: dict[str, HookPoint]
    together: dict[str, HookPoint]  # hook points of all the layer's attentions, if there are several
    repeats: int = 1  # number of copies of each key-value head in `together`
    lse: Tensor | None = None  # of eager scores, if statistics are hooked
    null: Tensor | None = None  # share of each row in columns that are no tokens
    dots: Tensor | None = None  # queries times keys under a softmax by hand

    def hooks_any(self, *names: str) -> bool:
        """Return whether one of these hook points has hooks."""
        return not (self.points.keys().isdisjoint(names) and self.together.keys().isdisjoint(names))


class HookedProjection(NamedTuple):
    """A projection with a hooked output: its attention, its hook point (q, k or own_v), its location."""

    attention: HookedAttention
    name: str
    projection: Projection


class CountedCalls(NamedTuple):
    """A running module in which a layer attends: the layer (-1: none), the Python frame, calls by kind and lines.

    `outer`: lines between the frame and the module's own, if a checkpoint runs a part of the module again.
    """

    layer: int
    frame: int
    outer: tuple[Line, ...]
    counts: Counter[tuple[str, tuple[Line, ...]]]


def _other_calls(layer: int, site: CallSite, how: str) -> str:
    return (
        f"the attention of layer {layer} makes {how} than the {site.words} that it made on the example tokens, so that which is which is "
        "not known: observe the module on tokens of this length"
    )


Fire = Callable[["RunState", Tensor], Tensor]
"""Fires hook points of a run on a tensor and returns its replacement."""


class RunState:
    """Position, hook points and stored tensors of one run."""

    mode: InterceptionMode

    def __init__(
        self, module: nn.Module, structure: DecoderStructure, points: DecoderPoints, tokens: Tensor, *, fused: bool,
        masks: SeenMasks | None = None, segments: Segments | None = None, failed: Failed | None = None,
        attended: dict[tuple[int, str], Tensor] | None = None, mask_kinds: dict[int, str] | None = None,
    ) -> None:  # fmt: skip
        refuse_graph()
        self.kinds_by_layer = {} if mask_kinds is None else mask_kinds  # takes the kind of every layer's mask
        self.kinds_by_layer.clear()
        self.attended = attended  # takes the queries and keys that scores are made of, by layer and q or k
        self.failed = failed  # handles errors in a run that must continue
        self.fired: set[str] = set()  # hook points that were reached
        self.masks, self.segments = masks, segments  # masks to record; documents of the attention statistics
        self.module, self.structure, self.points, self.has_fused_layers = module, structure, points, fused
        self.layers = structure.layers
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, structure.layout)
        self.may_checkpoint = torch.is_grad_enabled()
        self.frozen: dict[nn.Module, HookPoint] = {}  # points with their hooks at the time of a checkpoint
        self.running: list[int] = []  # layers, innermost last
        self.runs: Counter[str] = Counter()  # runs of each module
        self.within: list[Counter[str]] = []  # runs of each module in each running layer
        self.scopes: list[CountedCalls] = []
        self.callers: dict[str, tuple[int, tuple[Line, ...]]] = {}  # of inline blocks: frame, outer lines
        self.own_values: dict[int, Tensor] = {}  # [batch, pos, kv_head, d_head], if later layers read them
        self.layer_at = {(layer.block, layer.run): i for i, layer in enumerate(self.layers)}
        self.layer_points = [block.attn.hooked() for block in points.blocks]
        self._gathered: dict[tuple[int, str], dict[int, Tensor]] = {}
        self.mixtures: dict[int, dict[int, HookPoint]] = {}  # layers whose mixed values or their weights are hooked
        for i, block in enumerate(points.blocks):
            if {"v_mix", "v_weights"} & self.layer_points[i].keys() or any(
                has_hooks(point) for point in (*block.source_points.values(), block.table_point) if point is not None
            ):
                self.mixtures[i] = block.source_points
        self.own_values_read = {j for i, sources in self.mixtures.items() for j in (*sources, i)}
        self.tables: dict[str, Tensor] = {}  # [batch, pos, width]
        names = {points.blocks[i].mixture.table for i in self.mixtures} - {""}
        self.tables_read = {name: structure.tables[name] for name in names}
        embed = structure.embed
        is_bare = embed is not None and embed.module == LOOKUP and points.embed is not None and has_hooks(points.embed)
        self.embed = embed if is_bare else None
        parameters = {read.parameter for read in (*self.tables_read.values(), self.embed) if read is not None}
        self.looked_up_in = {id(module.get_parameter(name)): name for name in parameters}
        self.lookups: Counter[str] = Counter()  # lookups in these parameters
        self._listen()

    def _listen(self) -> None:
        """Find the calls and projections of all hooked attentions, by layer and call site."""
        self.calls: dict[tuple[int, CallSite], list[tuple[HookedAttention, str]]] = {}
        self.matrix_inputs: dict[tuple[int, CallSite], list[Fire]] = {}
        self.matrix_outputs: dict[tuple[int, CallSite], list[Fire]] = {}
        self.module_projections: list[HookedProjection] = []
        self.latents: list[tuple[HookedAttention, TensorLocation]] = []
        self.intercepted: set[int] = set()

        def listen_to_product(i: int, location: Any, fires: dict[tuple[int, CallSite], list[Fire]], fire: Fire) -> None:
            shaped = partial(RunState._fire_shaped, fire=fire, location=location)
            fires.setdefault((i, location.site), []).append(shaped)
            self.intercepted.add(i)

        for i, (layer, block) in enumerate(zip(self.layers, self.points.blocks, strict=True)):
            n, points = len(layer.parts), dict(self.layer_points[i])
            if layer.z is not None:  # fires on W_O's input
                points.pop("z", None)
            each = [part.hooked() for part in block.parts(n)] if n > 1 else [points][:n]
            for number, (part, own) in enumerate(zip(layer.parts, each, strict=True)):
                whole, one = layer.attention, part.attention
                repeats = whole.kv_heads * one.heads // (whole.heads * one.kv_heads)
                attention = HookedAttention(i, number, n, part, own, points if n > 1 else {}, repeats)
                for name, projection in (("q", attention.part.q), ("k", attention.part.k), (OWN, attention.part.v)):
                    read = attention.hooks_any(name) or (name == OWN and i in self.own_values_read)
                    if projection is None or not read:
                        continue
                    hooked = HookedProjection(attention, name, projection)
                    if projection.site is None:
                        self.module_projections.append(hooked)
                    else:
                        fire = partial(RunState.fire_projection, hooked=hooked)
                        listen_to_product(i, projection, self.matrix_outputs, fire)
                if attention.part.latent is not None and attention.hooks_any("latent"):
                    self.latents.append((attention, attention.part.latent))
                if attention.hooks_any(*_INTERCEPTED) or i in self.own_values_read or self.masks is not None:
                    self.intercepted.add(i)
                    for site, role in attention.part.calls.items():
                        self.calls.setdefault((i, site), []).append((attention, role))
            if layer.z is not None and layer.z.site is not None and "z" in self.layer_points[i]:
                listen_to_product(i, layer.z, self.matrix_inputs, partial(RunState.fire_z, i=i))
            for name in ("attn_out", "mlp_out"):
                location, point = getattr(layer, name), getattr(block, f"hook_{name}", None)
                if location is not None and location.site is not None and point is not None and has_hooks(point):
                    fire = partial(RunState.fire_addition, point=point, factor=location.factor)
                    listen_to_product(i, location, self.matrix_outputs, fire)
        self.reads_matrices = bool(self.matrix_inputs or self.matrix_outputs)
        self.reads_tables = bool(self.looked_up_in)
        self.sites: dict[int, dict[tuple[str, tuple[Line, ...]], CallSite]] = {}  # of each layer
        for i, site in (*self.calls, *self.matrix_inputs, *self.matrix_outputs):
            self.sites.setdefault(i, {})[site.kind, site.lines] = site
        # whether calls outside the attentions are needed too; eager calls ignore block lists
        self.everywhere = bool(self.looked_up_in) or any(self.layers[i].scope is None for i in self.intercepted)
        self.everywhere |= self.structure.block_lists in (COMPLETE, APPLIED)

    def _fire_shaped(self, tensor: Tensor, *, fire: Fire, location: TensorLocation) -> Tensor:
        """Fire on the input or output of a function call with a parameter, as [batch, pos, ...]."""
        shown = self.positions.shaped(tensor, location.axes)
        if shown is None:  # a projection refuses other positions
            return fire(self, tensor) if isinstance(location, Projection) else tensor
        fired = fire(self, shown)
        return tensor if fired is shown else self.positions.unshaped(fired, tensor, location.axes)

    def copy(self) -> Self:
        """Return the same run with its own state, to continue from here more than once."""
        run = copy.copy(self)
        run.runs, run.running = self.runs.copy(), list(self.running)
        run.within = [counts.copy() for counts in self.within]
        run.scopes = [scope._replace(counts=scope.counts.copy()) for scope in self.scopes]
        run.callers, run.lookups = dict(self.callers), self.lookups.copy()
        run.own_values, run.tables = dict(self.own_values), dict(self.tables)
        run._gathered = {key: dict(parts) for key, parts in self._gathered.items()}
        return run

    def call_site(self, kind: str) -> tuple[int, CallSite] | None:
        """Return the layer and site of the current call, or None if no hook needs it."""
        if self.may_checkpoint:
            follow_checkpoints(self)
        if not self.scopes or self.scopes[-1].layer < 0:
            return None
        layer, frame, outer, counts = self.scopes[-1]
        lines, sites = (*lines_within(running_frames(frame)), *outer), self.sites.get(layer, {})
        if (known := sites.get((kind, lines))) is None:  # `forward` may have been wrapped since, as in a checkpoint
            within = [site for site in sites.values() if site.kind == kind and site.lines == lines[: len(site.lines)]]
            known = within[0] if len(within) == 1 else None
        if known is None:
            return None
        if (number := counts[kind, known.lines]) == known.total:
            raise WorkbenchError(_other_calls(layer, known, "more"))
        counts[kind, known.lines] += 1
        return layer, known._replace(number=number)

    def check_calls(self, scope: CountedCalls) -> None:
        """Raise `WorkbenchError` if a layer made fewer calls than on the example tokens."""
        for place, site in self.sites.get(scope.layer, {}).items():
            if scope.counts[place] < site.total:
                raise WorkbenchError(_other_calls(scope.layer, site, "fewer"))

    def listeners(self, kind: str) -> list[tuple[HookedAttention, str]]:
        """Return the hooked attentions of the current call, with its role in each."""
        return [] if (place := self.call_site(kind)) is None else self.calls.get(place, [])

    def is_hooked(self, point: Any) -> bool:
        """Return whether a hook point has hooks in this run."""
        return point in self.frozen if self.frozen else point is not None and has_hooks(point)

    def may_write(self) -> bool:
        """Return whether some hook of this run may edit its tensor."""
        return any(may_write(point) for point in self._hooked_points())

    def freeze_hooks(self) -> None:
        """Store the current hooks for a recomputation, which may run after their removal."""
        if not self.frozen:
            self.frozen = {point: frozen_copy(point) for point in self._hooked_points()}

    def _hooked_points(self) -> list[HookPoint]:
        ends = [point for point in (self.points.embed, self.points.head) if point is not None]
        inside = (part for block in self.points.blocks for part in block.modules() if isinstance(part, HookPoint))
        return [point for point in (*ends, *inside) if self.is_hooked(point)]

    def fire(self, point: Any, tensor: Tensor, *, beside: bool = False) -> Tensor:
        """Return the output of a hook point: the same tensor unless a hook changes it.

        Hooks that may write get a copy, so that an edit in place reaches no other reader of the tensor. The module continues with
        an unchanged copy only if a hook stores it with its graph, so that the copy gets a gradient.
        `beside`: the tensor is computed for the hooks alone.
        """
        if not self.is_hooked(point):
            return tensor
        point = self.frozen.get(point, point)
        writes = may_write(point)
        handed = tensor
        if writes or self.structure.in_place:
            handed = tensor.clone()
            if handed.stride() != tensor.stride() and 0 not in tensor.stride():  # so that every reader rounds alike
                handed = tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        references = sys.getrefcount(handed)
        out = self._call_hooks(point, handed)
        if out is not handed:
            return out.to(tensor.dtype)
        if writes and not _equal(handed, tensor):
            return handed
        stored = handed._backward_hooks or sys.getrefcount(handed) > references + 1  # `out` is one more
        graph = writes and handed.requires_grad and not (beside or self.structure.in_place)
        return handed if graph and stored else tensor

    def fire_at(self, attention: HookedAttention, name: str, tensor: Tensor, *, beside: bool = False) -> Tensor:
        """Return the output of an attention's hook point; the layer's common hook point fires with its last attention."""
        out = self.fire(attention.points.get(name), tensor, beside=beside)
        self._show_together(attention, name, out)
        return out

    def show_at(self, attention: HookedAttention, name: str, tensor: Tensor) -> None:
        """Fire a read-only hook point of an attention."""
        self.show(attention.points.get(name), tensor)
        self._show_together(attention, name, tensor)

    def _show_together(self, attention: HookedAttention, name: str, tensor: Tensor) -> None:
        point = attention.together.get(name)
        gathered = None if point is None else self.gather(attention, name, tensor)
        if gathered is not None:
            self.show(point, gathered)

    def gather(self, attention: HookedAttention, name: str, tensor: Tensor) -> Tensor | None:
        """Return the tensors of all a layer's attentions along their heads, or None before the last one."""
        axis = 1 if is_statistic(f"hook_{name}") or name in ("attn_scores", "pattern") else 2
        if name in _BY_KEY_VALUE_HEAD and attention.repeats > 1:
            tensor = tensor.repeat_interleave(attention.repeats, dim=axis)
        parts = self._gathered.setdefault((attention.layer, name), {})
        parts[attention.number] = tensor
        if len(parts) < attention.of:
            return None
        del self._gathered[attention.layer, name]
        return torch.cat([parts[n] for n in range(attention.of)], dim=axis) if attention.of > 1 else tensor

    def show(self, point: Any, tensor: Tensor) -> None:
        """Fire a read-only hook point; raises `WorkbenchError` if a hook changes or replaces its tensor."""
        if not self.is_hooked(point):
            return
        point = self.frozen.get(point, point)
        handed = tensor.clone() if may_write(point) else tensor
        out = self._call_hooks(point, handed)
        if out is not handed or (handed is not tensor and not _equal(handed, tensor)):
            raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the module")

    def _call_hooks(self, point: Any, tensor: Tensor) -> Tensor:
        """Call the hooks; calls within them are not the module's."""
        self.fired.add(point.name)
        before, self.mode.silent = self.mode.silent, True
        try:
            return point(tensor)
        finally:
            self.mode.silent = before

    def fire_addition(self, output: Tensor, *, point: Any, factor: float) -> Tensor:
        """Fire on an output that is added to the stream times a factor."""
        added = output if factor == 1 else output * factor
        fired = self.fire(point, added, beside=factor != 1)
        return output if fired is added else fired if factor == 1 else fired / factor

    def fire_z(self, tensor: Tensor, *, i: int) -> Tensor:
        """Fire on W_O's input, [batch, pos, ...] with or without an axis of heads."""
        heads = tensor.flatten(2).unflatten(-1, (self.layers[i].rows["z"].shape[1], -1))
        fired = self.fire(self.layer_points[i]["z"], heads)
        return tensor if fired is heads else fired.reshape(tensor.shape)

    def fire_projection(self, output: Tensor, *, hooked: HookedProjection) -> Tensor:
        """Fire on own values, or queries and keys before their rotation, in a projection's output [batch, pos, ...]."""
        attention, name, projection = hooked
        if output.shape[:2] != (self.batch, self.length):
            raise WorkbenchError(
                f"{projection.module} in layer {attention.layer} makes {tuple(output.shape)} of {self.batch} x {self.length} tokens, not "
                f"the axes that it had on the example tokens, so that hook_{name} cannot be read: give whole sequences"
            )
        rows = output.reshape(self.batch * self.length, -1)
        heads = projection.heads_in(rows).unflatten(0, (self.batch, self.length))
        fired = self.fire_at(attention, name, heads)
        if name == OWN and attention.layer in self.own_values_read:
            self._store_own_values(attention, fired)
        if fired is heads:
            return output
        return projection.with_heads(rows, fired.flatten(0, 1)).reshape(output.shape)

    def _store_own_values(self, attention: HookedAttention, values: Tensor) -> None:
        if (gathered := self.gather(attention, "own values", values)) is not None:
            self.own_values[attention.layer] = gathered

    def shows_sources(self, attention: HookedAttention) -> bool:
        """Return whether a hook needs the sources of this layer's values."""
        return attention.layer in self.mixtures or attention.layer in self.own_values_read

    def show_sources(self, attention: HookedAttention, v: Tensor) -> None:
        """Show the sources of mixed values [batch, pos, kv_head, d_head] and their coefficients.

        The last attention of a layer shows the sources of all its attentions.
        """
        i, own, block = attention.layer, self.own_values, self.points.blocks[attention.layer]
        if i in self.own_values_read and attention.part.v is None and not block.mixture.sources:
            self._store_own_values(attention, v)
        if i not in self.mixtures or (gathered := self.gather(attention, "effective values", v)) is None:
            return
        v = gathered
        for j, point in self.mixtures[i].items():
            self.show(point, own[j])
        table = self.tables[block.mixture.table].reshape(v.shape) if block.mixture.table else None
        if table is not None:
            self.show(block.table_point, table)
        points, dtype = self.layer_points[i], torch.promote_types(v.dtype, torch.float32)
        if "v_weights" in points:
            named: dict[Any, Any] = {"own": own.get(i), "first": own.get(0), TABLE + block.mixture.table: table, **own}
            weights, _ = weights_by_token(v, [named[s] for s in block.mixture.order])
            self.show(points["v_weights"], weights.to(dtype))
        elif "v_mix" in points:
            values = [own[j] for j in (*self.mixtures[i], i) if j in own]
            target, *values = (x.flatten(0, 1)[:_MAX_FITTED] for x in (v, *values))
            coefficients, _ = fit(target, values)
            coefficients = coefficients if i in own else [*coefficients, 0.0]
            self.show(points["v_mix"], v.new_tensor(coefficients, dtype=dtype))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
