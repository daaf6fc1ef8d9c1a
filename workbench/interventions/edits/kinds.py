"""Edits of a forward pass, as data: short texts for links and command lines, JSON for files, frozen objects for notebooks.

    coefficient:layer=3,source=first,value=0     set a coefficient that mixes values (or queries, keys, patterns, streams)
    values:layer=2..5,how=token_mean             replace values: zero, mean, token_mean, layer, prompt, shuffle
    sink:layer=3,head=1                          no attention to position 0; how=keep: only what it writes is gone
    remove:layer=4,part=mlp                      an attention or an MLP adds nothing to the stream
    patch:layer=2,site=v,position=5              activations of a second prompt, or of other positions (prompt=same)
    head:layer=1,head=0/2,how=mean               head outputs become zero, or their mean over the prompt

Numbers are lists: `3`, `2..5`, `0/2/7..9`, negative positions from the end; none means all. Several edits are joined by `;`.
To add a kind write its class (`base.Edit`) and name it in `KINDS`.

Order: edits of one tensor apply in the listed order; edits of different tensors in the order of the forward pass. A later
edit of one coefficient wins. A mean or a shuffle over positions, and a position from the end, is refused with padding and for
tokens that continue a cache; `generate` then runs without one. Observed models refuse every named position with padding.
Activations from other layers, positions or prompts come from the unedited model. Edits cost no T x T array, except sinks of
observed models, and `sink:how=keep` where a shortcut defines the attention. A cache without a filter rebuilds patterns from
queries and keys, so to see the pattern under an edited sink, name it (`names_filter`, or a hook).

Source: activation patching as in Meng et al. (2022), ROME, and Wang et al. (2023), IOI; zero and mean ablation as usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.hook_names import position_axis
from workbench.interventions.edits.base import (
    HEADS,
    Edit,
    Hook,
    Inputs,
    Numbers,
    mean_over_positions,
    one_of,
    site_points,
    split_options,
)
from workbench.interventions.edits.sink import Sink
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Values(Edit):
    """Values are replaced, of all heads or of some key-value heads.

    `site`: `v` (effective values, which the pattern multiplies and later layers reuse), `own_v` (own projection before mixing),
    `arriving` (values from other layers or a table). `how`: `zero`; `mean` over the positions of the prompt, later ones included;
    `token_mean` (by token id, from a table); `layer` (those of `from_layer` at this site); `prompt` (a second prompt's); `shuffle`
    (among positions, by `seed`). Other layers' and prompts' come from the unedited model.
    """

    kind = "values"
    presets: ClassVar[Mapping[str, str]] = {
        "how=zero": "drop the values (zero)", "how=mean": "replace values by their mean over the whole prompt",
        "how=token_mean": "replace values by the mean of their token", "how=shuffle": "shuffle values among positions",
        "how=layer,from_layer=0": "replace values by the first layer's",
        "how=prompt": "replace values by the second prompt's",
        "site=arriving,how=zero": "cut the value shortcut (what arrives from other layers)",
    }  # fmt: skip
    head: Numbers = ()
    how: str = one_of("zero", "mean", "token_mean", "layer", "prompt", "shuffle")
    site: str = one_of("v", "own_v", "arriving")
    from_layer: int = 0
    seed: int = 0

    def refuse(self) -> None:
        self.only_with("from_layer", "how", "layer")
        self.only_with("seed", "how", "shuffle")
        if self.from_layer < 0 or self.seed < 0:
            raise WorkbenchError(f"{self}: from_layer and seed are counted from 0")
        if self.how == "token_mean" and self.site == "arriving":
            raise WorkbenchError(f"{self}: there is no table of what arrives; choose site=v or site=own_v")

    @property
    def reads(self) -> set[str]:
        inputs = {"token_mean": {"prompt", "means"}, "layer": {"prompt"}, "prompt": {"prompt", "other"}}
        return inputs.get(self.how, set())

    def what(self, model: HookedModel) -> str:
        return "values that arrive from elsewhere" if self.site == "arriving" else self.site

    def check(self, model: HookedModel, inputs: Inputs) -> None:
        super().check(model, inputs)
        if "means" in self.reads:
            table = inputs.means.get(self.site)
            if table is None:
                raise BadData(f"{self} needs a table: means=token_means(model, {self.site!r}, batches of other tokens)")
            if len(table.counts) != model.config.d_vocab or set(self.layers(model)) - set(table.sums):
                raise BadData(f"{self}: the table of means is another model's; make one of this model")

    def prepare(self, model: HookedModel, layers: Sequence[int], inputs: Inputs) -> None:
        if self.how == "prompt":
            inputs.read(model, "other", [name for n in layers for name in self.points(model, n)])
        if self.how == "layer":
            inputs.read(model, "same", [self._read_from(model)])

    def _read_from(self, model: HookedModel) -> str:
        """Hook point of the values that `how=layer` puts elsewhere; what arrives is exchanged for effective values."""
        site = "v" if self.site == "arriving" else self.site
        Values(layer=(self.from_layer,), site=site).layers(model)  # refused by name
        return site_points(model, site, self.from_layer)[0]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        if self.how == "zero":
            return torch.zeros_like(tensor)
        if self.how == "mean":
            return mean_over_positions(tensor)
        if self.how == "shuffle":
            order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(self.seed))
            return tensor[:, order.to(tensor.device)]
        self.same_prompt(tensor, inputs)
        if self.how == "token_mean":
            table, tokens = inputs.means[self.site], inputs.tokens
            assert tokens is not None
            means = table.replacement(layer, tokens, "token_mean").to(tensor)
            return torch.where(table.seen(tokens)[..., None, None], means, tensor)
        read = ("same", self._read_from(model)) if self.how == "layer" else ("other", name)
        found = inputs.activations[read]
        return found.expand(len(tensor), *found.shape[1:])


PATHS = ("v", "output", "q", "k", "pattern", "stream")


@dataclass(frozen=True, kw_only=True)
class Coefficient(Edit):
    """A coefficient of the architecture's own is set to `value`, whether it is fixed, learned or computed.

    `path`: `v`, `q`, `k` (what mixes values, queries, keys), `output` (what is added to the attention's output: NeuTRENO, identity
    map), `pattern` (the attention-pattern residual), `stream` (averages of outputs); empty: the value path, which is `v` where values
    are mixed and `output` elsewhere. `source`: `own`, `first`, `source.2` (layer 2's), `table`, `earlier` (the identity map's mean),
    of streams `embed` and `block.2`; empty: all but the own. Token-dependent weights are set for all tokens.
    """

    kind = "coefficient"
    presets: ClassVar[Mapping[str, str]] = {
        "value=0": "set the shortcut's coefficient to 0",
        "path=stream,value=0": "set the weights of earlier outputs in the stream to 0",
    }
    source: str = ""
    path: str = field(default="", metadata={"choices": ("", "v", "q", "k", "output", "pattern", "stream")})
    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "source.0":
            object.__setattr__(self, "source", "first")

    def what(self, model: HookedModel) -> str:
        path = self._path(model)
        known = {name for n in range(model.config.n_layers) for name in sources_at(model, path, n)}
        refuse_unknown(f"source of the {path} coefficients of {model.architecture}", self.source, ("", *known))
        return f"coefficient of {path}" + (f" for {self.source}" if self.source else "")

    def _path(self, model: HookedModel) -> str:
        """The path it acts on; the value path where it names none."""
        if not isinstance(model, Transformer):
            raise BadData(f"{self}: the coefficients of an {type(model).__name__} model are not ours to set")
        has = [p for p in PATHS if any(sources_at(model, p, n) for n in range(model.config.n_layers))]
        if self.path in has:
            return self.path
        if not self.path and (value_paths := [p for p in ("v", "output") if p in has]):
            return value_paths[0]
        lacking = f"coefficient of {self.path}" if self.path else "coefficient of a value path"
        choices = f"it has path={' or '.join(has)}" if has else "it has none at all"
        raise WorkbenchError(f"{self}: {model.architecture} has no {lacking}; {choices}")

    def _places(self, model: HookedModel, layer: int) -> list[int]:
        """Which of a layer's coefficients it sets; without a source all but the own."""
        names = sources_at(model, self._path(model), layer)
        return [i for i, name in enumerate(names) if (name == self.source if self.source else name != "own")]

    def has(self, model: HookedModel, layer: int) -> bool:
        return bool(self._places(model, layer))

    def points(self, model: HookedModel, layer: int) -> list[str]:
        return [hook_of(model, self._path(model), layer)]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        weights = tensor.clone()
        weights[..., self._places(model, layer)] = self.value
        return weights


def hook_of(model: Any, path: str, layer: int) -> str:
    """Hook point that the coefficients of a path pass at a layer."""
    if path == "stream":
        return f"blocks.{layer}.hook_dwa_weights"
    return f"blocks.{layer}.attn.{model.blocks[layer].attn.weight_points[path]}"


def sources_at(model: Any, path: str, layer: int) -> Sequence[str]:
    """Names of the terms that a path's coefficients multiply at a layer, in order; empty if there are none."""
    if path == "stream":
        return model.residual.coefficients(layer)
    return model.blocks[layer].attn.coefficients.get(path, ())


@torch.no_grad()
def coefficients(model: Any) -> list[Coefficient]:
    """Every coefficient of a model that is one number for all tokens, as the edit that changes nothing."""
    targets = [(p, n) for p in PATHS for n in range(model.config.n_layers) if sources_at(model, p, n)]
    targets = [(p, n) for p, n in targets if position_axis(hook_of(model, p, n)) is None]
    weights: dict[str, Tensor] = {}
    points = [(hook_of(model, p, n), lambda x, hook: weights.update({hook.name: x.detach()})) for p, n in targets]
    with model.hooks(points):
        model(torch.zeros(1, 1, dtype=torch.long), return_type=None)
    return [
        Coefficient(layer=(layer,), source=source, path=path, value=float(str(value)))  # 0.4, not 0.4000000059
        for path, layer in targets
        for source, value in zip(
            sources_at(model, path, layer), weights[hook_of(model, path, layer)].cpu().numpy(), strict=True
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Remove(Edit):
    """An attention, an MLP or both add nothing to the stream."""

    kind = "remove"
    presets: ClassVar[Mapping[str, str]] = {"part=attention": "remove an attention", "part=mlp": "remove an MLP"}
    part: str = one_of("both", "attention", "mlp")

    def what(self, model: HookedModel) -> str:
        return "attention or MLP output"

    def points(self, model: HookedModel, layer: int) -> list[str]:
        outputs = {"attention": "hook_attn_out", "mlp": "hook_mlp_out"}
        return [f"blocks.{layer}.{hook}" for part, hook in outputs.items() if self.part in (part, "both")]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        return torch.zeros_like(tensor)


@dataclass(frozen=True, kw_only=True)
class Head(Edit):
    """The output of query heads, before W_O, becomes zero or its mean over the positions of the prompt."""

    kind = "head"
    presets: ClassVar[Mapping[str, str]] = {
        "how=mean": "replace a head's output by its mean",
        "": "silence a head (zero)",
    }
    head: Numbers = ()
    how: str = one_of("zero", "mean")

    @property
    def target(self) -> str:
        return "z"

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        return torch.zeros_like(tensor) if self.how == "zero" else mean_over_positions(tensor)


UNEQUAL = "{} positions to read for {} to set; give as many, or one"


@dataclass(frozen=True, kw_only=True)
class Patch(Edit):
    """Replace activations by those of a second prompt (`prompt=other`) or of other positions of the prompt (`same`).

    `site`: `stream` (input of block n; L: input of the final norm), `v`, `own_v`, `q`, `k` (before rotation), `z`,
    `attn_out`, `mlp_out`. `position` are set, from `from_position`: as many, one for all, or none for the same ones. Prompts
    of unequal length are aligned by naming positions. The activations come from the unedited model.
    """

    kind = "patch"
    presets: ClassVar[Mapping[str, str]] = {"site=stream": "patch the stream from the second prompt"}
    site: str = one_of("stream", "v", "own_v", "q", "k", "z", "attn_out", "mlp_out")
    head: Numbers = ()
    position: Numbers = ()
    prompt: str = one_of("other", "same")
    from_position: Numbers = ()

    def refuse(self) -> None:
        if self.prompt == "same" and not self.from_position:
            raise WorkbenchError(f"{self}: say from which positions, as from_position=3")
        if len(set(self.position)) < len(self.position):
            raise WorkbenchError(f"{self}: a position is named twice")
        if self.head and self.site not in HEADS:
            raise WorkbenchError(f"{self}: {self.site} has no heads; heads are told apart at v, own_v, q, k and z")
        if len(self.from_position) > 1 and self.position and len(self.from_position) != len(self.position):
            raise WorkbenchError(f"{self}: {UNEQUAL.format(len(self.from_position), len(self.position))}")

    @property
    def reads(self) -> set[str]:
        return {"prompt", "other"} if self.prompt == "other" else {"prompt"}

    def n_layers(self, model: HookedModel) -> int:
        return model.config.n_layers + (self.site == "stream")

    def check(self, model: HookedModel, inputs: Inputs) -> None:
        super().check(model, inputs)
        source = inputs.tokens if self.prompt == "same" else inputs.other
        assert source is not None
        self.in_reach(self.from_position, source)

    def prepare(self, model: HookedModel, layers: Sequence[int], inputs: Inputs) -> None:
        inputs.read(model, self.prompt, [name for n in layers for name in self.points(model, n)])

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        self.same_prompt(tensor, inputs)
        source = inputs.activations[self.prompt, name]
        length = tensor.shape[1]
        to = [p % length for p in self.position] or list(range(length))
        read = [p % source.shape[1] for p in self.from_position or self.position] or list(range(length))
        read = read * len(to) if len(read) == 1 else read
        if len(read) != len(to):
            raise BadData(f"{self}: {UNEQUAL.format(len(read), len(to))}")
        new = tensor.clone()
        new[:, to] = source[:, read].to(tensor)
        return new


KINDS: dict[str, type[Edit]] = {each.kind: each for each in (Values, Coefficient, Sink, Remove, Head, Patch)}
PRESETS: dict[str, str] = {
    f"{kind.kind}:{options}".rstrip(":"): words for kind in KINDS.values() for options, words in kind.presets.items()
}
"""Common edits as texts, in words."""
Given = Edit | str | Mapping[str, Any]


def parse(text: str) -> Edit:
    """One edit from `kind:key=value,key=value`; raises `UnknownName` and `WorkbenchError` with the choices."""
    return _made(*split_options(text))


def from_dict(given: Mapping[str, Any]) -> Edit:
    """The edit that `to_dict` wrote; raises as `parse`."""
    if "kind" not in given:
        raise WorkbenchError(f"an edit needs a kind: one of {', '.join(KINDS)}")
    return _made(given["kind"], {k: v for k, v in given.items() if k != "kind"})


def as_edits(given: Given | Iterable[Given]) -> list[Edit]:
    """Edits from one or several objects, dictionaries, or texts (`sink:layer=3;remove:layer=4,part=mlp`)."""
    if isinstance(given, str):
        return [parse(part) for part in given.split(";") if part.strip()]
    if isinstance(given, Edit):
        return [given]
    if isinstance(given, Mapping):
        return [from_dict(given)]
    return [edit for each in given for edit in as_edits(each)]


def _made(kind: Any, options: Mapping[str, Any]) -> Edit:
    refuse_unknown("edit", kind, KINDS)
    fields = {f.name: f for f in dataclasses.fields(KINDS[kind])}
    for key in options:
        refuse_unknown(f"option of {kind}", key, fields)
    for name, each in fields.items():
        if each.default is dataclasses.MISSING and name not in options:
            raise WorkbenchError(f"{kind} needs {name}, as {name}=0")
    return KINDS[kind](**options)


@contextmanager
def edited(
    model: HookedModel, edits: Given | Iterable[Given], *, tokens: Any = None, other: Any = None, means: Any = None
) -> Iterator[HookedModel]:
    """The model with all the edits (objects, dictionaries or texts) for as long as this is open; then it is as before.

    Args:
        tokens: the prompt, as ids [batch, pos], [pos] or text. Edits that read it need it (patches, token means, other
            layers' values), and then hold for runs on this prompt alone. Other edits hold for any run.
        other: a second prompt, for `patch` and `values:how=prompt`; one row, or as many as the prompt.
        means: a `TokenMeans` of `token_means`, or several by name, for `values:how=token_mean`.

    Raises, before anything changes: `UnknownName` and `WorkbenchError` for parts that the architecture lacks and for layers,
    heads and positions out of range, with the choices; `BadData` for missing prompts or tables, and unequal lengths.
    """
    inputs = Inputs.of(model, tokens, other, means)
    with applied(model, as_edits(edits), inputs):
        yield model


@contextmanager
def applied(model: HookedModel, edits: Sequence[Edit], inputs: Inputs) -> Iterator[None]:
    """Apply edits as `edited` does, and store their activations in `inputs` for the next call."""
    with model.lock, ExitStack() as stack:
        targets = [(edit, edit.layers(model)) for edit in edits]
        for edit, layers in targets:
            edit.check(model, inputs)
            edit.prepare(model, layers, inputs)
        before = model.mixes_positions
        stack.callback(lambda: setattr(model, "mixes_positions", before))
        counted = [edit for edit in edits if edit.mixes_positions or (model.foreign and getattr(edit, "position", ()))]
        # padding of observed models may come first, where no position of a prompt has its own number
        model.mixes_positions = next(map(str, counted), before)
        # the embedding's hook does nothing: with it a compiled model runs where hooks and other methods count
        hooks: list[Hook] = [("hook_embed", lambda x, hook: None)] if "hook_embed" in model.hook_dict else []
        # a renormalised sink wraps the others: what is written is left out inside, where it is seen what is forbidden
        for edit, layers in sorted(targets, key=lambda t: isinstance(t[0], Sink) and t[0].how == "renormalise"):
            for layer in layers:
                hooks += edit.apply(model, layer, inputs, stack)
        stack.enter_context(model.hooks(hooks))
        yield
