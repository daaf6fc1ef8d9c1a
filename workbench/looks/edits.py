"""What edits of the forward pass change: one prompt before and after, all layers and heads in turn, two prompts patched.

    effect(model, ids, "sink:layer=3,head=1;remove:layer=4,part=mlp")     losses, next tokens, divergence
    sweep(model, ids, "head:how=mean", over="layer x head")               change of the loss in each cell
    patch_sweep(model, clean, corrupted, (" Paris", " Rome"))             what brings the clean answer back

Edits and their order: `workbench.interventions.edits` and `.editing`. No gradients; one thread at a time runs a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions.changes import hold
from workbench.interventions.editing import standing
from workbench.interventions.edits import Edit, Given, Patch, as_edits
from workbench.interventions.places import Inputs, check, layers_of, n_heads_of, names_at
from workbench.looks.reading import log_chances, strings_of
from workbench.models.hooked import HookedModel, next_token_loss
from workbench.models.transformer import Transformer

Progress = Callable[[int, int], None]
"""Called with the cells done and all cells, as it goes; what it raises ends the sweep and leaves the model as it was."""
Over = Literal["layer", "layer x head"]
TOKENS = 1024  # tokens that run together where cells of a sweep are rows of a batch
SAME = 1e-6  # logit differences of two prompts closer than this, in units of the larger, tell nothing apart


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One prompt of T tokens before and after edits."""

    edits: tuple[str, ...]
    loss_before: np.ndarray
    """[T - 1] nats; entry i is the loss of token i + 1."""
    loss_after: np.ndarray
    top_before: pd.DataFrame
    """The likeliest tokens after the prompt, unedited: `id`, `text`, probabilities `before` and `after`."""
    top_after: pd.DataFrame
    """The likeliest under the edits; columns as above."""
    before: np.ndarray
    """[d_vocab] probabilities of the token that follows the prompt, unedited."""
    after: np.ndarray
    """Under the edits."""
    divergence: float
    """KL(before || after) of the token that follows the prompt, nats, >= 0."""

    @property
    def n(self) -> int:
        """Positions with a loss."""
        return len(self.loss_before)

    @property
    def change(self) -> float:
        """Mean change of the loss over positions, nats; positive: the edits harm. NaN for a prompt of one token."""
        return float((self.loss_after - self.loss_before).mean()) if self.n else float("nan")


@torch.no_grad()
def effect(
    model: HookedModel, ids: Any, edits: Given | Iterable[Given], *, other: Any = None, means: Any = None, top: int = 10
) -> Effect:
    """What the edits together change about one prompt (ids [pos], [1, pos], or text).

    `other`, `means`: as in `edited`; `top`: how many of the likeliest next tokens. Raises as `edited`, and `BadData` for
    several prompts.
    """
    inputs, chosen = _inputs(model, ids, other, means), as_edits(edits)
    if top < 1:
        raise BadData(f"top={top}: must be 1 or more")
    before = _run(model, inputs)
    with standing(model, chosen, inputs):
        after = _run(model, inputs)
    was, now = (x.last.log_softmax(-1) for x in (before, after))
    return Effect(
        edits=tuple(map(str, chosen)),
        loss_before=before.loss,
        loss_after=after.loss,
        top_before=_likeliest(model, was, was, now, top),
        top_after=_likeliest(model, now, was, now, top),
        before=was.exp().float().numpy(),
        after=now.exp().float().numpy(),
        divergence=max(0.0, float((was.exp() * (was - now)).nansum())),  # 0 * inf: a token that neither expects
    )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One kind of edit at every layer, or every layer and head; NaN where the architecture lacks what is edited."""

    edit: str
    over: Over
    loss: np.ndarray
    """[layer] or [layer, head]: mean change of the loss over positions, nats; positive: the edit harms."""
    n: int
    """Positions with a loss."""
    loss_before: float
    """Mean loss of the prompt, nats."""
    logit: np.ndarray | None = None
    """Change of the answer's logit after the prompt, minus that of the mean logit; None without an answer."""
    probability: np.ndarray | None = None
    """Change of the answer's probability."""
    probability_before: float | None = None


