"""One run of an observed decoder while its hook points are in use: where it is, what is hooked, what later layers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.hook_points import HookPoint, is_hooked
from workbench.names import NULL, STATISTICS, is_statistic
from workbench.observing.interception.function_mode import InterceptionMode
from workbench.observing.interception.positions import Positions
from workbench.observing.listening.hook_points import OWN, DecoderPoints
from workbench.observing.recognition.executions import LOOKUP, MATRIX
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

    def __init__(self, module: nn.Module, structure: DecoderStructure, points: DecoderPoints, tokens: Tensor) -> None:
        self.module, self.structure, self.points = module, structure, points
        self.layers = structure.layers
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, structure.layout)
        if structure.layout.turned and self.batch == self.length > 1:
            raise WorkbenchError(
                f"{self.batch} sequences of {self.length} tokens: this module puts positions first, and only other numbers tell "
                "them from sequences; give more or fewer sequences"
            )
        self.mode: InterceptionMode | None = None
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
        self.tables_at: dict[int, list[str]] = {}  # which tables each lookup gives
        for name in sorted(read):
            self.tables_at.setdefault(structure.tables[name].run, []).append(name)
        embed, point = structure.embed, points.embed
        is_bare = embed is not None and embed.module == LOOKUP and point is not None and is_hooked(point)
        self.embed_at = embed.run if is_bare and embed is not None else -1  # which lookup is the embedding
        self.lookups = 0  # of any tables, in all
        self._listen()

    def _listen(self) -> None:
        """Who listens to which calls: of each layer by kind and count, and to which outputs of projections."""
        self.calls: dict[tuple[int, str, int], list[tuple[Heard, str]]] = {}
        self.matrix_inputs: dict[tuple[int, int], list[Callable[[Tensor], Tensor]]] = {}
        self.matrix_reads: dict[tuple[int, int], list[Callable[[Tensor], Tensor]]] = {}
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
                            fire = partial(self.fire_projection, hooked)
                            self.matrix_reads.setdefault((i, projection.run), []).append(fire)
                            self.intercepted.add(i)
                        else:
                            self.module_projections.append(hooked)
                if heard.part.latent is not None and heard.hooks_any("latent"):
                    self.latents.append((heard, heard.part.latent))
                if heard.hooks_any(*_INTERCEPTED) or i in self.own_values_read:
                    self.intercepted.add(i)
                    for (kind, count), role in heard.part.calls.items():
                        self.calls.setdefault((i, kind, count), []).append((heard, role))
            self._listen_to_bare_products(i)
        whole = (
            bool(self.tables_at) or self.embed_at >= 0 or any(self.layers[i].scope is None for i in self.intercepted)
        )
        self.everywhere = whole  # whether calls outside the attentions are needed too

    def _listen_to_bare_products(self, i: int) -> None:
        """Listen to W_O and to what a layer adds to its stream, where these are products that are no modules."""
        layer, block = self.layers[i], self.points.blocks[i]
        if layer.z is not None and layer.z.module == MATRIX and "z" in self.layer_points[i]:
            self.matrix_inputs.setdefault((i, layer.z.run), []).append(
                partial(self._fire_shaped, partial(self.fire_z, i))
            )
            self.intercepted.add(i)
        for name in ("attn_out", "mlp_out"):
            location: Any = getattr(layer, name)
            if (
                location is not None
                and location.module == MATRIX
                and is_hooked(point := getattr(block, f"hook_{name}"))
            ):
                fire = partial(self.fire_addition, point, location.factor)
                self.matrix_reads.setdefault((i, location.run), []).append(partial(self._fire_shaped, fire))
                self.intercepted.add(i)

    def _fire_shaped(self, fire: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """Fire on a tensor that a function reads or makes as [batch, pos, ...]."""
        shown = self.positions.shaped(tensor)
        fired = shown if shown is None else fire(shown)
        return tensor if fired is None or fired is shown else self.positions.unshaped(fired, tensor)

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

    # ---- where the run is --------------------------------------------------------------------------------------------

    def count_call(self, kind: str) -> tuple[int, int]:
        """(layer, which call of this kind it is there); layer -1 outside the observed ones."""
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

    def fire(self, point: Any, tensor: Tensor) -> Tensor:
        """What leaves a hook point: the same tensor where no hook replaces it."""
        if point is None or not is_hooked(point):
            return tensor
        handed = tensor.clone() if self.structure.in_place else tensor
        out = self._call_hooks(point, handed)
        return tensor if out is handed else out.to(tensor.dtype)

    def fire_at(self, heard: Heard, name: str, tensor: Tensor) -> Tensor:
        """What leaves a hook point of an attention; that of all its layer's attentions is shown with the last of them."""
        out = self.fire(heard.points.get(name), tensor)
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
        """Fire a hook point that can only be read; raises `WorkbenchError` where a hook replaces its tensor."""
        if point is not None and is_hooked(point) and self._call_hooks(point, tensor) is not tensor:
            raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the module")

    def _call_hooks(self, point: Any, tensor: Tensor) -> Tensor:
        """The hooks' result; calls that hooks make themselves are not the module's."""
        if self.mode is None:
            return point(tensor)
        before, self.mode.silent = self.mode.silent, True
        try:
            return point(tensor)
        finally:
            self.mode.silent = before

    def fire_addition(self, point: Any, factor: float, output: Tensor) -> Tensor:
        """What is added to the stream, times the factor with which it is."""
        added = output if factor == 1 else output * factor
        fired = self.fire(point, added)
        return output if fired is added else fired if factor == 1 else fired / factor

    def fire_z(self, i: int, tensor: Tensor) -> Tensor:
        """Fire on what W_O reads, [batch, pos, ...] with or without an axis of heads."""
        heads = tensor.flatten(2).unflatten(-1, (self.layers[i].rows["z"].shape[1], -1))
        fired = self.fire(self.layer_points[i]["z"], heads)
        return tensor if fired is heads else fired.reshape(tensor.shape)

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
