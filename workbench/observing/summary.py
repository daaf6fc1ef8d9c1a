"""Summary of an observed module: a table of the activations found, with places and reasons, and a description in lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from torch import nn

from workbench.hook_names import ACTIVATIONS, NULL, STATISTICS
from workbench.observing.interception.masks import CAUSAL
from workbench.observing.recognition.attention_calls import BY_HAND
from workbench.observing.recognition.decoder_structure import (
    UNLIMITED,
    DecoderStructure,
    LayerStructure,
    Projection,
    TensorLocation,
)
from workbench.observing.recognition.routers import ROUTING, Router
from workbench.observing.recognition.value_paths import NEGLIGIBLE, Mixture, ValuePath

_NO_PROJECTION = (
    "no output in the block has its numbers: no value projection of its own, or values changed beyond recognition"
)
_NO_ROTATION = "no output in the block has its norms (a norm or factor after the projection)"
_NO_STREAM = "the block is no module, and no module in it reads the stream (a norm that is a bare function)"
_NO_BLOCK = (
    "the part around the attention neither adds to its input nor returns the next one's input: the stream is kept "
    "outside it (norms and additions there, several streams)"
)
_NO_ATTENTION = (
    "the block has no attention that can be read (a mixer of another kind, a custom kernel, a softmax by hand)"
)
_KINDS = {"fused": "fused", BY_HAND: "softmax by hand", "eager": "eager softmax"}
_CALLS = {"fused": "scaled dot product", BY_HAND: "softmax by hand", "eager": "softmax"}
_NO_LOGITS = "the module returns no [batch, pos, d_vocab]: pass observe() a call= that does (a wrapped model's, its head's output)"
_NO_SUM = "no two outputs in the block add up to what it adds to the stream (scaled, normed or averaged)"
_NOT_MIXED = "not in these values"

Site = tuple[str, bool, str, str]
"""site, whether it was found, where, note"""


def site_table(structure: DecoderStructure, mixtures: Sequence[Mixture]) -> pd.DataFrame:
    """Return one row per activation and layer: site, layer, found, where, note; `mixtures` has the sources of values by layer."""
    has_logits, ending = structure.logits is not None, structure.ending
    ends: list[Site] = [
        ("embed", *_place(structure.embed, "no table that reads the tokens")),
        ("stream final", *_place(structure.head, "no matrix after the blocks makes the logits")),
        ("final norm", *((False, "", ending) if isinstance(ending, str) else (True, ending.words, ""))),
        ("logits", has_logits, *(("output", "") if has_logits else ("", _NO_LOGITS))),
    ]
    rows: list[tuple[Any, ...]] = [(None, *site) for site in ends]
    for i, layer in enumerate(structure.layers):
        rows += [(i, *site) for site in _sites_of_layer(layer, mixtures[i])]
    table = pd.DataFrame(rows, columns=["layer", "site", "found", "where", "note"])
    return table[["site", "layer", "found", "where", "note"]].astype({"layer": "Int64"})


def _sites_of_layer(layer: LayerStructure, mixture: Mixture) -> Iterator[Site]:
    attention, parts = layer.attention, layer.parts
    inline = "the block is no module: the stream can be read here, not replaced" if layer.inline else ""
    lost = _NO_STREAM if layer.inline else _NO_BLOCK
    yield "stream", layer.has_stream, layer.block, inline if layer.has_stream else lost
    if layer.router is not None:
        shown: tuple[str, ...] = ()
        where, why = "", str(layer.router)
        if isinstance(layer.router, Router):
            shown, where, why = layer.router.sites, layer.router.module, layer.router.words
        for site in ROUTING:
            yield site, site in shown, where if site in shown else "", why
    if not layer.is_read:
        found, where, why = _place(layer.attn_out, _NO_ATTENTION)
        yield "attn_out", found, where, why or "in some blocks of a mixer that is no readable attention"
        yield "mlp_out", *_place(layer.mlp_out, _NO_ATTENTION)
        missing = ("q", "k", "v", "own_v", "first_v", "z", "rot_q", "rot_k", "scores", "pattern")
        yield from ((site, False, "", _NO_ATTENTION) for site in (*missing, *STATISTICS))
        return
    modules = dict.fromkeys(part.attention.within.name or "the module" for part in parts)
    call = f"{' and '.join(dict.fromkeys(_CALLS[p.attention.kind] for p in parts))} in {', '.join(modules)}"
    yield "attn_out", *_place(layer.attn_out, _NO_SUM)
    yield "mlp_out", *_place(layer.mlp_out, _NO_SUM)
    yield "q", *_places([part.q for part in parts], _NO_ROTATION)
    yield "k", *_places([part.k for part in parts], _NO_ROTATION)
    repeats = attention.repeats
    yield "v", True, call, f"each key-value head is repeated {repeats} times" if repeats > 1 else ""
    yield "own_v", *_places([part.v for part in parts], _NO_PROJECTION)
    if len(parts) == 1 and parts[0].latent is not None:
        yield "latent", *_place(parts[0].latent, "")
    sources, first = mixture.sources, 0 in mixture.sources
    elsewhere = f"see source.{sources[0]}" if sources else _NOT_MIXED
    yield "first_v", first, *((call, "") if first else ("", elsewhere))
    if mixture.table:
        yield "table_v", True, mixture.table, ""
    if mixture.by_token:
        yield "v_weights", True, call, ""
    if layer.z is None and any(part.attention.is_combined for part in parts):
        yield "z", False, "", "its attentions are combined before their values are taken, and no matrix W_O was found"
    elif layer.z is None:
        yield "z", True, call, "no matrix W_O found: the attention's own output"
    else:
        yield "z", True, layer.z.module, layer.changed
    masked = "" if attention.mask == CAUSAL else attention.mask
    why = attention.note or (f"masked: {masked}; not rebuilt from q and k" if masked else "")
    for site in ("rot_q", "rot_k"):
        yield site, attention.pattern_from_qk, *((call, "") if attention.pattern_from_qk else ("", why))
    for site in ("scores", "pattern", *STATISTICS):
        if not attention.has_statistics:
            yield site, False, "", why
        elif site == "scores" and "attn_scores" not in attention.squares:
            yield site, False, "", "the softmax is by hand: its scores are no tensor of their own"
        else:
            yield site, True, call, masked or attention.note
    if attention.has_null:
        yield NULL, NULL in attention.statistics, call, ""


def _places(locations: Sequence[TensorLocation | None], missing: str) -> tuple[bool, str, str]:
    """Return where the projections of all attentions of a layer pass; not found if one is missing."""
    known = [location for location in locations if location is not None]
    if len(known) < len(locations):
        return False, "", missing
    return True, ", ".join(dict.fromkeys(_place(location, "")[1] for location in known)), ""


def _place(location: TensorLocation | None, missing: str) -> tuple[bool, str, str]:
    if location is None:
        return False, "", missing
    if isinstance(location, Projection):
        columns = location.columns
        span = f"{columns.start}:{columns.stop}" if isinstance(columns, slice) else f"{len(columns)} columns"
        return True, f"{location.module}[{span}]", ""
    return True, location.module, ""


def missing_hooks(table: pd.DataFrame) -> dict[str, str]:
    """Return the hook points that were not found, with the reasons."""
    missing = table[~table["found"] & table["site"].isin(list(ACTIVATIONS))]
    rows = zip(missing["site"], missing["layer"], missing["note"], strict=True)
    hooks = [(ACTIVATIONS[str(site)].hook, layer, str(note)) for site, layer, note in rows]
    return {hook.format(layer=layer): note for hook, layer, note in hooks if hook}


def coverage(module: nn.Module, structure: DecoderStructure) -> str:
    """Return in a line which share of a module's layers, attention and parameters has hook points, and which parts have none."""
    layers, parameters = structure.layers, dict(module.named_parameters())
    inside = {name for layer in layers for name in (layer.inline or (layer.block,))}
    ends = {end.module for end in (structure.embed, structure.head) if end is not None}
    ends |= {structure.embed.parameter} if structure.embed is not None else set()
    stacks = {layer.block.rpartition(".")[0] for layer in layers if not layer.inline}
    attentions = {layer.scope.module for layer in layers if layer.scope is not None} - inside
    total, experts, outside = 0, 0, Counter[str]()
    for name, parameter in parameters.items():
        total += (size := parameter.numel())
        if place := _longest_part(name, inside | ends):
            is_fused = place in inside and parameter.ndim == 3 and not _longest_part(name, attentions)
            experts += size if is_fused else 0  # an attention's are its projections
            continue
        stack = _longest_part(name, stacks)
        number = name.removeprefix(f"{stack}.").partition(".")[0]
        is_block = bool(stack) and number.isdecimal()
        outside[f"{stack}.{number}, which did not run" if is_block else name.removesuffix(".weight")] += size
    read, unread = [layer for layer in layers if layer.is_read], [str(i) for i, x in enumerate(layers) if not x.is_read]
    streamed, total = sum(layer.attention.has_statistics for layer in read), max(total, 1)
    parts = [
        f"Coverage: attention of {len(read)} of {len(layers)} layers, its statistics in {streamed}",
        f"no readable attention in {', '.join(unread)}" if unread else "",
        f"{1 - outside.total() / total:.1%} of {total:,} parameters are in observed blocks, the embedding or the head",
        f"{experts / total:.1%} are fused 3-D weights (experts), seen only through their layer's output"
        if experts
        else "",
    ]
    large = [f"{name} ({n / total:.1%})" for name, n in outside.most_common(3) if n >= 0.001 * total]
    parts.append(f"outside: {', '.join(large)}" if large else "")
    return f"{'; '.join(filter(None, parts))}."


