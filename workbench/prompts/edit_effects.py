"""Effects of edits on one prompt: before and after, one edit at each layer and head in turn, or activation patching."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.file_io import local
from workbench.interventions.ablation import TokenMeans, token_means
from workbench.interventions.edits.base import Inputs
from workbench.interventions.edits.kinds import Given, Patch, applied, as_edits
from workbench.models.hooked import HookedModel, next_token_loss, refuse_token
from workbench.models.transformer import Transformer
from workbench.prompts.prompt import Prompt, PromptLike, divergence, log_probabilities, second_prompt, single_prompt
from workbench.runs.run import Run

Progress = Callable[[int, int], None]
"""Called with the cells done and all cells, as it goes; what it raises ends the sweep and leaves the model as it was."""
Over = Literal["layer", "layer x head"]
Means = TokenMeans | Mapping[str, TokenMeans] | str | None
"""Tables for `values:how=token_mean`: one, several by name, or a site whose table is made of training documents of the run
that the model came from, once for each model."""
MEANS_TOKENS = 32_768  # of such a table


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One prompt of T tokens before and after edits."""

    edits: tuple[str, ...]
    loss_before: np.ndarray  # [T - 1] nats; entry i is the loss of token i + 1
    loss_after: np.ndarray
    # the likeliest tokens after the prompt, unedited: `id`, `text`, probabilities `before` and `after`
    top_before: pd.DataFrame
    top_after: pd.DataFrame  # the likeliest under the edits; columns as above
    before: np.ndarray  # [d_vocab] probabilities of the token that follows the prompt, unedited
    after: np.ndarray  # under the edits
    divergence: float  # KL(before || after) of the token that follows the prompt, nats, >= 0; NaN if a logit is NaN

    @property
    def n(self) -> int:
        """Positions with a loss."""
        return len(self.loss_before)

    @property
    def change(self) -> float:
        """Mean change of the loss over positions, nats; positive: the edits harm. NaN for a prompt of one token."""
        return float((self.loss_after - self.loss_before).mean()) if self.n else float("nan")


@torch.no_grad()
def edit_effect(
    model: HookedModel, prompt: PromptLike, edits: Given | Iterable[Given], *, other: PromptLike | None = None,
    means: Means = None, top: int = 10,
) -> Effect:  # fmt: skip
    """Return the joint effect of edits on one prompt.

    `other`: as in `edited`; `top`: how many of the likeliest next tokens. Raises as `edited`, and `BadData` for several prompts.
    """
    prompt = single_prompt(model, prompt, least=1)
    inputs, chosen = _inputs(model, prompt, other, means), as_edits(edits)
    if top < 1:
        raise BadData(f"top={top}: must be 1 or more")
    before = _run(model, inputs)
    with applied(model, chosen, inputs):
        after = _run(model, inputs)
    was, now = (x.last.log_softmax(-1) for x in (before, after))
    return Effect(
        edits=tuple(map(str, chosen)),
        loss_before=before.loss,
        loss_after=after.loss,
        top_before=_likeliest(prompt, was, was, now, top),
        top_after=_likeliest(prompt, now, was, now, top),
        before=was.exp().float().numpy(),
        after=now.exp().float().numpy(),
        divergence=float(divergence(was, now)),
    )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Effects of one kind of edit at each layer, or at each layer and head; NaN if the architecture lacks the edited tensor."""

    edit: str
    over: Over
    loss: np.ndarray  # [layer] or [layer, head]: mean change of the loss over positions, nats; positive: the edit harms
    n: int  # positions with a loss
    loss_before: float  # mean loss of the prompt, nats
    logit: np.ndarray | None = None
    """Change of the answer's logit after the prompt, minus that of the mean logit; None without an answer."""
    probability: np.ndarray | None = None  # change of the answer's probability
    probability_before: float | None = None


