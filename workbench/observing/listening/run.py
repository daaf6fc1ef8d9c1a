"""One run of an observed decoder while its hook points are in use: where it is, what is hooked, what later layers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.hook_points import HookPoint, is_hooked
from workbench.names import NULL, STATISTICS
from workbench.observing.interception.function_mode import InterceptionMode
from workbench.observing.interception.tensor_layouts import by_position, from_positions
from workbench.observing.listening.hook_points import DecoderPoints
from workbench.observing.recognition.projections import Projection
from workbench.observing.recognition.structure import DecoderStructure
from workbench.observing.recognition.trace import MATRIX

_INTERCEPTED = ("v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "v_mix", "v_weights", *STATISTICS, NULL)


class HookedProjection(NamedTuple):
    """A projection whose output is read: of which layer, q, k or v, where it stands, its hook point (None: read, not shown)."""

    layer: int
    name: str
    projection: Projection
    point: HookPoint | None


class HookedRun:
    """State of one run, shared by the hooks on modules and those around attention calls."""

    def __init__(self, module: nn.Module, structure: DecoderStructure, points: DecoderPoints, tokens: Tensor) -> None:
        self.module, self.structure, self.points = module, structure, points
        self.layers = structure.layers
        self.batch, self.length = tokens.shape
        if structure.positions_first and self.batch == self.length > 1:
            raise WorkbenchError(
                f"{self.batch} sequences of {self.length} tokens: this module puts positions first, and only other numbers tell "
                "them from sequences; give more or fewer sequences"
            )
        self.mode: InterceptionMode | None = None
        self.running: list[int] = []  # layers, innermost last
        self.runs: Counter[str] = Counter()  # of each module, in all
        self.within: list[Counter[str]] = []  # of modules and calls, in each running layer
        self.own_values: dict[int, Tensor] = {}  # [batch, pos, kv_head, d_head], where later layers read them
        self.layer_at = {(layer.block, layer.run): i for i, layer in enumerate(self.layers)}
        attentions: Any = [block.attn._modules for block in points.blocks]
        self.attention_points = [  # of each layer, those that are hooked
            {name.removeprefix("hook_"): p for name, p in modules.items() if name.startswith("hook_") and is_hooked(p)}
            for modules in attentions
        ]
        sources = {i: block.source_points for i, block in enumerate(points.blocks)}
        self.mixtures = {i: s for i, s in sources.items() if self._mixes(i, s)}
        self.own_values_read = {j for i in self.mixtures for j in (*sources[i], i)}
        self.tables: dict[str, Tensor] = {}  # [batch, pos, width], of those that are read
        read = {points.blocks[i].mixture.table for i in self.mixtures} - {""}
        self.tables_at = {structure.tables[name].run: name for name in read}
        self.lookups = 0  # of any tables, in all
        projections = [hooked_one for i in sources for hooked_one in self._hooked_projections(i)]
        self.module_projections = [p for p in projections if p.projection.module != MATRIX]
        self.matrix_projections: dict[tuple[int, int], list[HookedProjection]] = {}  # by layer, and which matrix there
        for p in projections:
            if p.projection.module == MATRIX:
                self.matrix_projections.setdefault((p.layer, p.projection.run), []).append(p)
        hooked_layers = {i for i, named in enumerate(self.attention_points) if named.keys() & set(_INTERCEPTED)}
        self.intercepted = hooked_layers | self.own_values_read | {i for i, _ in self.matrix_projections}

    def _mixes(self, i: int, sources: dict[int, HookPoint]) -> bool:
        """Whether what is mixed into a layer's values, or how much of it, is hooked."""
        table = self.points.blocks[i].table_point
        shown = [*sources.values(), *([] if table is None else [table])]
        return bool({"v_mix", "v_weights"} & self.attention_points[i].keys()) or any(map(is_hooked, shown))

    def _hooked_projections(self, i: int) -> Iterator[HookedProjection]:
        layer = self.layers[i]
        for name, projection in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
            point = self.points.blocks[i].own_point if name == "v" else self.point(i, name)
            read = (point is not None and is_hooked(point)) or (name == "v" and i in self.own_values_read)
            if projection is not None and read:
                yield HookedProjection(i, name, projection, point)

    def point(self, i: int, name: str) -> Any:
        """The hook point of a layer's attention, None where it is not hooked."""
        return self.attention_points[i].get(name)

    def hooks_any(self, i: int, *names: str) -> bool:
        """Whether one of these hook points of a layer's attention is hooked."""
        points = self.attention_points[i]
        return any(name in points for name in names)

    def count_call(self, kind: str) -> tuple[int, int]:
        """(layer, which call of this kind it is there); layer -1 outside the observed blocks."""
        if not self.running or self.running[-1] < 0:
            return -1, 0
        count = self.within[-1][f"({kind})"]
        self.within[-1][f"({kind})"] += 1
        return self.running[-1], count

    def fire(self, point: Any, tensor: Tensor) -> Tensor:
        """What leaves a hook point: the same tensor where no hook replaces it."""
        if point is None or not is_hooked(point):
            return tensor
        handed = tensor.clone() if self.structure.in_place else tensor
        out = self._call_hooks(point, handed)
        return tensor if out is handed else out.to(tensor.dtype)

    def fire_at(self, i: int, name: str, tensor: Tensor) -> Tensor:
        """What leaves a hook point of a layer's attention."""
        return self.fire(self.attention_points[i].get(name), tensor)

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

    def fire_projection(self, hooked_projection: HookedProjection, output: Tensor) -> Tensor:
        """Fire own values, or queries and keys before their rotation, among the columns of a projection's output."""
        i, name, projection, point = hooked_projection
        rows = by_position(output, self.batch, self.length)
        assert rows is not None
        heads = projection.heads_in(rows).unflatten(0, (self.batch, self.length))
        fired = self.fire(point, heads)
        if name == "v" and i in self.own_values_read:
            self.own_values[i] = fired
        if fired is heads:
            return output
        return from_positions(projection.with_heads(rows, fired.flatten(0, 1)), output, self.batch, self.length)
