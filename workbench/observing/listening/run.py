"""One run of an observed decoder while its hook points are in use: where it is, what is hooked, what later layers read."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.hook_points import HookPoint, frozen_copy, is_hooked, may_write
from workbench.names import NULL, STATISTICS, is_statistic
from workbench.observing.interception.function_mode import InterceptionMode
from workbench.observing.interception.positions import Positions
from workbench.observing.listening.hook_points import OWN, DecoderPoints
from workbench.observing.recognition.executions import MATRIX
from workbench.observing.recognition.projections import Projection, TensorLocation
from workbench.observing.recognition.structure import DecoderStructure, Part

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


class HookedRun:
    """State of one run, shared by the hooks on modules and those around attention calls."""

    def __init__(
        self, module: nn.Module, structure: DecoderStructure, points: DecoderPoints, tokens: Tensor, *, fused: bool
    ) -> None:
        self.module, self.structure, self.points, self.fused = module, structure, points, fused
        self.layers = structure.layers
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, structure.layout)
        if structure.layout.turned and self.batch == self.length > 1:
            raise WorkbenchError(
                f"{self.batch} sequences of {self.length} tokens: this module puts positions first, and only other numbers tell "
                "them from sequences; give more or fewer sequences"
            )
        self.mode: InterceptionMode | None = None
        self.may_checkpoint = torch.is_grad_enabled()
        self.follow: Callable[[], None] | None = None  # looks for checkpoints that have begun
        self.frozen: dict[
            nn.Module, HookPoint
        ] = {}  # hook points with the hooks of then, in what a checkpoint runs again
        self.running: list[int] = []  # layers, innermost last
        self.runs: Counter[str] = Counter()  # of each module, in all
        self.within: list[Counter[str]] = []  # of modules, in each running layer
        self.scopes: list[tuple[int, Counter[str]]] = []  # layers whose calls are being counted, and these calls
        self.own_values: dict[int, Tensor] = {}  # [batch, pos, kv_head, d_head], where later layers read them
        self.layer_at = {(layer.block, layer.run): i for i, layer in enumerate(self.layers)}
        self.layer_points = [block.attn.hooked() for block in points.blocks]
        self._gathered: dict[tuple[int, str], dict[int, Tensor]] = {}
        sources = {i: block.source_points for i, block in enumerate(points.blocks)}
        self.mixtures = {i: s for i, s in sources.items() if self._mixes(i, s)}
        self.own_values_read = {j for i in self.mixtures for j in (*sources[i], i)}
        self.tables: dict[str, Tensor] = {}  # [batch, pos, width], of those that are read
        read = {points.blocks[i].mixture.table for i in self.mixtures} - {""}
        self.tables_at = {structure.tables[name].run: name for name in read}
        self.lookups = 0  # of any tables, in all
        self._listen()

    def _listen(self) -> None:
        """Who listens to which calls: of each layer by kind and count, and to which outputs of projections."""
        self.calls: dict[tuple[int, str, int], list[tuple[Heard, str]]] = {}
        self.matrix_projections: dict[tuple[int, int], list[HookedProjection]] = {}
        self.module_projections: list[HookedProjection] = []
        self.latents: list[tuple[Heard, TensorLocation]] = []
        self.intercepted: set[int] = set()
        for i in range(len(self.layers)):
            for heard in self._heard_in(i):
                for name, projection in (("q", heard.part.q), ("k", heard.part.k), (OWN, heard.part.v)):
                    read = heard.hooks_any(name) or (name == OWN and i in self.own_values_read)
                    if projection is not None and read:
                        hooked = HookedProjection(heard, name, projection)
                        if projection.module == MATRIX:
                            self.matrix_projections.setdefault((i, projection.run), []).append(hooked)
                            self.intercepted.add(i)
                        else:
                            self.module_projections.append(hooked)
                if heard.part.latent is not None and heard.hooks_any("latent"):
                    self.latents.append((heard, heard.part.latent))
                if heard.hooks_any(*_INTERCEPTED) or i in self.own_values_read:
                    self.intercepted.add(i)
                    for (kind, count), role in heard.part.calls.items():
                        self.calls.setdefault((i, kind, count), []).append((heard, role))
        whole = bool(self.tables_at) or any(self.layers[i].scope is None for i in self.intercepted)
        self.everywhere = whole  # whether calls outside the attentions are needed too

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
        run.scopes = [(layer, counts.copy()) for layer, counts in self.scopes]
        run.own_values, run.tables = dict(self.own_values), dict(self.tables)
        run._gathered = {key: dict(parts) for key, parts in self._gathered.items()}
        return run

    # ---- where the run is --------------------------------------------------------------------------------------------

    def count_call(self, kind: str) -> tuple[int, int]:
        """(layer, which call of this kind it is there); layer -1 outside the observed ones."""
        if self.follow is not None:
            self.follow()
        if not self.scopes or self.scopes[-1][0] < 0:
            return -1, 0
        layer, counts = self.scopes[-1]
        counts[kind] += 1
        return layer, counts[kind] - 1

    def listeners(self, kind: str) -> list[tuple[Heard, str]]:
        """The attentions that a call of this kind, made now, is a step of, and which."""
        layer, count = self.count_call(kind)
        return self.calls.get((layer, kind, count), [])

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
        mode = self.mode
        assert mode is not None
        before, mode.silent = mode.silent, True
        try:
            return point(tensor)
        finally:
            mode.silent = before

    def fire_projection(self, hooked: HookedProjection, output: Tensor) -> Tensor:
        """Fire own values, or queries and keys before their rotation, among the columns of a projection's output."""
        heard, name, projection = hooked
        rows = self.positions.by_position(output)
        assert rows is not None
        heads = projection.heads_in(rows).unflatten(0, (self.batch, self.length))
        fired = self.fire_at(heard, name, heads)
        if name == OWN and heard.layer in self.own_values_read:
            self.keep_own_values(heard, fired)
        if fired is heads:
            return output
        changed = projection.with_heads(rows, fired.flatten(0, 1))
        return self.positions.unshaped(changed.unflatten(0, (self.batch, self.length)), output)

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