@torch.no_grad()
def edit_sweep(
    model: HookedModel, prompt: PromptLike, kind: Given, over: Over = "layer", *, answer: int | str | None = None,
    other: PromptLike | None = None, means: Means = None, progress: Progress | None = None,
) -> Sweep:  # fmt: skip
    """One edit without layer (and head), set at each in turn: a forward pass for each cell.

    Heads are key-value heads if the edit changes keys or values, query heads otherwise. `answer`: a token, as id
    or text; the sweep has its logit and probability after the prompt. Raises the errors of `edited`; `BadData` for several prompts
    or an answer of several tokens; `WorkbenchError` if the edit names its layers, or has no heads.
    """
    refuse_unknown("over", over, ("layer", "layer x head"))
    inputs, edits = _inputs(model, single_prompt(model, prompt, least=1), other, means), as_edits(kind)
    if len(edits) != 1:
        raise WorkbenchError(f"{kind!r}: a sweep takes one edit, got {len(edits)}")
    (edit,) = edits
    if edit.layer or (over == "layer x head" and getattr(edit, "head", ())):
        raise WorkbenchError(f"{edit}: a sweep sets the {over.replace(' x ', ' and the ')} itself; leave them out")
    target = None if answer is None else one_token(model, answer)
    layers = edit.layers(model)
    rows = 1 + max(model.config.n_layers - 1, *layers)  # the final norm's input is one more
    heads = edit.n_heads(model) if over == "layer x head" else 0
    if over == "layer x head" and not heads:
        raise WorkbenchError(f"{edit} has no heads to tell apart: sweep it over=layer")
    edit.check(model, inputs)
    edit.prepare(model, layers, inputs)
    before, changes = _run(model, inputs), np.full((3, rows, max(1, heads)), np.nan)
    cells = [(n, h) for n in layers for h in range(max(1, heads))]
    answer_before = (float("nan"),) * 2 if target is None else _answer(before, target)
    for done, (n, h) in enumerate(cells, 1):
        at = dataclasses.replace(edit, layer=(n,), **({"head": (h,)} if heads else {}))
        with applied(model, [at], inputs):
            after = _run(model, inputs)
        changes[0, n, h] = _mean(after.loss - before.loss)
        if target is not None:
            changes[1:, n, h] = np.subtract(_answer(after, target), answer_before)
        if progress is not None:
            progress(done, len(cells))
    loss, logit, probability = changes if heads else changes[..., 0]
    sweep = Sweep(edit=str(edit), over=over, loss=loss, n=len(before.loss), loss_before=_mean(before.loss))
    if target is None:
        return sweep
    return dataclasses.replace(sweep, logit=logit, probability=probability, probability_before=answer_before[1])


@dataclass(frozen=True)
class _Run:
    loss: np.ndarray  # [pos - 1] nats
    last: Tensor  # [d_vocab] logits after the prompt, float64 on the CPU


def _run(model: HookedModel, inputs: Inputs) -> _Run:
    ids, normed = inputs.tokens, list[Tensor]()
    assert ids is not None
    if not isinstance(model, Transformer):  # another's head, which may be asked for the last position only
        logits = model.everywhere(ids)
        loss = next_token_loss(logits, ids, per_token=True)[0] if ids.shape[1] > 1 else logits.new_empty(0)
        return _Run(loss.double().cpu().numpy(), logits[0, -1].double().cpu())

    def last(x: Tensor, hook: Any) -> Tensor:
        normed.append(x[0, :-1])
        return x[:, -1:]

    with model.hooks([("unembed.hook_in", last)]):  # the logits of a long prompt would outweigh everything else
        logits = model(ids)
    losses = [
        -log_p.gather(-1, ids[0, 1:][at, None])[:, 0] for at, log_p in log_probabilities(model, normed[0], normed=True)
    ]
    loss = torch.cat(losses) if losses else logits.new_empty(0)
    return _Run(loss.double().cpu().numpy(), logits[0, -1].double().cpu())


