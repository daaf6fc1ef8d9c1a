"""What comes from where: whose queries, keys and values each layer uses, mixes and stores for later layers.

Decided once, when a model is built, from what its shortcuts say (`shortcut.py`); the forward pass in `attention.py` only
follows it. A ResFormer layer n, for one, has `projections["v"].mixer` = the shortcut and `.mixed` = (0,), and layer 0 stores
its values: V_n = lambda_1 V_1 + lambda_2 V_n^own. A SVFormer layer has `projections["v"].shared_source` = 0 instead.
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
    """Where the queries, keys or values of one layer come from."""

    shared_source: Source | None  # whose tensor is used; None: the layer has a projection of its own
    own_heads: int  # heads that it projects itself beside a shared source
    sources: dict[Source, State]
    """All tensors of other layers and tables that are read, layers first: shared, mixed, or used by an `output`."""
    mixer: Shortcut | None  # whose weighted sum of `mixed` and the layer's own is the effective tensor
    mixed: tuple[Source, ...]

    @property
    def projects(self) -> bool:
        """Whether the layer has a projection of its own, of all heads or some."""
        return self.shared_source is None or self.own_heads > 0


@dataclass(kw_only=True)
class LayerWiring:
    """What one layer reads of others, and which of its tensors later layers read."""

    layer: int
    projections: dict[Projection, ProjectionWiring]
    joint: Shortcut | None  # defines the layer's softmaxes; None: one softmax over its own keys
    attended: dict[str, tuple[Source, ...]]
    """Layers whose rotated queries or keys (`rot_q`, `rot_k`) or values (`v`) these softmaxes read."""
    own_values: tuple[Shortcut, ...]  # change the layer's own values
    outputs: tuple[Shortcut, ...]  # add to the head outputs
    gates: tuple[Shortcut, ...]  # multiply them after that
    constants: dict[str, dict[str, float]]
    """Coefficients of `outputs` and of `joint`, by path (`output`, `pattern`) and by what they multiply."""
    stored: set[tuple[str, State]] = field(default_factory=set)  # of the layer's own, what later layers read

    def coefficients(self) -> dict[str, tuple[str, ...]]:
        """What the coefficients at each `attn.hook_<path>_mix` multiply, in their order: `first`, `source.2`, `table`, `own`."""
        mixed = {
            n: (*map(source_name, p.mixed), *(["own"] if p.projects else []))
            for n, p in self.projections.items()
            if p.mixer is not None
        }
        return mixed | {path: tuple(names) for path, names in self.constants.items() if names}

    def needs(self) -> list[tuple[str, int, State]]:
        """(tensor, layer, state) of everything read of earlier layers."""
        result: list[tuple[str, int, State]] = [
            (name, j, state)
            for name, projection in self.projections.items()
            for j, state in projection.sources.items()
            if isinstance(j, int)
        ]
        result += [(name, j, "cached") for name, layers in self.attended.items() for j in layers if isinstance(j, int)]
        if isinstance(j := self.projections["k"].shared_source, int):
            result.append(("rot_k", j, "cached"))  # which is rotated already
        return result


def wire(n_layers: int, shortcuts: Sequence[Shortcut]) -> list[LayerWiring]:
    """The wiring of every layer; raises `WorkbenchError` where shortcuts contradict each other."""
    layers = [_layer(layer, shortcuts) for layer in range(n_layers)]
    for reader in layers:
        for name, j, state in reader.needs():
            layers[j].stored.add((name, state))
    return layers


def _layer(layer: int, shortcuts: Sequence[Shortcut]) -> LayerWiring:
    joint = next((s for s in shortcuts if s.attends(layer)), None)
    attended = {name: joint.sources(name, layer) for name in ATTENDED} if joint else {}
    return LayerWiring(
        layer=layer,
        projections={name: _projection(name, layer, shortcuts, joint) for name in PROJECTIONS},
        joint=joint,
        attended={name: js for name, js in attended.items() if js},
        own_values=_using("own_value", shortcuts)[::-1],  # a held start holds what scales and gates have made of it
        outputs=_using("output", shortcuts),
        gates=_using("gate", shortcuts),
        constants={path: _constants(path, layer, shortcuts) for path in PATHS},
    )


def _using(seam: str, shortcuts: Sequence[Shortcut]) -> tuple[Shortcut, ...]:
    """Shortcuts that use a seam, in the order of their prefixes, however the model is named."""
    return tuple(sorted((s for s in shortcuts if overrides(s, seam)), key=lambda s: s.prefix))


def _constants(path: Path, layer: int, shortcuts: Sequence[Shortcut]) -> dict[str, float]:
    """Coefficients that shortcuts hold as numbers, by name; names must differ between the shortcuts of a model."""
    result: dict[str, float] = {}
    for shortcut in shortcuts:
        values = shortcut.constants(path, layer)
        if twice := sorted(result.keys() & values.keys()):
            taken = f"a coefficient of its {path} {twice[0]}"
            raise WorkbenchError(f"{shortcut.prefix}: another shortcut names {taken} too")
        result |= values
    return result


def _projection(
    name: Projection, layer: int, shortcuts: Sequence[Shortcut], joint: Shortcut | None
) -> ProjectionWiring:
    sharer = next((s for s in shortcuts if s.shared_source(name, layer) != layer), None)
    shared_source = None if sharer is None else sharer.shared_source(name, layer)
    others = [s for s in shortcuts if s is not joint]  # what that one reads, its softmaxes read
    wanted: dict[Source, State] = {} if shared_source is None else {shared_source: "effective"}
    mixer, mixed = None, tuple[Source, ...]()
    for shortcut in others:
        mixes = shortcut.mixes(name, layer)
        if mixes and sharer not in (None, shortcut):
            continue  # the layer has nothing of its own to mix
        read = shortcut.sources(name, layer)
        for j in read:
            if wanted.setdefault(j, shortcut.reads) != shortcut.reads and _is_mixed(name, j, layer, others):
                _refuse_two_states(name, j, layer, others)
        if mixes:
            mixer, mixed = shortcut, read
    order: list[Source] = [*sorted(j for j in wanted if isinstance(j, int)), *(j for j in wanted if isinstance(j, str))]
    sources = {j: wanted[j] for j in order}
    own_heads = 0 if sharer is None else sharer.own_heads(name, layer)
    return ProjectionWiring(shared_source=shared_source, own_heads=own_heads, sources=sources, mixer=mixer, mixed=mixed)


def source_name(source: Source) -> str:
    """A source as coefficients and value paths name it: `first`, `source.2`, `table`."""
    if isinstance(source, str):
        return "table"
    return "first" if source == 0 else f"source.{source}"


def _is_mixed(name: Projection, source: Source, layer: int, shortcuts: Sequence[Shortcut]) -> bool:
    """Whether a source attends with something else than what it projected."""
    if not isinstance(source, int) or source not in range(1, layer):
        return False
    shared = any(s.shared_source(name, source) != source for s in shortcuts)
    return not shared and any(s.mixes(name, source) for s in shortcuts)


def _refuse_two_states(name: Projection, source: Source, layer: int, shortcuts: Sequence[Shortcut]) -> None:
    readers = [s for s in shortcuts if source in (s.shared_source(name, layer), *s.sources(name, layer))]
    raise WorkbenchError(
        f"{' and '.join(s.prefix for s in readers)} cannot be combined: layer {layer} would read"
        f" {name} of layer {source} both before and after it is mixed"
    )
