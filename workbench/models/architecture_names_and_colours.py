"""The registry of architectures: label, colour, symbol, summary, options and shortcuts of each, and of combinations `a+b`.

To add an architecture write `architectures/<file>.py` with its shortcut, and an entry here. Commands, figures, the
dashboard, the documentation and the tests read both. Importing this module does not import torch.
"""

from __future__ import annotations

import colorsys
import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.errors import refuse_unknown
from workbench.places import load_plugins

if TYPE_CHECKING:
    from workbench.models.shortcut import Shortcut

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "x", "cross", "star", "bowtie")
CONTROL = " (control)"
LUMINANCES = (0.1275, 0.2916)
"""Darkest and lightest colour of a line: 3:1 contrast on a white page and on a dark one (#171614), as WCAG 1.4.11 asks of marks."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named list of shortcuts with its texts and its style in figures."""

    label: str  # its name in its paper; a control's name ends in ` (control)`
    colour: str  # colour of its curves, `#RRGGBB`; 3:1 contrast on a light and on a dark page
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
        "colour": colour_of(_hash(name) % 360 / 360),
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


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour `#RRGGBB`, as WCAG 2 defines it: 0 for black, 1 for white."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(share * p for share, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def colour_of(hue: float, brightness: float = 0.2, saturation: float = 0.55) -> str:
    """Return the colour `#RRGGBB` of a hue (0 to 1) and saturation with this relative luminance."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        colour = "#" + "".join(f"{round(255 * part):02X}" for part in colorsys.hls_to_rgb(hue % 1, middle, saturation))
        low, high = (low, middle) if luminance(colour) > brightness else (middle, high)
    return colour


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:4], 16)


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture(label="Transformer", colour="#0072B2", symbol="circle",
        summary="the vanilla decoder", plain="the ordinary model, no shortcut", neutral={}),
    "resformer": Architecture(label="ResFormer", colour="#CC5700", symbol="square",
        summary="values mixed with the first layer's, half and half",
        plain="each layer mixes its own values half and half with the first layer's",
        classes=("resformer.ResFormer",), neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_constant": Architecture(label="ResFormer constant (2, 1)", colour="#C02A0A", symbol="cross",
        summary="the first layer's values twice, own values once",
        plain="as ResFormer, with the first layer's values counted twice",
        classes=("resformer.ResFormer",), constants={"lambda_v1": 2.0, "lambda_own": 1.0},
        neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_learnable": Architecture(label="ResFormer learnable", colour="#F26A1B", symbol="circle",
        summary="a trained pair of coefficients for each layer",
        plain="as ResFormer, and training finds how much of each",
        classes=("resformer_learnable.LearnableResFormer",),
        neutral={"lambda_v1": 0, "lambda_own": 1}, value_path=True),
    "resformer_learnable_plus": Architecture(label="ResFormer Learnable-Plus", colour="#B33A04", symbol="circle",
        summary="trained coefficients that share one total over the layers",
        plain="as ResFormer, and the layers compete for one trained total",
        classes=("resformer_learnable.PlusResFormer",),
        neutral={"plus_scale_init": 0, "lambda_own": 1}, value_path=True),
    "resformer_sparse": Architecture(label="ResFormer sparse", colour="#D97B5D", symbol="triangle-up",
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
    "neutreno": Architecture(label="NeuTRENO", colour="#0497FC", symbol="triangle-up",
        summary="attention output pulled toward the first layer's values",
        plain="each layer's attention output is pulled towards the first layer's values",
        classes=("neutreno.NeuTRENO",), neutral={"neutreno_lambda": 0}, value_path=True),
    "denseformer": Architecture(label="DenseFormer", colour="#C18A00", symbol="triangle-down",
        summary="blocks read weighted averages of all earlier outputs",
        plain="each layer reads a learned average of all earlier layers, not values in particular",
        classes=("denseformer.DenseFormer",), neutral={}),
    "attention_residuals": Architecture(label="Attention Residuals", colour="#A58600", symbol="triangle-up",
        summary="attention and MLP read a softmax over all earlier outputs",
        plain="each step chooses for each token which earlier steps to read, instead of their sum",
        classes=("attention_residuals.AttentionResiduals",)),
    "hyper_connections": Architecture(label="hyper-connections", colour="#5C7CFA", symbol="square",
        summary="four residual streams with trained weights by token",
        plain="four notebooks in place of one are passed on, and each step learns which to read and write",
        classes=("hyper_connections.HyperConnections",), neutral={"dynamic": False}),
    "mhc": Architecture(label="mHC", colour="#3F5AE0", symbol="triangle-up",
        summary="four residual streams, mixed without growth (doubly stochastic)",
        plain="as hyper-connections, and what is passed on is only ever shared out, never made more or less",
        classes=("mhc.ManifoldHyperConnections",)),
    "gqa": Architecture(label="GQA2", colour="#1F9E9E", symbol="bowtie",
        summary="pairs of query heads read one key-value head",
        plain="two heads share each set of keys and values, to save memory",
        classes=("gqa.GQA",), neutral={"query_group": 1}),
    "mqa": Architecture(label="MQA", colour="#116E78", symbol="bowtie",
        summary="all query heads read one key-value head",
        plain="all heads share one set of keys and values, to save memory",
        classes=("gqa.GQA",), constants={"query_group": "all"}, neutral={"query_group": 1}),
    "cla": Architecture(label="CLA2", colour="#5AA469", symbol="cross",
        summary="pairs of layers share keys and values",
        plain="every second layer uses the keys and values of the layer before it, to save memory",
        classes=("sharing.Sharing",), neutral={"group": 1}),
    "share_q": Architecture(label="shared queries (control)", colour="#8790C4", symbol="triangle-down",
        summary="control: pairs of layers share queries",
        plain="a control: every second layer uses the *queries* of the layer before it",
        classes=("sharing.Sharing",), constants={"share": "q"}, neutral={"group": 1}),
    "share_k": Architecture(label="shared keys (control)", colour="#7996A9", symbol="circle",
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
    "cross_layer_all": Architecture(label="cross-layer attention, all", colour="#6D53B4", symbol="triangle-down",
        summary="queries also see every earlier layer's keys and values",
        plain="each layer also attends to the keys and values of all layers before it",
        classes=("cross_layer.CrossLayer",), constants={"source": "all"}, value_path=True),
    "same_key": Architecture(label="same-key averaging", colour="#B17CE7", symbol="cross",
        summary="values averaged over all layers so far: cross-layer attention with own keys",
        plain="each layer averages the values of all layers so far",
        classes=("same_key.SameKey",), neutral={"same_key_weight": 0}, value_path=True),
    "identity_map": Architecture(label="identity mapping (control)", colour="#A286D5", symbol="square",
        summary="control: earlier values added past the attention pattern",
        plain="a control: earlier layers' values are added at their own place, past the attention",
        classes=("identity_map.IdentityMap",), neutral={"identity_scale": 0}, value_path=True),
    "residual_q": Architecture(label="query residual (control)", colour="#C67FA6", symbol="diamond",
        summary="control: queries mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the *queries*, which ask",
        classes=("residual.QueryResidual",), neutral={"lambda_q1": 0, "lambda_q_own": 1}),
    "residual_k": Architecture(label="key residual (control)", colour="#9030F0", symbol="x",
        summary="control: keys mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the *keys*, which decide where attention goes",
        classes=("residual.KeyResidual",), neutral={"lambda_k1": 0, "lambda_k_own": 1}),
    "residual_attention": Architecture(label="attention-pattern residual (control)", colour="#AA4488", symbol="triangle-up",
        summary="control: attention patterns mixed with the first layer's",
        plain="a control: ResFormer's shortcut on the attention *weights*",
        classes=("residual_attention.AttentionResidual",), neutral={"lambda_a1": 0, "lambda_a_own": 1}),
    "residual_hidden": Architecture(label="hidden residual (control)", colour="#9D3E93", symbol="x",
        summary="control: the embedding added to every block's input",
        plain="a control: the bare tokens are added again to what each layer reads",
        classes=("residual_hidden.HiddenResidual",), neutral={"lambda_h1": 0, "lambda_h_own": 1}),
    "value_embedding": Architecture(label="value embeddings", colour="#B5651D", symbol="triangle-down",
        summary="values by token id mixed into the first and last layers",
        plain="the first and last layers add a learned value for each token",
        classes=("value_embedding.ValueEmbedding",), neutral={"lambda_table": 0, "lambda_own": 1}, value_path=True),
    "bank_of_values": Architecture(label="Bank of Values", colour="#865B37", symbol="triangle-down",
        summary="the last layers look their values up by token id",
        plain="the last layers look their values up in a table, one for each token",
        classes=("bank_of_values.BankOfValues",), neutral={"bank_layers": []}, value_path=True),
    "sandwich_norm": Architecture(label="sandwich norm", colour="#4E6E58", symbol="circle",
        summary="what attention and MLP put out is normed too", plain="what each step adds is brought to one size first",
        classes=("norm_placement.NormPlacement",), neutral={"norms": "pre"}),
    "post_norm": Architecture(label="output norm + QK norm", colour="#1C7A48", symbol="square",
        summary="attention and MLP read the stream itself; outputs, queries and keys are normed",
        plain="what each step adds is brought to one size, and what it reads is not",
        classes=("norm_placement.NormPlacement",), constants={"norms": "post"}, neutral={"norms": "pre"}),
    "dyt": Architecture(label="DyT", colour="#849A5C", symbol="bowtie",
        summary="a scaled tanh of each element in place of the norms",
        plain="what each step reads is squashed number by number, not brought to one size",
        classes=("norm_placement.NormPlacement",), constants={"norms": "dyt"}, neutral={"norms": "pre"}),
    "gated_attention": Architecture(label="gated attention", colour="#5C656C", symbol="square",
        summary="a sigmoid gate on the attention output",
        plain="each layer decides from its input how much of its attention output to let through",
        classes=("gated_attention.GatedAttention",)),
    "exclusive_attention": Architecture(label="exclusive attention (XSA)", colour="#4554D9", symbol="star",
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
    "value_gate_query": Architecture(label="value gate, query side", colour="#82958C", symbol="cross",
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
    "gated_value_embedding": Architecture(label="gated value embeddings", colour="#CF8145", symbol="square",
        summary="values by token id added in every second layer by a gate for each token",
        plain="every second layer adds a learned value for each token, as much of it as the text around it asks for",
        classes=("gated_value_embedding.GatedValueEmbedding",), neutral={"gate_scale": 0}, value_path=True),
    "sink_logit": Architecture(label="sink logits", colour="#046F79", symbol="triangle-down",
        summary="one more column in each softmax, which is no token",
        plain="each head may attend to nothing at all, so it needs no token to rest on",
        classes=("sink_logit.SinkLogit",)),
    "held_start": Architecture(label="held start value (control)", colour="#8C6D8C", symbol="star",
        summary="control: the first position's value held at zero, or at a norm",
        plain="a control: what the first token passes on is nothing, or always of one size, so it cannot shrink in training",
        classes=("held_start.HeldStart",), neutral={"start_norm": "free"}),
    "values_scaled": Architecture(label="halved values (control)", colour="#915606", symbol="bowtie",
        summary="control: own values times a constant in every later layer",
        plain="a control: later layers' values are halved as in ResFormer, and nothing of the first layer is added",
        classes=("values_scaled.ValuesScaled",), neutral={"value_factor": 1.0}),
    "first_layer_shuffled": Architecture(label="shuffled first layer (control)", colour="#A8452F", symbol="diamond",
        summary="control: values mixed with the first layer's of another sequence in the batch",
        plain="a control: ResFormer's mix, but with the first layer's values of another text",
        classes=("first_layer_shuffled.FirstLayerShuffled",), neutral={"lambda_other": 0, "lambda_own": 1}, value_path=True),
    "cut_skip": Architecture(label="first skip cut (control)", colour="#596573", symbol="cross",
        summary="control: the first block without its skip connection",
        plain="a control: nothing passes by the first layer, so only the shortcut could carry the bare tokens",
        classes=("cut_skip.CutSkip",), neutral={"cut": "none"}),
}  # fmt: skip
ARCHITECTURES |= {
    "resformer+neutreno": _together("resformer+neutreno", colour="#8F8500", symbol="diamond",
        summary="both, with the published weaker pull",
        plain="the mixed values of ResFormer and the pull of NeuTRENO together", constants={"neutreno_lambda": 0.2}),
    "resformer+denseformer": _together("resformer+denseformer", colour="#9B7200", symbol="star",
        summary="both: values from the first block, inputs averaged",
        plain="the mixed values of ResFormer and the averages of DenseFormer together"),
    "svformer+gqa": _together("svformer+gqa", label="SVFormer + GQA4", colour="#59A18A", symbol="square",
        summary="shared values, and four query heads for each key-value head",
        plain="the first layer's values everywhere, and four heads share each set of keys and values",
        constants={"query_group": 4}),
    "svformer+cla": _together("svformer+cla", colour="#21705A", symbol="diamond",
        summary="shared values, and keys shared by pairs of layers",
        plain="the first layer's values everywhere, and pairs of layers share their keys", constants={"share": "k"}),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """Return the registered architecture or the combination `a+b` of registered ones; raise `UnknownName` for others."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    parts = name.split("+") if isinstance(name, str) else [name]
    for part in parts:
        refuse_unknown("architecture", part, ARCHITECTURES)
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
    return ARCHITECTURES[name].colour if name in ARCHITECTURES else colour_of(_hash(name) % 360 / 360)


