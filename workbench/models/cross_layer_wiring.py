"""The wiring of a model: the tensors of other layers that each layer shares or mixes, and its tensors that later layers read.

`wire` asks the shortcuts once, when a model is built; the forward pass in `attention_layer.py` follows the result. In a ResFormer,
`projections["v"]` of layers n > 0 has `mixed` = (0,), so layer 0 stores V_1. In an SVFormer it has `shared_source` = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.errors import WorkbenchError
from workbench.models.shortcut import Path, Projection, Shortcut, Source, State, overrides

PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v")
ATTENDED = ("rot_q", "rot_k", "v")
PATHS: tuple[Path, ...] = ("output", "pattern")


@dataclass(kw_only=True)
class ProjectionWiring:
    """Sources of the queries, keys or values of one layer."""

    shared_source: Source | None  # whose tensor the layer uses; None: it projects its own
    own_heads: int  # heads that it projects itself beside a shared source
    sources: dict[Source, State]
    """Every tensor of another layer or table that the layer reads, layers first: shared, mixed, or used by an `output`."""
    mixer: Shortcut | None  # gives the weights of `mixed` and of the layer's own tensor
    mixed: tuple[Source, ...]

    @property
    def projects(self) -> bool:
        """True if the layer projects all or some of its heads itself."""
        return self.shared_source is None or self.own_heads > 0


@dataclass(kw_only=True)
class LayerWiring:
    """The tensors that one layer reads from other layers, and those of its own that later layers read."""

    layer: int
    projections: dict[Projection, ProjectionWiring]
    joint: Shortcut | None  # defines the layer's softmaxes; None: one softmax over its own keys
    attended: dict[str, tuple[Source, ...]]
    """Layers whose rotated queries or keys (`rot_q`, `rot_k`) or values (`v`) these softmaxes read."""
    own_values: tuple[Shortcut, ...]  # change the layer's own values
    outputs: tuple[Shortcut, ...]  # add to the head outputs
    gates: tuple[Shortcut, ...]  # multiply the head outputs after that
    constants: dict[str, dict[str, float]]
    """Coefficients of `outputs` and of `joint`, by path (`output`, `pattern`) and by the name of what they multiply."""
    stored: set[tuple[str, State]] = field(default_factory=set)  # tensors of this layer that later layers read

    def coefficients(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the factors at each `attn.hook_<path>_mix`: `first`, `source.2`, `table`, `own`."""
        mixed = {
            n: (*map(source_name, p.mixed), *(["own"] if p.projects else []))
            for n, p in self.projections.items()
            if p.mixer is not None
        }
        return mixed | {path: tuple(names) for path, names in self.constants.items() if names}


def wire(n_layers: int, shortcuts: Sequence[Shortcut]) -> list[LayerWiring]:
    """Return the wiring of every layer; raise `WorkbenchError` for shortcuts that contradict each other."""
    # in the order of their prefixes, whatever the order in the model's name
    using = {
        seam: tuple(sorted((s for s in shortcuts if overrides(s, seam)), key=lambda s: s.prefix))
        for seam in ("own_value", "output", "gate")
    }
    layers = []
    for layer in range(n_layers):
        joint = next((s for s in shortcuts if s.attends(layer)), None)
        attended = {name: joint.sources(name, layer) for name in ATTENDED} if joint else {}
        constants: dict[str, dict[str, float]] = {path: {} for path in PATHS}
        for shortcut in shortcuts:
            for path in PATHS:
                values = shortcut.constants(path, layer)
                if twice := sorted(constants[path].keys() & values.keys()):
                    raise WorkbenchError(
                        f"{shortcut.prefix}: another shortcut has an {path} coefficient {twice[0]} too"
                    )
                constants[path] |= values
        wiring = LayerWiring(
            layer=layer,
            projections={
                name: wire_projection(name, layer, [s for s in shortcuts if s is not joint], shortcuts)
                for name in PROJECTIONS
            },
            joint=joint,
            attended={name: sources for name, sources in attended.items() if sources},
            own_values=using["own_value"][::-1],  # value gates and V-scale come before a held start
            outputs=using["output"],
            gates=using["gate"],
            constants=constants,
        )
        layers.append(wiring)
        for name, projection in wiring.projections.items():
            for j, state in projection.sources.items():
                if isinstance(j, int):
                    layers[j].stored.add((name, state))
        shared_key = wiring.projections["k"].shared_source
        rotated = [("rot_k", (shared_key,))] if isinstance(shared_key, int) else []  # a shared key is rotated already
        for tensor, sources in [*wiring.attended.items(), *rotated]:
            for j in sources:
                if isinstance(j, int):
                    layers[j].stored.add((tensor, "cached"))
    return layers


def wire_projection(
    name: Projection, layer: int, mixing: Sequence[Shortcut], shortcuts: Sequence[Shortcut]
) -> ProjectionWiring:
    """Return the sources of a layer's queries, keys or values; `mixing` leaves out the one that defines the softmaxes."""
    sharer = next((s for s in shortcuts if s.shared_source(name, layer) != layer), None)
    shared_source = None if sharer is None else sharer.shared_source(name, layer)
    states: dict[Source, State] = {} if shared_source is None else {shared_source: "effective"}
    mixer, mixed = None, tuple[Source, ...]()
    for shortcut in mixing:
        mixes = shortcut.mixes(name, layer)
        if mixes and sharer not in (None, shortcut):
            continue  # the layer has no tensor of its own to mix
        sources = shortcut.sources(name, layer)
        for j in sources:
            both_states = states.setdefault(j, shortcut.reads) != shortcut.reads
            if both_states and isinstance(j, int) and 0 < j < layer:
                shared_there = any(s.shared_source(name, j) != j for s in mixing)
                if not shared_there and any(s.mixes(name, j) for s in mixing):
                    readers = [s for s in mixing if j in (s.shared_source(name, layer), *s.sources(name, layer))]
                    raise WorkbenchError(
                        f"{' and '.join(s.prefix for s in readers)} cannot be combined: layer {layer} would read"
                        f" {name} of layer {j} both before and after it is mixed"
                    )
        if mixes:
            mixer, mixed = shortcut, sources
    layers: list[Source] = sorted(j for j in states if isinstance(j, int))
    tables: list[Source] = [j for j in states if isinstance(j, str)]
    return ProjectionWiring(
        shared_source=shared_source,
        own_heads=0 if sharer is None else sharer.own_heads(name, layer),
        sources={j: states[j] for j in (*layers, *tables)},
        mixer=mixer,
        mixed=mixed,
    )


def source_name(source: Source) -> str:
    """Return the name of a source in coefficients and value paths: `first`, `source.2`, `table`."""
    if isinstance(source, str):
        return "table"
    return "first" if source == 0 else f"source.{source}"
