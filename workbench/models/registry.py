"""The registry of architectures: label, colour, symbol, summary, options and shortcuts of each, and of combinations `a+b`.

To add an architecture write `architectures/<file>.py` with its shortcut, and an entry here. Commands, figures, the
dashboard, the documentation and the tests read both. Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.errors import UnknownName
from workbench.places import load_plugins

if TYPE_CHECKING:
    from workbench.models.shortcut import Shortcut

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "x", "cross", "star", "bowtie")
CONTROL = " (control)"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named list of shortcuts with its texts and its style in figures."""

    label: str  # its name in its paper; a control's name ends in ` (control)`
    colour: str  # colour of its curves, `#RRGGBB`
    symbol: str  # marker of its curves, one of `SYMBOLS`; equal markers need colours that colour-blind readers can distinguish
    summary: str
    plain: str  # the summary for readers who know no formula
    classes: tuple[str, ...] = ()
    """Its shortcuts as `file.Class` of the folder `architectures`, or as `package.module.Class` of another package."""
    constants: Mapping[str, Any] = field(default_factory=dict)  # published options unlike the shortcuts' defaults
    neutral: Mapping[str, Any] | None = None  # options that make it the vanilla decoder; None if there are none
    value_path: bool = False  # whether it has a value path; an X-ray then does not suggest one

    @property
    def shortcuts(self) -> tuple[type[Shortcut], ...]:
        """The shortcuts' classes, imported on access."""
        ours = "workbench.models.architectures."
        places = [
            place.rpartition(".") if "." in place.partition(".")[2] else (ours + place).rpartition(".")
            for place in self.classes
        ]
        return tuple(getattr(importlib.import_module(module), name) for module, _, name in places)

    @property
    def options(self) -> dict[str, Any]:
        return {k: v for shortcut in self.shortcuts for k, v in options_of(shortcut).items()} | dict(self.constants)


