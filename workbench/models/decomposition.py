"""Exact decomposition of the residual stream and the logits, in every architecture and in observed decoders.

    parts = workbench.decompose(model, tokens, by="head")
    parts = workbench.decompose(model, cache, to="logits", by="value_path", tokens=answer, against=other)

An `Anatomy` gives a model's parts; each call checks that they sum to the model's own stream or logits.

Source: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.models.anatomy import BIAS, TOLERANCE, Anatomy, By, Ending, Reader
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer
from workbench.models.transformer_anatomy import TransformerAnatomy
from workbench.names import stream_hook


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Parts that sum to a stream [component, batch, pos, d_model], or to logits [component, batch, pos (, d_vocab)]."""

    parts: Tensor
    labels: list[str]
    whole: Tensor
    """The model's own stream or logits, [batch, pos, ...]."""

    def __getitem__(self, label: str) -> Tensor:
        label = re.sub(r"\.source\.0$", ".first", label)
        if label not in self.labels:
            raise UnknownName("component", label, self.labels)
        return self.parts[self.labels.index(label)]

    @property
    def error(self) -> float:
        """Largest absolute difference between the sum of the parts and `whole`."""
        return (self.parts.sum(0) - self.whole).abs().max().item()


def anatomy_of(model: HookedModel) -> Anatomy:
    """Return the anatomy of a model; raise `BadData` for a model without one."""
    if isinstance(model, Transformer):
        return TransformerAnatomy(model)
    if (observed := getattr(model, "anatomy", None)) is None:
        raise BadData(
            f"a {type(model).__name__} has no known paths to its stream: decompose takes models of `build` and observed ones"
        )
    anatomy: Anatomy = observed()
    return anatomy


def decompose(
    model: HookedModel,
    given: Any,
    to: int | Literal["final", "logits"] | None = None,
    by: By = "layer",
    *,
    tokens: Any = None,
    against: Any = None,
    pos: Any = None,
    anatomy: Anatomy | None = None,
) -> Decomposition:
    """Split a stream or logits into parts, labelled as in TransformerLens, and check their sum.

    Args:
        model: A model of `build`, or an observed one.
        given: Token ids or text, or the cache of a run.
        to: The stream 0..L - 1 that a block reads, L (or None) that the final norm reads, `final` (the norm's output before the
            gain, with a frozen scale), or `logits`.
        by: `layer` (`embed`, `0_attn_out`, `0_mlp_out`, ...), `head` (`L0H3` for attention outputs) or `value_path` (`L1H0.own`,
            `L1H0.first`, `L2H0.source.1`, `L2H0.table`, `L1H0.cross`).
        tokens: The tokens of the logits: ids [], [batch] or [batch, pos], or a text of one token. Default: the full vocabulary.
        against: Tokens whose logits are subtracted.
        pos: Positions to return, as `pos_slice` of `run_with_cache`.
        anatomy: The result of `anatomy_of(model)`, if it is there already.

    Returns:
        Parts in float32 or better. Observed models add `0_attn_bias` (of W_O), `bias` (of the final norm and the head) and, by
        layer, `0_block_out` for a block whose attention and MLP are unknown; their `embed` is the first block's input.

    Raises:
        BadData: The cache lacks an activation, or the observed model does not show its parts.
        WorkbenchError: The parts do not sum to the stream, for example because a hook changed it.
    """
    anatomy = anatomy or anatomy_of(model)
    if by not in ("layer", "head", "value_path"):
        raise UnknownName("by", by, ["layer", "head", "value_path"])
    layers = model.config.n_layers
    streams: dict[Any, int] = {n: n for n in range(layers + 1)} | {"final": layers, "logits": layers}
    if isinstance(to, bool) or (to is not None and to not in streams):
        raise UnknownName("stream", to, map(str, streams))
    layer = layers if to is None else streams[to]
    read = Reader(anatomy, given, by, layer, frozen=to in ("final", "logits"), pos=pos)
    with torch.autocast(model.embed.weight.device.type, enabled=False):  # autocast is for the run, not for its parts
        parts = anatomy.parts(read, by, layer)
        stacked, labels = torch.stack([part for _, part in parts]), [label for label, _ in parts]
        whole = read.cut(stream_hook(layer, layers))
        if to in ("final", "logits"):
            end = anatomy.ending(read)
            stacked, whole = end.normed(stacked), end.normed(whole)
            if to == "logits":
                stacked, whole = _logits(model, end, read, stacked, tokens, against)
                labels += [BIAS] if len(stacked) > len(labels) else []
        size = stacked.abs().sum(0).max().clamp(min=torch.finfo(stacked.dtype).tiny)
        result = Decomposition(parts=stacked, labels=labels, whole=whole)
        off = result.error / size.item()
    if not off <= TOLERANCE[read.coarsest]:
        raise WorkbenchError(
            f"the parts by {by} miss {'stream ' if isinstance(to, int) else ''}{'the stream' if to is None else to} by"
            f" {off:.1e} of their size: it was changed on its way, as by a hook; decompose a run without it"
        )
    return result if read.batched else Decomposition(parts=stacked[:, 0], labels=labels, whole=whole[0])


def _logits(model: Any, end: Ending, read: Reader, parts: Tensor, tokens: Any, against: Any) -> tuple[Tensor, Tensor]:
    """Map the parts of the normed stream to (parts, whole) of the logits; `whole` are the run's, or the head's of a cache."""
    inputs, own, constant = read.cut("unembed.hook_in"), read.logits, end.constant
    own = None if own is None else read.at_positions(own.detach().to(read.wide))
    if tokens is None:
        if against is not None:
            raise BadData("`against` needs the `tokens` whose logits it is compared with")
        parts = parts @ (end.gain[:, None] * end.head.T)
        whole = inputs @ end.head.T + (0.0 if end.bias is None else end.bias) if own is None else own
    else:
        ids = [_ids(model, end.head, x, inputs.shape) for x in (tokens, against) if x is not None]

        def of_tokens(table: Tensor) -> Tensor:
            """Return the rows of `tokens` minus those of `against`."""
            return table[ids[0]] - table[ids[1]] if len(ids) > 1 else table[ids[0]]

        direction = of_tokens(end.head)
        parts = (parts * (end.gain * direction)).sum(-1)
        whole = (inputs * direction).sum(-1) + (0.0 if end.bias is None else of_tokens(end.bias))
        if own is not None:
            each = [own.gather(-1, i.expand(own.shape[:2])[..., None])[..., 0] for i in ids]
            whole = each[0] - each[1] if len(each) > 1 else each[0]
        constant = None if constant is None else of_tokens(constant)
    return parts if constant is None else torch.cat([parts, constant.expand(1, *parts.shape[1:])]), whole


def _ids(model: Any, head: Tensor, tokens: Any, shape: Sequence[int]) -> Tensor:
    """Return ids [], [batch, 1] or [batch, pos] from ids [], [batch] or [batch, pos], or from a text."""
    ids = torch.as_tensor(model.to_single_token(tokens) if isinstance(tokens, str) else tokens, device=head.device)
    if ids.ndim == 1:
        ids = ids[:, None]
    if ids.ndim > 2 or ids.is_floating_point() or any(a not in (1, b) for a, b in zip(ids.shape, shape, strict=False)):
        raise BadData(f"tokens of shape {tuple(ids.shape)} do not fit [batch, pos] = {tuple(shape[:2])}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(head):
        raise BadData(f"token ids {int(ids.min())}..{int(ids.max())} leave the vocabulary 0..{len(head) - 1}")
    return ids
