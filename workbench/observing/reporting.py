"""What was found in an observed module, where, and what not, as a table and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.names import ACTIVATIONS, STATISTICS
from workbench.observing.anatomy import UNLIMITED, Layer
from workbench.observing.masks import CAUSAL
from workbench.observing.paths import SEEN
from workbench.observing.projections import Projection, Tap

if TYPE_CHECKING:
    from workbench.observing.observed import Observed

_NO_OWN = "no output in the block has its numbers: no value projection of its own, or values changed beyond recognition"
_NO_TURN = "no output in the block has its norms (a norm or factor after the projection)"
_NO_STREAM = "the block is no part of its own, and no part in it reads the stream (a norm that is a bare function)"
_NO_SUM = "no two outputs in the block add up to what it adds to the stream (scaled, normed or averaged)"


def sites(observed: Observed) -> pd.DataFrame:
    """One row per activation of our vocabulary and layer: site, layer, found, where, note."""
    rows = [*_ends(observed)]
    for i, layer in enumerate(observed.anatomy.layers):
        rows += [{"site": site, "layer": i, "found": found, "where": where, "note": note}
                 for site, found, where, note in _of_layer(observed, i, layer)]  # fmt: skip
    return pd.DataFrame(rows, columns=["site", "layer", "found", "where", "note"]).astype({"layer": "Int64"})


def _ends(observed: Observed) -> Iterator[dict[str, Any]]:
    anatomy = observed.anatomy
    for site, tap, missing in (
        ("embed", anatomy.embed, "no table that reads the tokens"),
        ("stream final", anatomy.head, "no matrix after the blocks makes the logits"),
    ):
        note = "" if tap is not None else missing
        yield {"site": site, "layer": None, "found": tap is not None, "where": tap.module if tap else "", "note": note}
    found = anatomy.logits is not None
    note = "" if found else "the module returns no [batch, pos, d_vocab]"
    yield {"site": "logits", "layer": None, "found": found, "where": "output" if found else "", "note": note}


def _of_layer(observed: Observed, i: int, layer: Layer) -> Iterator[tuple[str, bool, str, str]]:
    attention = layer.attention
    call = (
        f"{'scaled dot product' if attention.kind == 'fused' else 'softmax'} in {attention.within.name or 'the module'}"
    )
    masked = "" if attention.mask == CAUSAL else attention.mask
    loose = "the block is no part of its own: the stream can be read here, not replaced" if layer.loose else ""
    yield "stream", layer.streams, layer.block, loose if layer.streams else _NO_STREAM
    for site, missing in (("attn_out", _NO_SUM), ("mlp_out", _NO_SUM)):
        yield site, *_tap(getattr(layer, site), missing)
    for site, missing in (("q", _NO_TURN), ("k", _NO_TURN)):
        yield site, *_tap(getattr(layer, site), missing)
    repeated = f"each key-value head is repeated {attention.repeats} times" if attention.repeats > 1 else ""
    yield "v", True, call, repeated
    yield "own_v", *_tap(layer.v, _NO_OWN)
    sources = observed.mixing(i)
    alone = sources == (0,)
    why = "" if alone else f"not alone: see source.{sources[0]}" if sources else "not in these values"
    yield "first_v", alone, call if alone else "", why
    yield (
        "z",
        True,
        layer.z.module if layer.z else call,
        "" if layer.z else "no matrix W_O found: the attention's own output",
    )
    why = attention.note or (f"masked: {masked}; not rebuilt from q and k" if masked else "")
    for site in ("rot_q", "rot_k"):
        yield site, layer.bilinear, call if layer.bilinear else "", "" if layer.bilinear else why
    for site in ("scores", "pattern", *STATISTICS):
        yield (
            site,
            layer.statistics,
            call if layer.statistics else "",
            (masked or attention.note) if layer.statistics else why,
        )


def absences(observed: Observed) -> dict[str, str]:
    """Hook points that were not found, and why, for whoever names one."""
    table = sites(observed)
    lacking = table[~table["found"] & table["site"].isin(list(ACTIVATIONS))]
    rows = zip(lacking["site"], lacking["layer"], lacking["note"], strict=True)
    known = [(ACTIVATIONS[str(site)].hook, layer, str(note)) for site, layer, note in rows]
    return {hook.format(layer=layer): note for hook, layer, note in known if hook}


def _tap(tap: Tap | None, missing: str) -> tuple[bool, str, str]:
    if tap is None:
        return False, "", missing
    if isinstance(tap, Projection):
        columns = tap.columns
        span = f"{columns.start}:{columns.stop}" if isinstance(columns, slice) else f"{len(columns)} columns"
        return True, f"{tap.module}[{span}]", ""
    return True, tap.module, ""


def summary(observed: Observed) -> str:
    """What was found and what not, in lines."""
    config, layers = observed.config, observed.anatomy.layers
    context = "unknown context" if config.n_ctx == UNLIMITED else f"n_ctx {config.n_ctx}"
    lines = [
        f"{type(observed.foreign).__name__}: {observed.architecture}, {config.n_layers} layers, {config.n_heads} heads of "
        f"{config.d_head} ({config.n_key_value_heads} key-value), d_model {config.d_model}, d_vocab {config.d_vocab}, {context}",
        f"  blocks {layers[0].block} .. {layers[-1].block}; attention: {_kinds(layers)}",
    ]
    table = observed.sites
    for found, word in ((True, "found"), (False, "not found")):
        rows = table[table["found"] == found]
        each = rows.groupby("site", sort=False)["layer"].apply(list)
        names = [str(s) if len(of) in (1, config.n_layers) and found else f"{s}{_layers(of)}" for s, of in each.items()]
        lines.append(f"  {word}: {', '.join(names) or 'nothing'}")
    for note in dict.fromkeys(n for n in table["note"] if n and n != "not in these values"):
        where = table[table["note"] == note]
        lines.append(f"  {', '.join(dict.fromkeys(where['site']))}: {note}")
    for path in observed.fits:
        named = {s: c for s, c in path.coefficients.items() if abs(c) > SEEN or not path.exact}
        if set(named) - {"own"} or path.into == "output" or not path.exact:
            terms = " + ".join(f"{c:.7g} {s if isinstance(s, str) else f'layer {s}'}" for s, c in named.items())
            head = "" if path.head is None else f" head {path.head}"
            lines.append(f"  layer {path.layer}{head} {path.into} = {terms} (residual {path.residual:.1e})")
    return "\n".join([*lines, *(f"  {note}" for note in observed.notes)])


def _kinds(layers: list[Layer]) -> str:
    words = {
        f"{'fused' if a.kind == 'fused' else 'eager softmax'}, {a.mask}{'' if a.exact else ', not reproduced'}"
        for a in (layer.attention for layer in layers)
    }
    return "; ".join(sorted(words))


def _layers(found: list[Any]) -> str:
    known = [str(x) for x in found if not pd.isna(x)]
    return f" (layers {', '.join(known)})" if known else ""
