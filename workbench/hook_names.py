"""The names of all activations, with hook point, axes and a one-line meaning.

Names and layouts follow TransformerLens. Value-residual models have further hook points. `attn.own` has tensors that the layer
projects itself, `attn.source.<j>` those of layer j, and `attn.table` those looked up by token id. `attn.cross` has keys, values,
scores and pattern of another layer (`attn.cross.<j>` if a layer reads several). Others show coefficients, DenseFormer's averages and
the streamed attention statistics. `attn.first` is an alias of `attn.source.0` in every hook name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One named activation: its hook point, with `{layer}` as a placeholder, and its axes."""

    hook: str
    axes: str
    meaning: str

    @property
    def per_layer(self) -> bool:
        """True if each block has this activation."""
        return "{layer}" in self.hook


def _block(point: str, axes: str, meaning: str) -> Activation:
    return Activation(hook=f"blocks.{{layer}}.{point}", axes=f"batch {axes}", meaning=meaning)


def _weights(point: str, meaning: str) -> Activation:
    return Activation(hook=f"blocks.{{layer}}.{point}", axes="source", meaning=meaning)


ACTIVATIONS: dict[str, Activation] = {
    "embed": Activation(hook="hook_embed", axes="batch pos d_model", meaning="token embeddings"),
    "stream": _block(
        "hook_resid_pre", "pos d_model", "input of block n; L: input of the final norm; final: its output"
    ),
    "attn_out": _block("hook_attn_out", "pos d_model", "attention output, added to the stream"),
    "mlp_out": _block("hook_mlp_out", "pos d_model", "MLP output, added to the stream"),
    "router_logits": _block("mlp.hook_router_logits", "pos expert", "logits of the router, of a mixture of experts"),
    "router_scores": _block(
        "mlp.hook_router_scores", "pos expert", "scores of the experts: softmax or sigmoid of the router's logits"
    ),
    "expert_weights": _block(
        "mlp.hook_expert_weights", "pos expert", "weights of the selected experts, 0 for the others"
    ),
    "q": _block("attn.hook_q", "pos head d_head", "effective query, before the rotation"),
    "k": _block("attn.hook_k", "pos kv_head d_head", "effective key, before the rotation"),
    "rot_q": _block("attn.hook_rot_q", "pos head d_head", "query after rotary position encoding"),
    "rot_k": _block("attn.hook_rot_k", "pos kv_head d_head", "key after rotary position encoding"),
    "v": _block("attn.hook_v", "pos kv_head d_head", "effective value: what the attention pattern multiplies"),
    "own_v": _block("attn.own.hook_v", "pos kv_head d_head", "value projected from this layer's own input"),
    "latent": _block("attn.hook_latent", "pos latent", "compressed input of keys and values (MLA)"),
    "first_v": _block("attn.source.0.hook_v", "pos kv_head d_head", "first layer's value as it arrives here"),
    "v_mix": _weights("attn.hook_v_mix", "value coefficients in use: sources, own last"),
    "v_weights": _block(
        "attn.hook_v_weights", "pos kv_head source", "value coefficients of each token, if they depend on it; own last"
    ),
    "table_v": _block("attn.table.hook_v", "pos kv_head d_head", "value looked up by token id"),
    "cross_v": _block(
        "attn.cross.hook_v", "pos kv_head d_head", "another layer's value, attended to in addition to the own"
    ),
    "own_q": _block("attn.own.hook_q", "pos head d_head", "query as projected here, before it is mixed"),
    "own_k": _block("attn.own.hook_k", "pos kv_head d_head", "key as projected here, before it is mixed"),
    "first_q": _block("attn.source.0.hook_q", "pos head d_head", "first layer's query as it arrives here"),
    "first_k": _block("attn.source.0.hook_k", "pos kv_head d_head", "first layer's key as it arrives here"),
    "first_rot_q": _block(
        "attn.source.0.hook_rot_q", "pos head d_head", "first layer's rotated query, for its pattern here"
    ),
    "first_rot_k": _block(
        "attn.source.0.hook_rot_k", "pos kv_head d_head", "first layer's rotated key, for its pattern here"
    ),
    "cross_rot_k": _block(
        "attn.cross.hook_rot_k", "pos kv_head d_head", "another layer's rotated key, attended to here"
    ),
    "q_mix": _weights("attn.hook_q_mix", "query coefficients in use: sources, own last"),
    "k_mix": _weights("attn.hook_k_mix", "key coefficients in use: sources, own last"),
    "output_mix": _weights("attn.hook_output_mix", "coefficients in use of the terms added to the head outputs"),
    "pattern_mix": _weights("attn.hook_pattern_mix", "coefficients in use of mixed patterns or scores: first, own"),
    "z": _block("attn.hook_z", "pos head d_head", "attention output per head, exactly what W_O multiplies"),
    "scores": _block("attn.hook_attn_scores", "head query key", "scaled, masked attention scores (T x T)"),
    "pattern": _block("attn.hook_pattern", "head query key", "attention probabilities (T x T)"),
    "cross_scores": _block("attn.cross.hook_attn_scores", "head query key", "scores of another layer's keys (T x T)"),
    "cross_pattern": _block(
        "attn.cross.hook_pattern", "head query key", "attention to another layer's keys; with `pattern` rows sum to 1"
    ),
    "first_pattern": _block(
        "attn.source.0.hook_pattern", "head query key", "first layer's softmax, before it is mixed in"
    ),
    "own_pattern": _block(
        "attn.own.hook_pattern", "head query key", "this layer's softmax, before the first's is mixed in"
    ),
    "received": _block("attn.hook_received", "head pos", "attention received by each position: column sums"),
    "row_entropy": _block("attn.hook_row_entropy", "head pos", "entropy of each query's attention, nats"),
    "row_max": _block("attn.hook_row_max", "head pos", "largest attention weight of each query"),
    "sink": _block("attn.hook_sink", "head pos", "attention of each query to position 0"),
    "lse": _block("attn.hook_lse", "head pos", "log-sum-exp of each query's scores"),
    "null": _block("attn.hook_null", "head pos", "attention of each query that goes to no token (sink logits)"),
    "dwa_in": _block("hook_dwa_in", "pos d_model", "raw block output, before the average of outputs"),
    "dwa_weights": _weights("hook_dwa_weights", "weights of the averaged outputs in use, own last"),
    "depth_weights": _block(
        "hook_depth_weights", "pos head source", "weights by token of earlier outputs in the input after the block"
    ),
    "mid_depth_weights": _block(
        "hook_mid_depth_weights", "pos head source", "weights by token of earlier outputs in the MLP's input"
    ),
    **{
        f"{kind}_{name}": _block(f"hook_{kind}_{name}", f"pos {axes}", meaning.format(sublayer))
        for kind, sublayer in (("attn", "attention"), ("mlp", "MLP"))
        for name, axes, meaning in (
            ("h_pre", "stream", "weights of the streams in the {}'s input"),
            ("h_res", "into from", "mixing matrix of the streams past the {}"),
            ("h_post", "stream", "weights of the {}'s output in the streams"),
        )
    },
    "streams": _block(
        "hook_streams", "pos stream d_model", "all residual streams after the block, if there are several"
    ),
    "logits": Activation(hook="", axes="batch pos vocab", meaning="the model's output"),
    "tokens": Activation(hook="", axes="batch pos", meaning="input token ids"),
}


