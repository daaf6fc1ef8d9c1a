"""Where an edit acts, and what must be given for it: refused by name before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions.ablation import branches
from workbench.interventions.cutting import square_hook
from workbench.interventions.edits import Coefficient, Edit, Head, Numbers, Patch, Remove, Sink, Values
from workbench.interventions.mixing import indices, path_of, sources_at
from workbench.interventions.values import TokenMeans
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer
from workbench.names import ACTIVATIONS, stream_hook

Held = dict[tuple[str, str], Tensor]
"""Activations of unedited runs: (`same` or `other`, hook point) -> tensor."""
HEADS = {"v": "kv", "own_v": "kv", "k": "kv", "arriving": "kv", "q": "query", "z": "query"}


@dataclass
class Inputs:
    """What edits read beside the running model: the prompt [batch, pos], a second one, tables of means by site."""

    tokens: Tensor | None = None
    other: Tensor | None = None
    means: Mapping[str, TokenMeans] = field(default_factory=dict)
    held: Held = field(default_factory=dict)

    @classmethod
    def of(cls, model: HookedModel, tokens: Any, other: Any, means: Any) -> Inputs:
        """From ids or text, and a table or several."""
        tables = [means] if isinstance(means, TokenMeans) else list((means or {}).values())
        ids, second = (None if x is None else model.to_tokens(x) for x in (tokens, other))
        return cls(ids, second, {table.site: table for table in tables})


def layers_of(model: HookedModel, edit: Edit) -> list[int]:
    """The layers an edit changes: those it names, or all that have what it changes.

    Raises `WorkbenchError` where the architecture lacks it at a layer that is named, or at all.
    """
    n_layers = model.config.n_layers + (isinstance(edit, Patch) and edit.site == "stream")
    if beyond := [n for n in edit.layer if n >= n_layers]:
        raise WorkbenchError(f"{edit}: layer {beyond[0]} is beyond 0..{n_layers - 1}; nearest {n_layers - 1}")
    what, having = _having(model, edit, range(n_layers))
    if not having:
        raise WorkbenchError(f"{edit}: {model.architecture} has no {what}")
    if lacking := [n for n in edit.layer if n not in having]:
        raise WorkbenchError(
            f"{edit}: {model.architecture} has no {what} at layer {lacking[0]}; it has at {', '.join(map(str, having))}"
        )
    return list(edit.layer) or having


def _having(model: HookedModel, edit: Edit, layers: range) -> tuple[str, list[int]]:
    """What an edit changes, in words, and the layers that have it."""
    if isinstance(edit, Coefficient) and not isinstance(model, Transformer):
        raise BadData(f"{edit}: the coefficients of an {type(model).__name__} model are not ours to set")
    if isinstance(edit, Coefficient):
        path = path_of(model, edit)
        found = {n: sources_at(model, path, n) for n in layers}
        known = {name for names in found.values() for name in names}
        if edit.source and known and edit.source not in known:
            raise UnknownName(f"source of the {path} coefficients of {model.architecture}", edit.source, known)
        what = f"coefficient of {path}" + (f" for {edit.source}" if edit.source else "")
        return what, [n for n, names in found.items() if indices(edit.source, names)]
    if isinstance(edit, Sink):
        ours = isinstance(model, Transformer)
        return "attention to cut", [n for n in layers if ours or square_hook(edit, n) in model.hook_dict]
    if isinstance(edit, Values) and edit.site == "arriving":
        return "values that arrive from elsewhere", sorted(branches(model))
    site = getattr(edit, "site", {Remove: "attention or MLP output", Head: "z"}.get(type(edit), ""))
    return site, [n for n in layers if all(name in model.hook_dict for name in names_at(model, edit, n))]


def names_at(model: HookedModel, edit: Edit, layer: int) -> list[str]:
    """Hook points an edit uses at a layer."""
    if isinstance(edit, Remove):
        parts = [p for p in ("attention", "mlp") if edit.part in (p, "both")]
        return [f"blocks.{layer}.hook_{'attn' if part == 'attention' else 'mlp'}_out" for part in parts]
    site = edit.site if isinstance(edit, Values | Patch) else "z"
    if site == "arriving":
        return branches(model)[layer]
    if site == "stream":
        return [stream_hook(layer, model.config.n_layers)]
    return [ACTIVATIONS[site].hook.format(layer=layer)]


def n_heads_of(model: HookedModel, edit: Edit) -> int:
    """How many heads an edit can tell apart, 0 where it has none: key-value heads for keys and values."""
    if isinstance(edit, Sink | Head):
        return model.config.n_heads
    kind = HEADS.get(getattr(edit, "site", ""))
    return {"kv": model.config.n_key_value_heads, "query": model.config.n_heads, None: 0}[kind]


def check(model: HookedModel, edit: Edit, inputs: Inputs) -> None:
    """Raise where heads or positions are beyond the model and the prompts, or what the edit reads is missing."""
    count = n_heads_of(model, edit)
    if beyond := [h for h in getattr(edit, "head", ()) if h >= count]:
        kind = "key-value head" if getattr(edit, "site", "z") in ("v", "own_v", "k", "arriving") else "head"
        raise WorkbenchError(f"{edit}: {kind} {beyond[0]} is beyond 0..{count - 1}; nearest {count - 1}")
    reads = isinstance(edit, Patch) or (isinstance(edit, Values) and edit.how in ("token_mean", "layer", "prompt"))
    if reads and inputs.tokens is None:
        raise BadData(f"{edit} reads the prompt: give it as tokens=...")
    if (isinstance(edit, Patch) and edit.prompt == "other") or getattr(edit, "how", "") == "prompt":
        _check_other(edit, inputs)
    if inputs.tokens is not None:
        _in_reach(edit, getattr(edit, "position", ()), inputs.tokens)
    if isinstance(edit, Patch):
        source = inputs.tokens if edit.prompt == "same" else inputs.other
        assert source is not None
        _in_reach(edit, edit.from_position, source)
    if isinstance(edit, Values) and edit.how == "token_mean":
        table = inputs.means.get(edit.site)
        if table is None:
            raise BadData(f"{edit} needs a table: means=token_means(model, {edit.site!r}, batches of other tokens)")
        if len(table.counts) != model.config.d_vocab or set(layers_of(model, edit)) - set(table.sums):
            raise BadData(f"{edit}: the table of means is another model's; make one of this model")


def _check_other(edit: Edit, inputs: Inputs) -> None:
    assert inputs.tokens is not None
    if inputs.other is None:
        raise BadData(f"{edit} reads a second prompt: give it as other=...")
    (rows, length), (others, other) = inputs.tokens.shape, inputs.other.shape
    if others not in (1, rows):
        raise BadData(f"{edit}: {others} second prompts for {rows} prompts; give one, or as many")
    if length != other and not getattr(edit, "position", ()):
        how = "name positions, or cut one" if isinstance(edit, Patch) else "cut one"
        raise BadData(f"{edit}: the prompts have {length} and {other} tokens; {how}")


def _in_reach(edit: Edit, positions: Numbers, ids: Tensor) -> None:
    length = ids.shape[1]
    if beyond := [p for p in positions if not -length <= p < length]:
        near = length - 1 if beyond[0] > 0 else -length
        raise BadData(f"{edit}: position {beyond[0]} is beyond the {length} tokens; nearest {near}")
