"""What was recognised in an observed module, where, and what was not: as a table and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from workbench.names import ACTIVATIONS, NULL, STATISTICS
from workbench.observing.interception.masks import CAUSAL
from workbench.observing.recognition.projections import Projection, TensorLocation
from workbench.observing.recognition.structure import UNLIMITED, DecoderStructure, LayerStructure
from workbench.observing.recognition.traced_attention import BY_HAND
from workbench.observing.recognition.value_paths import NEGLIGIBLE, Mixture, ValuePath

_NO_PROJECTION = (
    "no output in the block has its numbers: no value projection of its own, or values changed beyond recognition"
)
_NO_ROTATION = "no output in the block has its norms (a norm or factor after the projection)"
_NO_STREAM = "the block is no part of its own, and no part in it reads the stream (a norm that is a bare function)"
_NO_BLOCK = (
    "the part around the attention neither adds to what it reads nor returns what the next one reads: the stream is kept "
    "outside it (norms and additions there, several streams)"
)
_NO_ATTENTION = (
    "the block has no attention that can be read (a mixer of another kind, a custom kernel, a softmax by hand)"
)
_KINDS = {"fused": "fused", BY_HAND: "softmax by hand", "eager": "eager softmax"}
_CALLS = {"fused": "scaled dot product", BY_HAND: "softmax by hand", "eager": "softmax"}
_OTHER_MIXER = "in some blocks of a mixer that is no attention which can be read"
_NO_LOGITS = "the module returns no [batch, pos, d_vocab]: pass observe() a call= that does (a wrapped model's, its head's output)"
_NO_SUM = "no two outputs in the block add up to what it adds to the stream (scaled, normed or averaged)"
_NOT_MIXED = "not in these values"

Site = tuple[str, bool, str, str]
"""site, whether it was found, where, note"""


def site_table(structure: DecoderStructure, mixtures: Sequence[Mixture]) -> pd.DataFrame:
    """One row per activation of our vocabulary and layer: site, layer, found, where, note. `mixtures`: of each layer's values."""
    rows: list[tuple[Any, ...]] = [(None, *site) for site in _sites_of_ends(structure)]
    for i, layer in enumerate(structure.layers):
        rows += [(i, *site) for site in _sites_of_layer(layer, mixtures[i])]
    table = pd.DataFrame(rows, columns=["layer", "site", "found", "where", "note"])
    return table[["site", "layer", "found", "where", "note"]].astype({"layer": "Int64"})


def _sites_of_ends(structure: DecoderStructure) -> Iterator[Site]:
    found = structure.logits is not None
    yield "embed", *_place(structure.embed, "no table that reads the tokens")
    yield "stream final", *_place(structure.head, "no matrix after the blocks makes the logits")
    ending = structure.ending
    yield "final norm", *((False, "", ending) if isinstance(ending, str) else (True, ending.words, ""))
    yield "logits", found, *(("output", "") if found else ("", _NO_LOGITS))


def _sites_of_layer(layer: LayerStructure, mixture: Mixture) -> Iterator[Site]:
    attention = layer.attention
    places = dict.fromkeys(part.attention.within.name or "the module" for part in layer.parts)
    call = f"{' and '.join(dict.fromkeys(_CALLS[p.attention.kind] for p in layer.parts))} in {', '.join(places)}"
    inline = "the block is no part of its own: the stream can be read here, not replaced" if layer.inline else ""
    yield (
        "stream",
        layer.has_stream,
        layer.block,
        inline if layer.has_stream else _NO_STREAM if layer.inline else _NO_BLOCK,
    )
    if not layer.is_read:
        for site, location in (("attn_out", layer.attn_out), ("mlp_out", layer.mlp_out)):
            found, where, why = _place(location, _NO_ATTENTION)
            yield site, found, where, why or (_OTHER_MIXER if site == "attn_out" else "")
        missing = ("q", "k", "v", "own_v", "first_v", "z", "rot_q", "rot_k", "scores", "pattern")
        yield from ((site, False, "", _NO_ATTENTION) for site in (*missing, *STATISTICS))
        return
    yield "attn_out", *_place(layer.attn_out, _NO_SUM)
    yield "mlp_out", *_place(layer.mlp_out, _NO_SUM)
    yield "q", *_places([part.q for part in layer.parts], _NO_ROTATION)
    yield "k", *_places([part.k for part in layer.parts], _NO_ROTATION)
    repeats = attention.repeats
    yield "v", True, call, f"each key-value head is repeated {repeats} times" if repeats > 1 else ""
    yield "own_v", *_places([part.v for part in layer.parts], _NO_PROJECTION)
    if len(layer.parts) == 1 and layer.parts[0].latent is not None:
        yield "latent", *_place(layer.parts[0].latent, "")
    yield from _sites_of_mixture(mixture, call)
    yield from _sites_of_pattern(layer, call)


def _sites_of_mixture(mixture: Mixture, call: str) -> Iterator[Site]:
    """What is mixed into a layer's values."""
    sources, first = mixture.sources, 0 in mixture.sources
    why = "" if first else f"see source.{sources[0]}" if sources else _NOT_MIXED
    yield "first_v", first, call if first else "", why
    if mixture.table:
        yield "table_v", True, mixture.table, ""
    if mixture.by_token:
        yield "v_weights", True, call, ""