def options_of(shortcut: type[Shortcut]) -> dict[str, Any]:
    """Return a shortcut's options with their defaults: the keywords of its constructor."""
    parameters = inspect.signature(shortcut).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _together(name: str, constants: Mapping[str, Any] | None = None, **own: str) -> Architecture:
    """Return the combination `a+b` of registered architectures; `own` and `constants` override the derived fields."""
    parts = [ARCHITECTURES[part] for part in name.split("+")]
    neutral: dict[str, Any] | None = {}
    for part in parts:
        neutral = None if neutral is None or part.neutral is None else neutral | dict(part.neutral)
    by_rule: dict[str, Any] = {
        "label": " + ".join(part.label.removesuffix(CONTROL) for part in parts),
        "colour": f"hsl({_hash(name) % 360},55%,48%)",
        "symbol": SYMBOLS[_hash(name) % len(SYMBOLS)],
        "summary": " and ".join(part.summary for part in parts),
        "plain": "; ".join(part.plain for part in parts),
    }
    return Architecture(
        **by_rule | own,
        classes=tuple(c for part in parts for c in part.classes),
        constants={k: v for part in parts for k, v in part.constants.items()} | dict(constants or {}),
        neutral=neutral,
        value_path=any(part.value_path for part in parts),
    )


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:4], 16)


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture(label="Transformer", colour="#0072B2", symbol="circle",
        summary="the vanilla decoder", plain="the ordinary model, no shortcut", neutral={}),
    "resformer": Architecture(label="ResFormer", colour="#D55E00", symbol="square",
        summary="values mixed with the first layer's, half and half",
        plain="each layer mixes its own values half and half with the first layer's",
        classes=("resformer.ResFormer",), neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_constant": Architecture(label="ResFormer constant (2, 1)", colour="#B03A00", symbol="cross",
        summary="the first layer's values twice, own values once",
        plain="as ResFormer, with the first layer's values counted twice",
        classes=("resformer.ResFormer",), constants={"lambda_v1": 2.0, "lambda_own": 1.0},
        neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_learnable": Architecture(label="ResFormer learnable", colour="#F0793A", symbol="circle",
        summary="a trained pair of coefficients for each layer",
        plain="as ResFormer, and training finds how much of each",
        classes=("resformer_learnable.LearnableResFormer",),
        neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_learnable_plus": Architecture(label="ResFormer Learnable-Plus", colour="#8D2F07", symbol="circle",
        summary="trained coefficients that share one total over the layers",
        plain="as ResFormer, and the layers compete for one trained total",
        classes=("resformer_learnable.PlusResFormer",),
        neutral={"plus_scale_init": 0, "lambda_own": 1}, value_path=True),
    "resformer_sparse": Architecture(label="ResFormer sparse", colour="#E59B7A", symbol="triangle-up",
        summary="the first layer's values in the last layers alone",
        plain="only the last layers mix in the first layer's values, and strongly",
        classes=("resformer.ResFormer",), constants={"lambda_v1": 5.0, "lambda_own": 1.0, "layers": "late"},
        neutral={"layers": []}, value_path=True),
    "resformer_dense": Architecture(label="ResFormer dense", colour="#E8443A", symbol="x",
        summary="trained sums of all earlier layers' values",
        plain="each layer adds up the values of all layers before it, in trained amounts",
        classes=("resformer_dense.DenseResFormer",), neutral={"lambda_source": 0, "lambda_own": 1}, value_path=True),
    "svformer": Architecture(label="SVFormer", colour="#009E73", symbol="diamond",
        summary="every layer attends to the first layer's values",
        plain="each layer uses the first layer's values and has none of its own",
        classes=("svformer.SVFormer",), neutral={"refresh_every": 1}, value_path=True),
    "neutreno": Architecture(label="NeuTRENO", colour="#56B4E9", symbol="triangle-up",
        summary="attention output pulled toward the first layer's values",
        plain="each layer's attention output is pulled towards the first layer's values",
        classes=("neutreno.NeuTRENO",), neutral={"neutreno_lambda": 0}, value_path=True),
    "denseformer": Architecture(label="DenseFormer", colour="#E69F00", symbol="triangle-down",
        summary="blocks read weighted averages of all earlier outputs",
        plain="each layer reads a learned average of all earlier layers, not values in particular",
        classes=("denseformer.DenseFormer",), neutral={}),
    "attention_residuals": Architecture(label="Attention Residuals", colour="#C9A227", symbol="x",
        summary="attention and MLP read a softmax over all earlier outputs",
        plain="each step chooses for each token which earlier steps to read, instead of their sum",
        classes=("attention_residuals.AttentionResiduals",)),
    "hyper_connections": Architecture(label="hyper-connections", colour="#5C7CFA", symbol="square",
        summary="four residual streams with trained weights by token",
        plain="four notebooks in place of one are passed on, and each step learns which to read and write",
        classes=("hyper_connections.HyperConnections",), neutral={"dynamic": False}),
    "mhc": Architecture(label="mHC", colour="#364FC7", symbol="triangle-up",
        summary="four residual streams, mixed without growth (doubly stochastic)",
        plain="as hyper-connections, and what is passed on is only ever shared out, never made more or less",
        classes=("mhc.ManifoldHyperConnections",)),
    "gqa": Architecture(label="GQA2", colour="#1F9E9E", symbol="bowtie",
        summary="pairs of query heads read one key-value head",
        plain="two heads share each set of keys and values, to save memory",
        classes=("gqa.GQA",), neutral={"query_group": 1}),
    "mqa": Architecture(label="MQA", colour="#0B6B75", symbol="bowtie",
        summary="all query heads read one key-value head",
        plain="all heads share one set of keys and values, to save memory",
        classes=("gqa.GQA",), constants={"query_group": "all"}, neutral={"query_group": 1}),
    "cla": Architecture(label="CLA2", colour="#5AA469", symbol="cross",
        summary="pairs of layers share keys and values",
        plain="every second layer uses the keys and values of the layer before it, to save memory",
        classes=("sharing.Sharing",), neutral={"group": 1}),
    "share_q": Architecture(label="shared queries (control)", colour="#99AEC9", symbol="triangle-down",
        summary="control: pairs of layers share queries",
        plain="a control: every second layer uses the *queries* of the layer before it",
        classes=("sharing.Sharing",), constants={"share": "q"}, neutral={"group": 1}),
    "share_k": Architecture(label="shared keys (control)", colour="#74A9CF", symbol="circle",
        summary="control: pairs of layers share keys",
        plain="a control: every second layer uses the *keys* of the layer before it",
        classes=("sharing.Sharing",), constants={"share": "k"}, neutral={"group": 1}),
    "share_v": Architecture(label="shared values (control)", colour="#2B8CBE", symbol="star",
        summary="control: pairs of layers share values",
        plain="a control: every second layer uses the *values* of the layer before it",
        classes=("sharing.Sharing",), constants={"share": "v"}, neutral={"group": 1}),
    "cross_layer": Architecture(label="cross-layer attention", colour="#7B5EA7", symbol="diamond",
        summary="queries also see the previous layer's keys and values",
        plain="each layer also attends to the keys and values of the layer before it, at twice the work",
        classes=("cross_layer.CrossLayer",), value_path=True),
    "cross_layer_all": Architecture(label="cross-layer attention, all", colour="#54447F", symbol="triangle-down",
        summary="queries also see every earlier layer's keys and values",
        plain="each layer also attends to the keys and values of all layers before it",
        classes=("cross_layer.CrossLayer",), constants={"source": "all"}, value_path=True),
    "same_key": Architecture(label="same-key averaging", colour="#A98BD4", symbol="cross",
        summary="values averaged over all layers so far: cross-layer attention with own keys",
        plain="each layer averages the values of all layers so far",
        classes=("same_key.SameKey",), neutral={"same_key_weight": 0}, value_path=True),
    "identity_map": Architecture(label="identity mapping (control)", colour="#B7A3D1", symbol="square",
        summary="control: earlier values added past the attention pattern",
        plain="a control: earlier layers' values are added at their own place, past the attention",
        classes=("identity_map.IdentityMap",), neutral={"identity_scale": 0}, value_path=True),
    "residual_q": Architecture(label="query residual (control)", colour="#D79ABA", symbol="diamond",
        summary="control: queries mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the *queries*, which ask",
        classes=("residual.QueryResidual",), neutral={"lambda_q1": 0, "lambda_q_own": 1}),
    "residual_k": Architecture(label="key residual (control)", colour="#CC79A7", symbol="x",
        summary="control: keys mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the *keys*, which decide where attention goes",
        classes=("residual.KeyResidual",), neutral={"lambda_k1": 0, "lambda_k_own": 1}),
    "residual_attention": Architecture(label="attention-pattern residual (control)", colour="#AA4488", symbol="triangle-up",
        summary="control: attention patterns mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the attention *weights*",
        classes=("residual_attention.AttentionResidual",), neutral={"lambda_a1": 0, "lambda_a_own": 1}),
    "residual_hidden": Architecture(label="hidden residual (control)", colour="#852966", symbol="x",
        summary="control: the embedding added to every block's input",
        plain="a control: the bare tokens are added again to what each layer reads",
        classes=("residual_hidden.HiddenResidual",), neutral={"lambda_h1": 0, "lambda_h_own": 1}),
    "value_embedding": Architecture(label="value embeddings", colour="#B5651D", symbol="triangle-down",
        summary="values by token id mixed into the first and last layers",
        plain="the first and last layers add a learned value for each token",
        classes=("value_embedding.ValueEmbedding",), neutral={"lambda_table": 0, "lambda_own": 1}, value_path=True),
    "bank_of_values": Architecture(label="Bank of Values", colour="#7A4A1E", symbol="star",
        summary="the last layers look their values up by token id",
        plain="the last layers look their values up in a table, one for each token",
        classes=("bank_of_values.BankOfValues",), neutral={"bank_layers": []}, value_path=True),
    "sandwich_norm": Architecture(label="sandwich norm", colour="#4E6E58", symbol="circle",
        summary="what attention and MLP put out is normed too", plain="what each step adds is brought to one size first",
        classes=("norm_placement.NormPlacement",), neutral={"norms": "pre"}),
    "post_norm": Architecture(label="output norm + QK norm", colour="#2F8F5B", symbol="square",
        summary="attention and MLP read the stream itself; outputs, queries and keys are normed",
        plain="what each step adds is brought to one size, and what it reads is not",
        classes=("norm_placement.NormPlacement",), constants={"norms": "post"}, neutral={"norms": "pre"}),
    "dyt": Architecture(label="DyT", colour="#A3B18A", symbol="bowtie",
        summary="a scaled tanh of each element in place of the norms",
        plain="what each step reads is squashed number by number, not brought to one size",
        classes=("norm_placement.NormPlacement",), constants={"norms": "dyt"}, neutral={"norms": "pre"}),
    "gated_attention": Architecture(label="gated attention", colour="#6F7F8F", symbol="square",
        summary="a sigmoid gate on the attention output",
        plain="each layer decides from its input how much of its attention output to let through",
        classes=("gated_attention.GatedAttention",)),
    "exclusive_attention": Architecture(label="exclusive attention (XSA)", colour="#3B4CC0", symbol="star",
        summary="head outputs without what they say along the token's own value",
        plain="each head's output keeps nothing of what the token itself carries, only what it brings from elsewhere",
        classes=("exclusive_attention.ExclusiveAttention",), neutral={"gated": True}),
    "value_scale": Architecture(label="V-scale", colour="#7D5BA6", symbol="square",
        summary="values shortened by their own length, short ones most",
        plain="each head's value is made shorter, small ones most of all, so that they cannot pull hard on what made them",
        classes=("value_scale.ValueScale",), neutral={"scale_start": 0}),
    "value_gate": Architecture(label="value gate (VGA)", colour="#5B7065", symbol="triangle-up",
        summary="values times a gate that is read off them",
        plain="each token's value says itself how much of it is passed on",
        classes=("value_gate.KeySideGate",)),
    "value_gate_query": Architecture(label="value gate, query side", colour="#8FA39A", symbol="cross",
        summary="head outputs times a gate that is read off the token's own values",
        plain="each token's own value says how much of what its heads bring is let through",
        classes=("value_gate.QuerySideGate",)),
    "satformer": Architecture(label="SATFormer", colour="#C2185B", symbol="star",
        summary="the first layer's values added by a gate for each token",
        plain="each layer adds the first layer's values, as much of them as each token asks for",
        classes=("satformer.SATFormer",), neutral={"layers": []}, value_path=True),
    "skip_v1": Architecture(label="SkipV1Former", colour="#00A37A", symbol="triangle-down",
        summary="half of the heads use the first layer's values",
        plain="in each layer half of the heads use the first layer's values and have none of their own, to save memory",
        classes=("skip_v1.SkipV1",), neutral={"skip_heads": 0}, value_path=True),
    "gated_value_embedding": Architecture(label="gated value embeddings", colour="#D98E48", symbol="square",
        summary="values by token id added in every second layer by a gate for each token",
        plain="every second layer adds a learned value for each token, as much of it as the text around it asks for",
        classes=("gated_value_embedding.GatedValueEmbedding",), neutral={"gate_scale": 0}, value_path=True),
    "sink_logit": Architecture(label="sink logits", colour="#006D77", symbol="triangle-down",
        summary="one more column in each softmax, which is no token",
        plain="each head may attend to nothing at all, so it needs no token to rest on",
        classes=("sink_logit.SinkLogit",)),
    "held_start": Architecture(label="held start value (control)", colour="#8C6D8C", symbol="cross",
        summary="control: the first position's value held at zero, or at a norm",
        plain="a control: what the first token passes on is nothing, or always of one size, so it cannot shrink in training",
        classes=("held_start.HeldStart",), neutral={"start_norm": "free"}),
    "values_scaled": Architecture(label="halved values (control)", colour="#9C6B30", symbol="bowtie",
        summary="control: own values times a constant in every later layer",
        plain="a control: later layers' values are halved as in ResFormer, and nothing of the first layer is added",
        classes=("values_scaled.ValuesScaled",), neutral={"value_factor": 1.0}),
    "first_layer_shuffled": Architecture(label="shuffled first layer (control)", colour="#9A3412", symbol="diamond",
        summary="control: values mixed with the first layer's of another sequence in the batch",
        plain="a control: ResFormer's mix, but with the first layer's values of another text",
        classes=("first_layer_shuffled.FirstLayerShuffled",), neutral={"lambda_other": 0, "lambda_own": 1}, value_path=True),
    "cut_skip": Architecture(label="first skip cut (control)", colour="#454F5A", symbol="cross",
        summary="control: the first block without its skip connection",
        plain="a control: nothing passes by the first layer, so only the shortcut could carry the bare tokens",
        classes=("cut_skip.CutSkip",), neutral={"cut": "none"}),
}  # fmt: skip
ARCHITECTURES |= {
    "resformer+neutreno": _together("resformer+neutreno", colour="#8F8500", symbol="bowtie",
        summary="both, with the published weaker pull",
        plain="the mixed values of ResFormer and the pull of NeuTRENO together", constants={"neutreno_lambda": 0.2}),
    "resformer+denseformer": _together("resformer+denseformer", colour="#B8860B", symbol="star",
        summary="both: values from the first block, inputs averaged",
        plain="the mixed values of ResFormer and the averages of DenseFormer together"),
    "svformer+gqa": _together("svformer+gqa", label="SVFormer + GQA4", colour="#63BC9F", symbol="square",
        summary="shared values, and four query heads for each key-value head",
        plain="the first layer's values everywhere, and four heads share each set of keys and values",
        constants={"query_group": 4}),
    "svformer+cla": _together("svformer+cla", colour="#05593F", symbol="diamond",
        summary="shared values, and keys shared by pairs of layers",
        plain="the first layer's values everywhere, and pairs of layers share their keys", constants={"share": "k"}),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """Return the registered architecture or the combination `a+b` of registered ones; raise `UnknownName` for others."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    parts = name.split("+") if isinstance(name, str) else [name]
    for part in parts:
        if part not in ARCHITECTURES:
            raise UnknownName("architecture", part, ARCHITECTURES)
    constants: dict[str, Any] = {}
    for known, a in ARCHITECTURES.items():  # options published for a combination hold in any order
        if "+" in known and set(known.split("+")) <= set(parts):
            constants |= a.constants
    return _together(name, constants)


def architecture_label(name: str) -> str:
    """Return an architecture's name in its paper, followed by the options after it; other names are returned unchanged."""
    first, space, options = name.partition(" ")
    known = all(part in ARCHITECTURES for part in first.split("+"))
    return architecture(first).label + space + options if known else name


def architecture_colour(name: str) -> str:
    """Return an architecture's colour; other names get a colour from their hash."""
    return ARCHITECTURES[name].colour if name in ARCHITECTURES else f"hsl({_hash(name) % 360},55%,48%)"


def architecture_symbol(name: str) -> str:
    """Return the marker of an architecture's curves; other names get one from their hash."""
    return ARCHITECTURES[name].symbol if name in ARCHITECTURES else SYMBOLS[_hash(name) % len(SYMBOLS)]


load_plugins("architectures")
