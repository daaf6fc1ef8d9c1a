"""What the residual stream and the logits are made of, exactly, in every architecture and in observed decoders.

    parts = workbench.decompose(model, tokens, by="head")
    parts = workbench.decompose(model, cache, to="logits", by="value_path", tokens=answer, against=other)

What the parts are is a model's own matter (`Anatomy`); each call checks that they sum to what the model computed.

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
    """What the model computed, [batch, pos, ...]."""

    def __getitem__(self, label: str) -> Tensor:
        label = re.sub(r"\.source\.0$", ".first", label)
        if label not in self.labels:
            raise UnknownName("component", label, self.labels)
        return self.parts[self.labels.index(label)]

    @property
    def error(self) -> float:
        """Largest absolute difference between the sum of the parts and the whole."""
        return (self.parts.sum(0) - self.whole).abs().max().item()


def anatomy_of(model: HookedModel) -> Anatomy:
    """What a model is made of, of one that is observed as it is now; raises `BadData` where nothing is known of it."""
    if isinstance(model, Transformer):
        return TransformerAnatomy(model)
    if (own := getattr(model, "anatomy", None)) is None:
        raise BadData(
            f"a {type(model).__name__} has no known paths to its stream: decompose takes models of `build` and observed ones"
        )
    found: Anatomy = own()
    return found


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
    """The parts of a stream or of logits, labelled as in TransformerLens, checked to sum to it.

    `given`: token ids or text, or a cache of a run. `to`: a stream by index (0..L - 1 what a block reads, L or None what
    the final norm reads), `final` (its output before the gain, its scale frozen), or `logits`: those of `tokens` (ids
    [], [batch] or [batch, pos], or a text of one token), minus those of `against`, of the whole vocabulary where no tokens
    are given. `by`: `layer` (`embed`, `0_attn_out`, `0_mlp_out`, ...), `head` (`L0H3` for the attention outputs),
    `value_path` (`L1H0.own`, `L1H0.first`, `L2H0.source.1`, `L2H0.table`, `L1H0.cross`). Observed models add
    `0_attn_bias` (of W_O) and `bias` (of the final norm and the head) where they have them, and by layer `0_block_out` for a
    block that is not told apart; their `embed` is what the first block reads. `pos`: positions to keep, as `pos_slice` of
    `run_with_cache`. `anatomy`: of the model, where `anatomy_of` was asked already. Parts are float32 or better. Raises
    `BadData` where a cache lacks what is needed or an observed model does not show its parts, and `WorkbenchError` where the
    parts do not sum up, as after a hook changed a stream.
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
    with torch.autocast(model.embed.weight.device.type, enabled=False):  # of the run alone, not of its parts
        return _parts_of_run(model, anatomy, read, by, to, layer, tokens, against)


def _parts_of_run(
    model: HookedModel, anatomy: Anatomy, read: Reader, by: By, to: Any, layer: int, tokens: Any, against: Any
) -> Decomposition:
    """The parts of one run's stream or logits, checked to sum to it."""
    layers = model.config.n_layers
    found = anatomy.parts(read, by, layer)
    stacked, labels = torch.stack([part for _, part in found]), [label for label, _ in found]
    whole = read.cut(stream_hook(layer, layers))
    if to in ("final", "logits"):
        end = anatomy.ending(read)
        stacked, whole = end.normed(stacked), end.normed(whole)
        if to == "logits":
            stacked, whole = _logits(model, end, read, stacked, tokens, against)
            labels += [BIAS] if len(stacked) > len(labels) else []
    size = stacked.abs().sum(0).max().clamp(min=torch.finfo(stacked.dtype).tiny)
    result = Decomposition(parts=stacked, labels=labels, whole=whole)
    if not (off := result.error / size.item()) <= TOLERANCE[read.coarsest]:
        raise WorkbenchError(
            f"the parts by {by} miss {'stream ' if isinstance(to, int) else ''}{'the stream' if to is None else to} by"
            f" {off:.1e} of their size: it was changed on its way, as by a hook; decompose a run without it"
        )
    return result if read.batched else Decomposition(parts=stacked[:, 0], labels=labels, whole=whole[0])


def _logits(model: Any, end: Ending, read: Reader, parts: Tensor, tokens: Any, against: Any) -> tuple[Tensor, Tensor]:
    """Parts of the normed stream -> (parts, whole) of logits: the run's own, or of a cache what its head makes of its input."""
    seen, own, constant = read.cut("unembed.hook_in"), read.logits, end.constant
    own = None if own is None else read.kept(own.detach().to(read.wide))
    if tokens is None:
        if against is not None:
            raise BadData("`against` needs the `tokens` whose logits it is compared with")
        parts = parts @ (end.gain[:, None] * end.head.T)
        whole = seen @ end.head.T + (0.0 if end.bias is None else end.bias) if own is None else own
    else:
        ids = [_ids(model, end.head, x, seen.shape) for x in (tokens, against) if x is not None]

        def chosen(of: Tensor) -> Tensor:
            """Of the tokens, minus that of the others."""
            return of[ids[0]] - of[ids[1]] if len(ids) > 1 else of[ids[0]]

        direction = chosen(end.head)
        parts = (parts * (end.gain * direction)).sum(-1)
        whole = (seen * direction).sum(-1) + (0.0 if end.bias is None else chosen(end.bias))
        if own is not None:
            each = [own.gather(-1, i.expand(own.shape[:2])[..., None])[..., 0] for i in ids]
            whole = each[0] - each[1] if len(each) > 1 else each[0]
        constant = None if constant is None else chosen(constant)
    return parts if constant is None else torch.cat([parts, constant.expand(1, *parts.shape[1:])]), whole


def _ids(model: Any, head: Tensor, tokens: Any, shape: Sequence[int]) -> Tensor:
    """Ids [], [batch, 1] or [batch, pos] of ids [], [batch] or [batch, pos], or of a text."""
    ids = torch.as_tensor(model.to_single_token(tokens) if isinstance(tokens, str) else tokens, device=head.device)
    if ids.ndim == 1:
        ids = ids[:, None]
    if ids.ndim > 2 or ids.is_floating_point() or any(a not in (1, b) for a, b in zip(ids.shape, shape, strict=False)):
        raise BadData(f"tokens of shape {tuple(ids.shape)} do not fit [batch, pos] = {tuple(shape[:2])}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(head):
        raise BadData(f"token ids {int(ids.min())}..{int(ids.max())} leave the vocabulary 0..{len(head) - 1}")
    return ids