def _sites_of_pattern(layer: LayerStructure, call: str) -> Iterator[Site]:
    """What a layer's attention makes of its values, and its pattern."""
    attention = layer.attention
    no_w_o = "no matrix W_O found: the attention's own output"
    if layer.z is None and any(part.attention.is_combined for part in layer.parts):
        yield "z", False, "", "its attentions are combined before their values are taken, and no matrix W_O was found"
    else:
        yield "z", True, *((layer.z.module, layer.changed) if layer.z else (call, no_w_o))
    masked = "" if attention.mask == CAUSAL else attention.mask
    why = attention.note or (f"masked: {masked}; not rebuilt from q and k" if masked else "")
    for site in ("rot_q", "rot_k"):
        yield site, attention.pattern_from_qk, *((call, "") if attention.pattern_from_qk else ("", why))
    for site in ("scores", "pattern", *STATISTICS):
        if site == "scores" and "attn_scores" not in attention.squares and attention.has_statistics:
            yield site, False, "", "the softmax is written out: its scores are no tensor of their own"
            continue
        found = attention.has_statistics
        yield site, found, *((call, masked or attention.note) if found else ("", why))
    if attention.has_null:
        yield NULL, NULL in attention.statistics, call, ""


def _places(locations: Sequence[TensorLocation | None], missing: str) -> tuple[bool, str, str]:
    """Where the same of several attentions passes; not found where one of them is not."""
    found = [location for location in locations if location is not None]
    if len(found) < len(locations):
        return False, "", missing
    return True, ", ".join(dict.fromkeys(_place(location, "")[1] for location in found)), ""


def _place(location: TensorLocation | None, missing: str) -> tuple[bool, str, str]:
    if location is None:
        return False, "", missing
    if isinstance(location, Projection):
        columns = location.columns
        span = f"{columns.start}:{columns.stop}" if isinstance(columns, slice) else f"{len(columns)} columns"
        return True, f"{location.module}[{span}]", ""
    return True, location.module, ""


def missing_hooks(table: pd.DataFrame) -> dict[str, str]:
    """Hook points that were not found, and why, for the error that names one."""
    missing = table[~table["found"] & table["site"].isin(list(ACTIVATIONS))]
    rows = zip(missing["site"], missing["layer"], missing["note"], strict=True)
    hooks = [(ACTIVATIONS[str(site)].hook, layer, str(note)) for site, layer, note in rows]
    return {hook.format(layer=layer): note for hook, layer, note in hooks if hook}


def describe(
    name: str, structure: DecoderStructure, table: pd.DataFrame, paths: Sequence[ValuePath], notes: Sequence[str]
) -> str:
    """What was found and what not, in lines; `name`: of the module and its architecture, `table`: its sites."""
    config, layers = structure.config, structure.layers
    predicted = structure.predicted if structure.predicted not in (0, config.d_vocab) else ""
    context = "unknown context" if config.n_ctx == UNLIMITED else f"n_ctx {config.n_ctx}"
    lines = [
        f"{name}, {config.n_layers} layers, {config.n_heads} heads of {config.d_head} ({config.n_key_value_heads} key-value), "
        f"d_model {config.d_model}, d_vocab {config.d_vocab}{predicted and f' ({predicted} logits)'}, {context}",
        f"  blocks {layers[0].block} .. {layers[-1].block}; attention: {_attention_kinds(layers)}",
    ]
    for found, word in ((True, "found"), (False, "not found")):
        told = (table["found"] == found) & (
            table["note"] != _NO_ATTENTION
        )  # of those blocks a note names what they are
        by_site = table[told].groupby("site", sort=False)["layer"].apply(list)
        sites = [
            f"{site}{'' if found and len(of) == config.n_layers else _layer_list(of)}" for site, of in by_site.items()
        ]
        lines.append(f"  {word}: {', '.join(sites) or 'nothing'}")
    for note in dict.fromkeys(n for n in table["note"] if n not in ("", _NOT_MIXED, _NO_ATTENTION)):
        lines.append(f"  {', '.join(dict.fromkeys(table[table['note'] == note]['site']))}: {note}")
    return "\n".join([*lines, *_path_lines(paths), *(f"  {note}" for note in notes)])


def _path_lines(paths: Sequence[ValuePath]) -> Iterator[str]:
    if streams := [p for p in paths if p.into == "stream"]:
        which = ", ".join(str(p.layer) for p in streams)
        weights = "weights by token" if any(p.by_token for p in streams) else "constant weights"
        yield f"  streams {which} are sums of what was made earlier ({weights}; see value_paths())"
    for path in (p for p in paths if p.into != "stream"):
        shown = {s: c for s, c in path.coefficients.items() if abs(c) > NEGLIGIBLE or not path.exact}
        if set(shown) - {"own"} or path.into == "output" or path.by_token or not path.exact:
            spreads = {s: f" ± {x:.2g}" for s, x in path.spread.items()}
            each = (
                f"{c:.7g}{spreads.get(s, '')} {s if isinstance(s, str) else f'layer {s}'}" for s, c in shown.items()
            )
            how = " by token" if path.by_token else ", then a norm" if path.is_normed else ""
            terms = (" + ".join(each) or "?") + how
            head = "" if path.head is None else f" head {path.head}"
            yield f"  layer {path.layer}{head} {path.into} = {terms} (residual {path.residual:.1e})"


def _attention_kinds(layers: list[LayerStructure]) -> str:
    """Kinds and masks of all attentions, and how many stand in a block."""
    each = {len(layer.parts) for layer in layers if layer.is_read} - {1}
    kinds = {
        f"{_KINDS[a.kind]}, {a.mask}{'' if a.exact or a.has_null else ', not reproduced'}"
        for a in (part.attention for layer in layers for part in layer.parts)
    }
    many = [f"{' or '.join(map(str, sorted(each)))} in a block (attn.0, attn.1, ...)"] if each else []
    return "; ".join([*sorted(kinds), *many]) or "none"


def _layer_list(layers: list[Any]) -> str:
    known = [str(x) for x in layers if not pd.isna(x)]
    return f" (layers {', '.join(known)})" if known else ""
