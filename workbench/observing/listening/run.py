"""One run of an observed decoder while its hook points are in use: where it is, what is hooked, what later layers read."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.hook_points import HookPoint, frozen_copy, is_hooked, may_write
from workbench.names import NULL, STATISTICS, is_statistic
from workbench.observing.interception.call_sites import CallSite, Line, lines_within, running_frames
from workbench.observing.interception.function_mode import Failed, InterceptionMode
from workbench.observing.interception.fused_calls import APPLIED, COMPLETE
from workbench.observing.interception.positions import Positions
from workbench.observing.interception.segments import SeenMasks, Segments
from workbench.observing.listening.hook_points import OWN, DecoderPoints
from workbench.observing.recognition.executions import LOOKUP, MATRIX
from workbench.observing.recognition.structure import DecoderStructure, Part, Projection, TensorLocation

_INTERCEPTED = ("v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "v_mix", "v_weights", *STATISTICS, NULL)
_BY_KEY_VALUE_HEAD = ("v", OWN, "k", "rot_k", "own values", "effective values")


@dataclass(eq=False)
class Heard:
    """One attention that is listened to, in one run: its hook points that are hooked, and what its calls leave for the next."""

    layer: int
    number: int  # which of the layer's attentions
    of: int  # how many these are
    part: Part
    points: dict[str, HookPoint]
    together: dict[str, HookPoint]  # of all the layer's attentions, where these are several
    repeats: int = 1  # how often its key-value heads are repeated there
    lse: Tensor | None = None  # of eager scores whose statistics are hooked
    null: Tensor | None = None  # of these, what of each row goes to columns that are no tokens
    dots: Tensor | None = None  # queries times keys under a softmax that is written out, where statistics are hooked

    def hooks_any(self, *names: str) -> bool:
        """Whether one of these hook points is hooked."""
        return any(name in self.points or name in self.together for name in names)


class HookedProjection(NamedTuple):
    """A projection whose output is read: of which attention, as what (q, k or own_v), where it stands."""

    heard: Heard
    name: str
    projection: Projection


class CountedCalls(NamedTuple):
    """A running module in which a layer attends: the layer (-1: none), the Python frame, and the number of calls by kind and lines.

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


Fire = Callable[["HookedRun", Tensor], Tensor]
"""Fires hook points of a run on a tensor, and returns what the module goes on with."""