def hook_name(name: str) -> str:
    """Resolve the alias in a hook name: `attn.first` is `attn.source.0`."""
    return name.replace(".attn.first.", ".attn.source.0.")


def either_name(passes: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return a filter of hook names that passes a name or its alias."""
    return lambda name: passes(name) or passes(name.replace(".attn.source.0.", ".attn.first."))


def path_name(hook: str) -> str:
    """Return the value path of an attention's hook point: `own`, `first`, `source.<j>`, `table`, `cross`, ..."""
    path = hook.partition(".attn.")[2].rpartition("hook_")[0].rstrip(".")
    return "first" if path == "source.0" else path or "own"


class ByHookName(dict[str, V]):
    """A dictionary by hook point, for names and aliases."""

    def __missing__(self, key: Any) -> V:
        name = hook_name(key) if isinstance(key, str) else key
        if name == key:
            raise KeyError(key)
        return self[name]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(hook_name(key) if isinstance(key, str) else key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        try:
            return self[key]
        except KeyError:
            return default


STATISTICS = ("received", "row_entropy", "row_max", "sink", "lse")
"""Attention statistics at `attn.hook_<name>`, which the kernel computes without a T x T array."""

NULL = "null"  # A further statistic of sink logits: the attention of each row that goes to no token

QUADRATIC = ("hook_attn_scores", "hook_pattern")  # hook points with T x T tensors


def position_axis(hook: str) -> int | None:
    """Return the position axis of a hook point's tensor, counted from the end; None if it has none."""
    point = hook.rsplit(".", 1)[-1]
    if point.endswith("_mix") or point == "hook_dwa_weights":
        return None
    if point in ("hook_q", "hook_k", "hook_v", "hook_z", "hook_rot_q", "hook_rot_k") or point.endswith(
        ("v_weights", "depth_weights", "h_res", "hook_streams")
    ):
        return -3
    return -1 if is_statistic(hook) else -2


def is_statistic(hook: str) -> bool:
    """Return whether a hook point shows a streamed statistic, which is read-only and has no gradient."""
    return hook.rsplit("hook_", 1)[-1] in (*STATISTICS, NULL)


def stream_hook(index: int | str, n_layers: int) -> str:
    """Return the hook point of stream `index`: 0..L-1 the blocks' inputs, L the final norm's input, `final` its output."""
    if index == "final":
        return "unembed.hook_in"
    return f"blocks.{n_layers - 1}.hook_resid_post" if index == n_layers else f"blocks.{index}.hook_resid_pre"


def before_branching(model: Any, layer: int, name: str) -> str:
    """Return the hook point whose gradient covers all readers of a block's input, which averages may read earlier."""
    if not name.endswith("hook_resid_pre") or not getattr(model.blocks[layer], "shares_input", False):
        return name
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "hook_embed"


def layer_of(hook: str) -> int | None:
    """Return the block of a hook point, None outside the blocks."""
    match = re.match(r"blocks\.(\d+)\.", hook)
    return int(match[1]) if match else None


class NamedHookPoints:
    """Base class of models with these hook points, our own and observed ones; this module needs no torch."""

    foreign: Any = None  # the observed module; None for our own models