def architecture_symbol(name: str) -> str:
    """Return the marker of an architecture's curves; other names get one from their hash."""
    return ARCHITECTURES[name].symbol if name in ARCHITECTURES else SYMBOLS[_hash(name) % len(SYMBOLS)]


load_plugins("architectures")


OPTION_LABELS = {
    "lambda_v1": "weight of the first layer's values", "lambda_own": "weight of own values", "layers": "layers with the shortcut",
    "source_layer": "layer whose values are added", "detach_source": "no gradient through the added values",
    "decay_lambda": "weight decay on the coefficients", "plus_logit_init": "initial logits of the layers' shares",
    "plus_scale_init": "initial total of the coefficients", "lambda_source": "weight of earlier layers' values",
    "dense_source": "form of the earlier values", "anchors": "layers with own values", "refresh_every": "layers between own values",
    "shared_layers": "layers with shared values", "neutreno_lambda": "strength of the pull (lambda)",
    "dilation": "dilation of the averages", "period": "blocks between averages", "decay_alpha": "weight decay on the averages",
    "depth_form": "form of the sum over depth", "depth_blocks": "groups of sublayers", "depth_heads": "softmaxes over depth",
    "streams": "residual streams", "dynamic": "weights by token", "mixing": "mixing of the streams",
    "query_group": "query heads per key-value head", "share": "shared projections", "group": "layers per shared projection",
    "source": "layers whose keys and values are read", "same_key_weight": "weight of earlier values",
    "identity_source": "layers whose values are added to outputs", "identity_scale": "weight of the added values",
    "lambda_q1": "weight of the first layer's queries", "lambda_q_own": "weight of own queries",
    "lambda_k1": "weight of the first layer's keys", "lambda_k_own": "weight of own keys",
    "lambda_a1": "weight of the first layer's attention", "lambda_a_own": "weight of own attention",
    "attn_mix": "attention mixed as", "lambda_h1": "weight of the embedding", "lambda_h_own": "weight of the block's input",
    "once": "embedding for the second block alone",
    "value_tables": "layers with a table at each end", "lambda_table": "weight of the table's values",
    "bank_layers": "layers with looked-up values", "bank": "origin of looked-up values", "bank_gain": "trained gain of looked-up values",
    "norms": "placement of norms", "gated": "trained share that is removed", "scale_start": "initial scale (c)",
    "gate_from": "input of the gate", "gate_form": "form of the gate", "skip_heads": "heads with the first layer's values",
    "gate_scale": "largest weight of the table", "gate_channels": "channels that the gate reads",
    "table_layers": "layers with a table", "logit": "logit of the extra column", "start_norm": "norm of the first position's value",
    "others_norm": "norm of other positions' values", "value_factor": "factor of own values",
    "lambda_other": "weight of another sequence's values", "cut": "parts without the skip connection",
}  # fmt: skip
"""Options of the registered architectures in words, each once."""