@torch.no_grad()
def sweep(
    model: HookedModel,
    ids: Any,
    kind: Given,
    over: Over = "layer",
    *,
    answer: int | str | None = None,
    other: Any = None,
    means: Any = None,
    progress: Progress | None = None,
) -> Sweep:
    """One edit without layer (and head), set at each in turn: a forward pass for each cell.

    Heads are key-value heads where values, keys or what arrives is edited, query heads elsewhere. `answer`: a token, as id
    or text, whose logit and probability after the prompt are followed. Raises as `edited`; `BadData` for several prompts
    and an answer of several tokens; `WorkbenchError` where the edit names its layers, or has no heads to tell apart.
    """
    inputs, edit = _inputs(model, ids, other, means), _template(kind, over)
    target = None if answer is None else _token(model, answer)
    layers = layers_of(model, edit)
    rows = 1 + max(model.config.n_layers - 1, *layers)  # the final norm's input is one more
    heads = n_heads_of(model, edit) if over == "layer x head" else 0
    if over == "layer x head" and not heads:
        raise WorkbenchError(f"{edit} has no heads to tell apart: sweep it over=layer")
    check(model, edit, inputs)
    hold(model, edit, layers, inputs)
    before, found = _run(model, inputs), np.full((3, rows, max(1, heads)), np.nan)
    cells = [(n, h) for n in layers for h in range(max(1, heads))]
    for done, (n, h) in enumerate(cells, 1):
        at = dataclasses.replace(edit, layer=(n,), **({"head": (h,)} if heads else {}))
        with standing(model, [at], inputs):
            after = _run(model, inputs)
        found[:, n, h] = _changes(before, after, target)
        if progress is not None:
            progress(done, len(cells))
    loss, logit, probability = found if heads else found[..., 0]
    asked = {"logit": logit, "probability": probability, "probability_before": _probability(before, target)}
    return Sweep(
        edit=str(edit), over=over, loss=loss, n=len(before.loss), loss_before=_mean(before.loss),
        **(asked if target is not None else {}),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PatchSweep:
    """What each activation of the clean prompt brings back of the answer, put into the corrupted one."""

    edit: str
    restored: np.ndarray
    """[layer, position] or [layer, head]: (d - d_corrupted) / (d_clean - d_corrupted) of the logit difference d of the two
    answers after the prompt: 0 as corrupted, 1 as clean; below 0 and above 1 are possible. NaN where there is no site."""
    clean: float
    """Logit difference of the clean prompt."""
    corrupted: float
    """That of the corrupted one."""


@torch.no_grad()
def patch_sweep(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    answers: tuple[int | str, int | str],
    site: str = "stream",
    over: Literal["layer x position", "layer x head"] = "layer x position",
    *,
    progress: Progress | None = None,
) -> PatchSweep:
    """Activation patching: the corrupted prompt with one activation of the clean one at a time.

    `answers`: the token that is right after the clean prompt and the one it is compared with, ids or texts. `over`: each
    position (all heads), or each head (all positions). Positions before the first differing token change nothing and
    cost nothing; the others run as rows of a batch. Stream L is what the final norm reads.
    Source: Meng et al. (2022); Wang et al. (2023); normalised as in Zhang and Nanda (2024), Towards Best Practices of
    Activation Patching.

    Raises `BadData` for prompts of unequal length or with equal logit differences, and as `edited`.
    """
    if over not in ("layer x position", "layer x head"):
        raise UnknownName("over", over, ["layer x position", "layer x head"])
    inputs, edit = _inputs(model, corrupted, clean, None), Patch(site=site)
    assert inputs.tokens is not None
    assert inputs.other is not None
    if (first := inputs.other.shape[1]) != (then := inputs.tokens.shape[1]):
        raise BadData(
            f"the first prompt has {first} tokens and the second {then}: patching needs as many in both; cut or lengthen one"
        )
    layers, (right, wrong) = layers_of(model, edit), (_token(model, x) for x in answers)
    check(model, edit, inputs)
    hold(model, edit, layers, inputs)
    reached, start = (float(_lead(model, x, right, wrong)[0]) for x in (inputs.other, inputs.tokens))
    if abs(reached - start) <= SAME * max(abs(reached), abs(start)):
        raise BadData(f"both prompts have a logit difference of {start:.4g}: choose answers that tell them apart")
    heads = n_heads_of(model, edit)
    if over == "layer x head" and not heads:
        raise WorkbenchError(
            f"{edit} has no heads to tell apart: choose v, own_v, q, k or z, or over='layer x position'"
        )
    columns = inputs.tokens.shape[1] if over == "layer x position" else heads
    restored = np.full((1 + max(model.config.n_layers - 1, *layers), columns), np.nan)
    restored[layers] = 0.0
    first = _first_difference(inputs.tokens, inputs.other) if over == "layer x position" else 0
    step, done, total = max(1, TOKENS // inputs.tokens.shape[1]), 0, len(layers) * (columns - first)
    for n in layers:
        (name,) = names_at(model, edit, n)
        for low in range(first, columns, step):
            some = range(low, min(low + step, columns))
            change = partial(_one_in_each, source=inputs.held["other", name], cells=some, heads=over == "layer x head")
            with model.hooks([(name, change)]):
                lead = _lead(model, inputs.tokens.expand(len(some), -1), right, wrong)
            restored[n, some.start : some.stop] = (lead - start) / (reached - start)
            done += len(some)
            if progress is not None:
                progress(done, total)
    return PatchSweep(edit=str(edit), restored=restored, clean=reached, corrupted=start)


def _one_in_each(tensor: Tensor, hook: Any, source: Tensor, cells: range, heads: bool) -> Tensor:
    """Row i of [len(cells), pos, (head,) ...] with the position (or head) cells[i] of `source` [1, pos, (head,) ...]."""
    new = tensor.clone()
    for row, i in zip(new, cells, strict=True):
        at = (slice(None), i) if heads else i
        row[at] = source[0][at].to(row)
    return new


def _lead(model: HookedModel, ids: Tensor, right: int, wrong: int) -> np.ndarray:
    """Logit of one token minus another's after each prompt [batch]."""
    points: Any = [("unembed.hook_in", lambda x, hook: x[:, -1:])] if isinstance(model, Transformer) else []
    with model.hooks(points):
        logits = model(ids)[:, -1].double()
    return (logits[:, right] - logits[:, wrong]).cpu().numpy()


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    loss: np.ndarray  # [pos - 1] nats
    last: Tensor  # [d_vocab] logits after the prompt, float64 on the CPU


def _run(model: HookedModel, inputs: Inputs) -> _Run:
    ids, kept = inputs.tokens, list[Tensor]()
    assert ids is not None
    if not isinstance(model, Transformer):  # another's head, which may be asked for the last position only
        logits = model.everywhere(ids)
        loss = next_token_loss(logits, ids, per_token=True)[0] if ids.shape[1] > 1 else logits.new_empty(0)
        return _Run(loss.double().cpu().numpy(), logits[0, -1].double().cpu())

    def last(x: Tensor, hook: Any) -> Tensor:
        kept.append(x[0, :-1])
        return x[:, -1:]

    with model.hooks([("unembed.hook_in", last)]):  # the logits of a long prompt would outweigh everything else
        logits = model(ids)
    losses = [-log_p.gather(-1, ids[0, 1:][at, None])[:, 0] for at, log_p in log_chances(model, kept[0], normed=True)]
    loss = torch.cat(losses) if losses else logits.new_empty(0)
    return _Run(loss.double().cpu().numpy(), logits[0, -1].double().cpu())


def _inputs(model: HookedModel, ids: Any, other: Any, means: Any) -> Inputs:
    inputs = Inputs.of(model, ids, other, means)
    for each in (inputs.tokens, inputs.other):
        if each is not None and len(each) > 1:
            raise BadData(f"{len(each)} prompts: look at one at a time")
    return inputs


def _template(kind: Given, over: str) -> Edit:
    if over not in ("layer", "layer x head"):
        raise UnknownName("over", over, ["layer", "layer x head"])
    edits = as_edits(kind)
    if len(edits) != 1:
        raise WorkbenchError(f"{kind!r}: a sweep takes one edit, got {len(edits)}")
    if edits[0].layer or (over == "layer x head" and getattr(edits[0], "head", ())):
        raise WorkbenchError(f"{edits[0]}: a sweep sets the {over.replace(' x ', ' and the ')} itself; leave them out")
    return edits[0]


def _token(model: HookedModel, answer: int | str) -> int:
    ids = model.to_tokens(answer)[0].tolist() if isinstance(answer, str) else [answer]
    if len(ids) != 1:
        raise BadData(f"the answer {answer!r} has {len(ids)} tokens {ids}: give one token, as text or id")
    if isinstance(ids[0], bool) or not isinstance(ids[0], int) or not 0 <= ids[0] < model.config.d_vocab:
        raise BadData(f"the answer {answer!r} is no token id 0..{model.config.d_vocab - 1}")
    return ids[0]


def _changes(before: _Run, after: _Run, target: int | None) -> tuple[float, float, float]:
    """Of the mean loss, of the answer's logit against the mean logit, of its probability."""
    loss = _mean(after.loss - before.loss)
    if target is None:
        return loss, float("nan"), float("nan")
    centred = [float(run.last[target] - run.last.mean()) for run in (before, after)]
    was, now = (_probability(run, target) for run in (before, after))
    return loss, centred[1] - centred[0], now - was


def _probability(run: _Run, target: int | None) -> float:
    return float("nan") if target is None else float(run.last.softmax(-1)[target])


def _mean(losses: np.ndarray) -> float:
    return float(losses.mean()) if len(losses) else float("nan")


def _likeliest(model: HookedModel, by: Tensor, was: Tensor, now: Tensor, top: int) -> pd.DataFrame:
    ids = by.topk(min(top, len(by))).indices.tolist()
    return pd.DataFrame(
        {"id": ids, "text": strings_of(model, ids), "before": was[ids].exp().numpy(), "after": now[ids].exp().numpy()}
    )


def _first_difference(ids: Tensor, others: Tensor) -> int:
    """The first position at which two prompts [1, pos] differ; their length where they do not."""
    differing = (ids[0] != others[0]).nonzero()
    return int(differing[0]) if len(differing) else ids.shape[1]