class HookedRun:
    """State of one run, shared by the hooks on modules and those around attention calls."""

    def __init__(
        self, module: nn.Module, structure: DecoderStructure, points: DecoderPoints, tokens: Tensor, *, fused: bool,
        masks: SeenMasks | None = None, segments: Segments | None = None, failed: Failed | None = None,
    ) -> None:  # fmt: skip
        self.failed = failed  # takes errors, where the run must go on
        self.fired: set[str] = set()  # hook points that were passed
        self.masks, self.segments = masks, segments  # masks to note; documents that the statistics keep apart
        self.module, self.structure, self.points, self.fused = module, structure, points, fused
        self.layers = structure.layers
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, structure.layout)
        self.mode: InterceptionMode | None = None
        self.may_checkpoint = torch.is_grad_enabled()
        self.follow: Callable[[], None] | None = None  # looks for checkpoints that have begun
        self.frozen: dict[nn.Module, HookPoint] = {}  # points with the hooks of then, where a checkpoint runs again
        self.running: list[int] = []  # layers, innermost last
        self.runs: Counter[str] = Counter()  # of each module, in all
        self.within: list[Counter[str]] = []  # of modules, in each running layer
        self.scopes: list[CountedCalls] = []  # layers whose calls are being counted, and these calls
        self.callers: dict[str, tuple[int, tuple[Line, ...]]] = {}  # of inline blocks: frame, outer lines
        self.own_values: dict[int, Tensor] = {}  # [batch, pos, kv_head, d_head], where later layers read them
        self.layer_at = {(layer.block, layer.run): i for i, layer in enumerate(self.layers)}
        self.layer_points = [block.attn.hooked() for block in points.blocks]
        self._gathered: dict[tuple[int, str], dict[int, Tensor]] = {}
        sources = {i: block.source_points for i, block in enumerate(points.blocks)}
        self.mixtures = {i: s for i, s in sources.items() if self._mixes(i, s)}
        self.own_values_read = {j for i in self.mixtures for j in (*sources[i], i)}
        self.tables: dict[str, Tensor] = {}  # [batch, pos, width], of those that are read
        read = {points.blocks[i].mixture.table for i in self.mixtures} - {""}
        self.tables_read = {name: structure.tables[name] for name in read}
        embed, point = structure.embed, points.embed
        is_bare = embed is not None and embed.module == LOOKUP and point is not None and is_hooked(point)
        self.embed = embed if is_bare else None
        parameters = {read.parameter for read in (*self.tables_read.values(), self.embed) if read is not None}
        self.looked_up_in = {id(module.get_parameter(name)): name for name in parameters}
        self.lookups: Counter[str] = Counter()  # of these parameters
        self._listen()

    def _listen(self) -> None:
        """Who listens to which calls: of each layer by kind and count, and to which outputs of projections."""
        self.calls: dict[tuple[int, CallSite], list[tuple[Heard, str]]] = {}
        self.matrix_inputs: dict[tuple[int, CallSite], list[Fire]] = {}
        self.matrix_outputs: dict[tuple[int, CallSite], list[Fire]] = {}
        self.module_projections: list[HookedProjection] = []
        self.latents: list[tuple[Heard, TensorLocation]] = []
        self.intercepted: set[int] = set()
        for i in range(len(self.layers)):
            for heard in self._heard_in(i):
                for name, projection in (("q", heard.part.q), ("k", heard.part.k), (OWN, heard.part.v)):
                    read = heard.hooks_any(name) or (name == OWN and i in self.own_values_read)
                    if projection is not None and read:
                        hooked = HookedProjection(heard, name, projection)
                        if projection.site is not None:
                            fire = partial(HookedRun._fire_bare_projection, hooked=hooked)
                            self.matrix_outputs.setdefault((i, projection.site), []).append(fire)
                            self.intercepted.add(i)
                        else:
                            self.module_projections.append(hooked)
                if heard.part.latent is not None and heard.hooks_any("latent"):
                    self.latents.append((heard, heard.part.latent))
                if heard.hooks_any(*_INTERCEPTED) or i in self.own_values_read or self.masks is not None:
                    self.intercepted.add(i)
                    for site, role in heard.part.calls.items():
                        self.calls.setdefault((i, site), []).append((heard, role))
            self._listen_to_bare_products(i)
        self.sites: dict[int, dict[tuple[str, tuple[Line, ...]], CallSite]] = {}  # of each layer
        for i, site in (*self.calls, *self.matrix_inputs, *self.matrix_outputs):
            self.sites.setdefault(i, {})[site.kind, site.lines] = site
        whole = bool(self.looked_up_in) or any(self.layers[i].scope is None for i in self.intercepted)
        whole |= self.structure.block_lists in (COMPLETE, APPLIED)  # eager calls ignore them
        self.everywhere = whole  # whether calls outside the attentions are needed too

    def _listen_to_bare_products(self, i: int) -> None:
        """Listen to W_O and to what a layer adds to its stream, where these are products that are no modules."""
        layer, block = self.layers[i], self.points.blocks[i]
        if layer.z is not None and layer.z.site is not None and "z" in self.layer_points[i]:
            fire = partial(HookedRun._fire_shaped, fire=lambda run, x: run.fire_z(i, x), location=layer.z)
            self.matrix_inputs.setdefault((i, layer.z.site), []).append(fire)
            self.intercepted.add(i)
        for name in ("attn_out", "mlp_out"):
            location: Any = getattr(layer, name)
            if location is None or location.site is None or not is_hooked(point := getattr(block, f"hook_{name}")):
                continue
            added = partial(HookedRun.fire_addition, point=point, factor=location.factor)
            fire = partial(HookedRun._fire_shaped, fire=added, location=location)
            self.matrix_outputs.setdefault((i, location.site), []).append(fire)
            self.intercepted.add(i)

    def _fire_shaped(self, tensor: Tensor, *, fire: Fire, location: TensorLocation) -> Tensor:
        """Fire on the input or output of a bare product as [batch, pos, ...]."""
        shown = self.positions.shaped(tensor, location.axes)
        fired = shown if shown is None else fire(self, shown)
        return tensor if fired is None or fired is shown else self.positions.unshaped(fired, tensor, location.axes)

    def _fire_bare_projection(self, output: Tensor, *, hooked: HookedProjection) -> Tensor:
        """Fire a projection in the output of a bare product."""
        axes = hooked.projection.axes
        shaped = self.positions.shaped(output, axes)
        fired = self.fire_projection(hooked, output if shaped is None else shaped)
        return output if fired is shaped else self.positions.unshaped(fired, output, axes)

    def _heard_in(self, i: int) -> list[Heard]:
        layer, n = self.layers[i], len(self.layers[i].parts)
        each = [points.hooked() for points in self.points.blocks[i].parts(n)] if n else []
        together = dict(self.layer_points[i]) if n > 1 else {}
        if layer.z is not None:  # what W_O reads, where it reads it
            (together if n > 1 else each[0] if each else {}).pop("z", None)
        heard = []
        for number, (part, points) in enumerate(zip(layer.parts, each, strict=True)):
            grouped = layer.attention.heads * part.attention.kv_heads
            repeats = layer.attention.kv_heads * part.attention.heads // grouped
            heard.append(Heard(i, number, n, part, points, together, repeats))
        return heard

    def _mixes(self, i: int, sources: dict[int, HookPoint]) -> bool:
        """Whether what is mixed into a layer's values, or how much of it, is hooked."""
        table = self.points.blocks[i].table_point
        shown = [*sources.values(), *([] if table is None else [table])]
        return bool({"v_mix", "v_weights"} & self.layer_points[i].keys()) or any(map(is_hooked, shown))

    def copy(self) -> HookedRun:
        """The same run with a state of its own, to go on from here more than once."""
        run = copy.copy(self)
        run.runs, run.running = self.runs.copy(), list(self.running)
        run.within = [counts.copy() for counts in self.within]
        run.scopes = [made._replace(counts=made.counts.copy()) for made in self.scopes]
        run.callers, run.lookups = dict(self.callers), self.lookups.copy()
        run.own_values, run.tables = dict(self.own_values), dict(self.tables)
        run._gathered = {key: dict(parts) for key, parts in self._gathered.items()}
        return run

    # ---- where the run is --------------------------------------------------------------------------------------------

    def _call_site(self, kind: str) -> tuple[int, CallSite] | None:
        """Return the layer and site of the call that runs now, or None if no hook listens to it."""
        if self.follow is not None:
            self.follow()
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

    def check_calls(self, made: CountedCalls) -> None:
        """Raise `WorkbenchError` if a layer made fewer calls than on the example tokens."""
        for place, site in self.sites.get(made.layer, {}).items():
            if made.counts[place] < site.total:
                raise WorkbenchError(_other_calls(made.layer, site, "fewer"))

    def listeners(self, kind: str) -> list[tuple[Heard, str]]:
        """The attentions that a call of this kind, made now, is a step of, and which."""
        return [] if (place := self._call_site(kind)) is None else self.calls.get(place, [])

    def bare_product(self) -> tuple[list[Fire], list[Fire]]:
        """What fires on the input and on the output of the product with a parameter that is called now."""
        if not (self.matrix_inputs or self.matrix_outputs) or (place := self._call_site(MATRIX)) is None:
            return [], []
        return self.matrix_inputs.get(place, []), self.matrix_outputs.get(place, [])

    # ---- hook points -------------------------------------------------------------------------------------------------

    def is_hooked(self, point: Any) -> bool:
        """Whether a hook point has hooks in this run."""
        return point in self.frozen if self.frozen else point is not None and is_hooked(point)

    def may_write(self) -> bool:
        """Whether some hook of this run may edit its tensor."""
        return any(may_write(point) for point in self._hooked_points())

    def freeze_hooks(self) -> None:
        """Keep the hooks of now for what is run again, perhaps when they have been removed."""
        if not self.frozen:
            self.frozen = {point: frozen_copy(point) for point in self._hooked_points()}

    def _hooked_points(self) -> list[HookPoint]:
        ends = [point for point in (self.points.embed, self.points.head) if point is not None]
        inside = (part for block in self.points.blocks for part in block.modules() if isinstance(part, HookPoint))
        return [point for point in (*ends, *inside) if self.is_hooked(point)]

    def fire(self, point: Any, tensor: Tensor, *, beside: bool = False) -> Tensor:
        """Return what leaves a hook point: the same tensor where no hook changes it.

        Hooks that may write get a copy, so that no edit in place reaches other readers of the tensor. An unchanged copy is
        dropped, unless a hook keeps it with its graph: then the module goes on with it, so that it gets its gradient.
        `beside`: the tensor is computed for the hooks alone.
        """
        if not self.is_hooked(point):
            return tensor
        point = self.frozen.get(point, point)
        writes = may_write(point)
        handed = _like(tensor) if writes or self.structure.in_place else tensor
        references = sys.getrefcount(handed)
        out = self._call_hooks(point, handed)
        if out is not handed:
            return out.to(tensor.dtype)
        if writes and not _equal(handed, tensor):
            return handed
        kept = handed._backward_hooks or sys.getrefcount(handed) > references + 1  # `out` is one more
        graph = writes and handed.requires_grad and not (beside or self.structure.in_place)
        return handed if graph and kept else tensor

    def fire_at(self, heard: Heard, name: str, tensor: Tensor, *, beside: bool = False) -> Tensor:
        """What leaves a hook point of an attention; that of all its layer's attentions is shown with the last of them."""
        out = self.fire(heard.points.get(name), tensor, beside=beside)
        if (point := heard.together.get(name)) is not None and (whole := self.gather(heard, name, out)) is not None:
            self.show(point, whole)
        return out

    def show_at(self, heard: Heard, name: str, tensor: Tensor) -> None:
        """Show what is computed beside the module at a hook point of an attention."""
        self.show(heard.points.get(name), tensor)
        if (point := heard.together.get(name)) is not None and (whole := self.gather(heard, name, tensor)) is not None:
            self.show(point, whole)

    def gather(self, heard: Heard, name: str, tensor: Tensor) -> Tensor | None:
        """The tensors of all a layer's attentions along their heads, once the last one is there."""
        axis = 1 if is_statistic(f"hook_{name}") or name in ("attn_scores", "pattern") else 2
        if name in _BY_KEY_VALUE_HEAD and heard.repeats > 1:
            tensor = tensor.repeat_interleave(heard.repeats, dim=axis)
        parts = self._gathered.setdefault((heard.layer, name), {})
        parts[heard.number] = tensor
        if len(parts) < heard.of:
            return None
        del self._gathered[heard.layer, name]
        return torch.cat([parts[n] for n in range(heard.of)], dim=axis) if heard.of > 1 else tensor

    def show(self, point: Any, tensor: Tensor) -> None:
        """Fire a hook point that can only be read; raises `WorkbenchError` where a hook changes or replaces its tensor."""
        if not self.is_hooked(point):
            return
        point = self.frozen.get(point, point)
        handed = tensor.clone() if may_write(point) else tensor
        out = self._call_hooks(point, handed)
        if out is not handed or (handed is not tensor and not _equal(handed, tensor)):
            raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the module")

    def _call_hooks(self, point: Any, tensor: Tensor) -> Tensor:
        """The hooks' result; calls that hooks make themselves are not the module's."""
        self.fired.add(point.name)
        mode = self.mode
        assert mode is not None
        before, mode.silent = mode.silent, True
        try:
            return point(tensor)
        finally:
            mode.silent = before

    def fire_addition(self, output: Tensor, *, point: Any, factor: float) -> Tensor:
        """What is added to the stream, times the factor with which it is."""
        added = output if factor == 1 else output * factor
        fired = self.fire(point, added, beside=factor != 1)
        return output if fired is added else fired if factor == 1 else fired / factor

    def fire_z(self, i: int, tensor: Tensor) -> Tensor:
        """Fire on what W_O reads, [batch, pos, ...] with or without an axis of heads."""
        heads = tensor.flatten(2).unflatten(-1, (self.layers[i].rows["z"].shape[1], -1))
        fired = self.fire(self.layer_points[i]["z"], heads)
        return tensor if fired is heads else fired.reshape(tensor.shape)

    def fire_projection(self, hooked: HookedProjection, output: Tensor) -> Tensor:
        """Fire own values, or queries and keys before their rotation, among the columns of a projection's output [batch, pos, ...]."""
        heard, name, projection = hooked
        if output.shape[:2] != (self.batch, self.length):
            raise WorkbenchError(
                f"{projection.module} in layer {heard.layer} makes {tuple(output.shape)} of {self.batch} x {self.length} tokens, not the "
                f"axes that it had on the example tokens, so that hook_{name} cannot be read: give whole sequences"
            )
        rows = output.reshape(self.batch * self.length, -1)
        heads = projection.heads_in(rows).unflatten(0, (self.batch, self.length))
        fired = self.fire_at(heard, name, heads)
        if name == OWN and heard.layer in self.own_values_read:
            self.keep_own_values(heard, fired)
        if fired is heads:
            return output
        return projection.with_heads(rows, fired.flatten(0, 1)).reshape(output.shape)

    def keep_own_values(self, heard: Heard, values: Tensor) -> None:
        """Keep an attention's own values for the layers that read them."""
        if (whole := self.gather(heard, "own values", values)) is not None:
            self.own_values[heard.layer] = whole


def _like(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does, so that whatever reads it rounds alike."""
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or 0 in tensor.stride():
        return copy
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