def _longest_part(name: str, prefixes: Iterable[str]) -> str:
    """Return the longest of the module names that a parameter's name begins with; empty without one."""
    return max((p for p in prefixes if p and (name == p or name.startswith(f"{p}."))), key=len, default="")


def describe(
    name: str, structure: DecoderStructure, table: pd.DataFrame, paths: Sequence[ValuePath], notes: Sequence[str]
) -> str:
    """Describe an observed module in lines, from its name with its architecture and the table of its sites."""
    config, layers = structure.config, structure.layers
    predicted = structure.predicted if structure.predicted not in (0, config.d_vocab) else ""
    context = "unknown context" if config.n_ctx == UNLIMITED else f"n_ctx {config.n_ctx}"
    attentions = [part.attention for layer in layers for part in layer.parts]
    kinds = sorted(
        {f"{_KINDS[a.kind]}, {a.mask}{'' if a.exact or a.has_null else ', not reproduced'}" for a in attentions}
    )
    if counts := {len(layer.parts) for layer in layers if layer.is_read} - {1}:
        kinds.append(f"{' or '.join(map(str, sorted(counts)))} in a block (attn.0, attn.1, ...)")
    lines = [
        f"{name}, {config.n_layers} layers, {config.n_heads} heads of {config.d_head} ({config.n_key_value_heads} key-value), "
        f"d_model {config.d_model}, d_vocab {config.d_vocab}{predicted and f' ({predicted} logits)'}, {context}",
        f"  blocks {layers[0].block} .. {layers[-1].block}; attention: {'; '.join(kinds) or 'none'}",
    ]
    for found, word in ((True, "found"), (False, "not found")):
        shown = (table["found"] == found) & (table["note"] != _NO_ATTENTION)  # a note names blocks without attention
        sites = []
        for site, of in table[shown].groupby("site", sort=False)["layer"].apply(list).items():
            known = [] if found and len(of) == config.n_layers else [str(x) for x in of if not pd.isna(x)]
            sites.append(f"{site} (layers {', '.join(known)})" if known else str(site))
        lines.append(f"  {word}: {', '.join(sites) or 'nothing'}")
    for note in dict.fromkeys(n for n in table["note"] if n not in ("", _NOT_MIXED, _NO_ATTENTION)):
        lines.append(f"  {', '.join(dict.fromkeys(table[table['note'] == note]['site']))}: {note}")
    if streams := [p for p in paths if p.into == "stream"]:
        which = ", ".join(str(p.layer) for p in streams)
        weights = "weights by token" if any(p.by_token for p in streams) else "constant weights"
        lines.append(f"  streams {which} are sums of earlier streams or outputs ({weights}; see value_paths())")
    for path in (p for p in paths if p.into != "stream"):
        terms = {s: c for s, c in path.coefficients.items() if abs(c) > NEGLIGIBLE or not path.exact}
        if set(terms) - {"own"} or path.into == "output" or path.by_token or not path.exact:
            spreads = {s: f" ± {x:.2g}" for s, x in path.spread.items()}
            each = (
                f"{c:.7g}{spreads.get(s, '')} {s if isinstance(s, str) else f'layer {s}'}" for s, c in terms.items()
            )
            how = " by token" if path.by_token else ", then a norm" if path.is_normed else ""
            head = "" if path.head is None else f" head {path.head}"
            total = (" + ".join(each) or "?") + how
            lines.append(f"  layer {path.layer}{head} {path.into} = {total} (residual {path.residual:.1e})")
    return "\n".join([*lines, *(f"  {note}" for note in notes)])