def _inputs(model: HookedModel, prompt: Prompt, other: PromptLike | None, means: Means) -> Inputs:
    tables = means
    if isinstance(means, str):  # a site: from training documents of the model's run, once for each model
        known = _TABLES.setdefault(model, {})
        if means not in known:
            run = Run.open(local(model.source["path"]).parent)  # a file may say where a model is from
            ids = run.data.batch(0, max(1, MEANS_TOKENS // run.train.T), run.train.T, 0)
            device = model.embed.weight.device
            known[means] = token_means(model, means, [part.to(device) for part in ids.split(8)])
        tables = known[means]
    second = None if other is None else second_prompt(model, prompt, other).ids
    return Inputs.of(model, prompt.ids, second, tables)


_TABLES: WeakKeyDictionary[HookedModel, dict[str, TokenMeans]] = WeakKeyDictionary()


def one_token(model: HookedModel, answer: int | str) -> int:
    """The id of an answer, an id or a text; raises `BadData` for several tokens and for other ids."""
    ids = model.to_tokens(answer, prepend_bos=False)[0].tolist() if isinstance(answer, str) else [answer]
    if len(ids) != 1:
        raise BadData(f"the answer {answer!r} has {len(ids)} tokens {ids}: give one token, as text or id")
    refuse_token(model, ids[0])
    return ids[0]


def _answer(run: _Run, target: int) -> tuple[float, float]:
    """Return the answer's logit minus the mean logit of the tokens that no mask rules out, and its probability."""
    p = run.last.softmax(-1)
    return float(run.last[target] - run.last[p > 0].mean()), float(p[target])


def _mean(losses: np.ndarray) -> float:
    return float(losses.mean()) if len(losses) else float("nan")


def _likeliest(prompt: Prompt, by: Tensor, was: Tensor, now: Tensor, top: int) -> pd.DataFrame:
    ids = by.topk(min(top, len(by))).indices.tolist()
    return pd.DataFrame(
        {"id": ids, "text": prompt.strings(ids), "before": was[ids].exp().numpy(), "after": now[ids].exp().numpy()}
    )


BATCH_TOKENS = 1024  # tokens that run together, cells of the sweep being rows of a batch
APART = 0.5  # nats of logit difference between two prompts below which shares of it are mostly noise


@dataclass(frozen=True, kw_only=True)
class PatchSweep:
    """Activation patching: the share of the answer that each clean activation restores in the corrupted prompt."""

    edit: str
    restored: np.ndarray
    """[layer, position]: (d - d_corrupted) / (d_clean - d_corrupted) of the logit difference d of the two answers after the
    prompt: 0 as corrupted, 1 as clean; below 0 and above 1 are possible. NaN where there is no site."""
    clean: float  # logit difference of the clean prompt
    corrupted: float  # that of the corrupted one
    answers: tuple[str, str]  # right and wrong, as text


@torch.no_grad()
def patch_sweep(
    model: HookedModel, prompt: PromptLike, corrupted: PromptLike, answers: tuple[int | str, int | str],
    site: str = "stream", *, apart: float = APART, progress: Progress | None = None,
) -> PatchSweep:  # fmt: skip
    """The corrupted prompt with one activation of the clean one (`prompt`) at a time, at all heads of a position.

    `answers`: the token that is right after the clean prompt and the one it is compared with, ids or texts. Positions before the
    first differing token change nothing and cost nothing; the others run as rows of a batch. Stream L is the input of the final norm.

    Raises `BadData` for prompts of unequal length, for answers whose logit difference is not more than `apart` larger after the
    first prompt than after the second, and as `edited`.
    """
    clean = single_prompt(model, prompt, least=1)
    ids, others, edit = second_prompt(model, clean, corrupted).ids, clean.ids, Patch(site=site)
    T = ids.shape[1]
    if others.shape[1] != T:
        raise BadData(
            f"the first prompt has {others.shape[1]} tokens and the second {T}: patching needs as many in both; cut or"
            " lengthen one"
        )
    layers, (right, wrong) = edit.layers(model), (one_token(model, x) for x in answers)
    inputs = Inputs(tokens=ids, other=others)
    edit.prepare(model, layers, inputs)
    reached, start = (float(_lead(model, x, right, wrong)[0]) for x in (others, ids))
    if reached - start <= apart:
        raise BadData(
            f"the first answer leads the second by {reached:+.2f} after the first prompt and by {start:+.2f} after the second: it must "
            f"lead by more than {apart:g} more after its own; choose answers, or prompts, that tell them apart"
        )
    restored = np.full((1 + max(model.config.n_layers - 1, *layers), T), np.nan)
    restored[layers] = 0.0
    differing = (ids[0] != others[0]).nonzero()
    first = int(differing[0]) if len(differing) else T
    step, done, total = max(1, BATCH_TOKENS // T), 0, len(layers) * (T - first)
    for n in layers:
        (name,) = edit.points(model, n)
        for low in range(first, T, step):
            cells = range(low, min(low + step, T))

            def patch(tensor: Tensor, hook: Any, cells: range = cells) -> Tensor:
                """Set position cells[i] of row i."""
                new, source = tensor.clone(), inputs.activations["other", str(hook.name)][0]
                for row, at in zip(new, cells, strict=True):
                    row[at] = source[at].to(row)
                return new

            with model.hooks([(name, patch)]):
                lead = _lead(model, ids.expand(len(cells), -1), right, wrong)
            restored[n, cells.start : cells.stop] = (lead - start) / (reached - start)
            done += len(cells)
            if progress is not None:
                progress(done, total)
    words = clean.strings([right, wrong])
    return PatchSweep(edit=str(edit), restored=restored, clean=reached, corrupted=start, answers=(words[0], words[1]))


def _lead(model: HookedModel, ids: Tensor, right: int, wrong: int) -> np.ndarray:
    """Logit of one token minus another's after each prompt [batch]."""
    points: Any = [("unembed.hook_in", lambda x, hook: x[:, -1:])] if isinstance(model, Transformer) else []
    with model.hooks(points):
        logits = model(ids)[:, -1].double()
    return (logits[:, right] - logits[:, wrong]).cpu().numpy()
