"""Activation patching between two prompts: what each activation of the first brings back of its answer in the second.

    patch_sweep(model, clean, corrupted, (" Paris", " Rome"))

Source: Meng et al. (2022); Wang et al. (2023); normalised as in Zhang and Nanda (2024), Towards Best Practices of Activation
Patching.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.interventions.edits.base import Inputs
from workbench.interventions.edits.patch import Patch
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer
from workbench.prompts.edit_effects import Progress, one_token
from workbench.prompts.tokens import PromptLike, second_prompt, single_prompt

BATCH_TOKENS = 1024  # tokens that run together, cells of the sweep being rows of a batch
APART = 0.5  # nats of logit difference between two prompts below which shares of it are mostly noise


@dataclass(frozen=True, kw_only=True)
class PatchSweep:
    """Activation patching: the share of the answer that each clean activation restores in the corrupted prompt."""

    edit: str
    restored: np.ndarray
    """[layer, position]: (d - d_corrupted) / (d_clean - d_corrupted) of the logit difference d of the two answers after the
    prompt: 0 as corrupted, 1 as clean; below 0 and above 1 are possible. NaN where there is no site."""
    clean: float
    """Logit difference of the clean prompt."""
    corrupted: float
    """That of the corrupted one."""


@torch.no_grad()
def patch_sweep(
    model: HookedModel, prompt: PromptLike, corrupted: PromptLike, answers: tuple[int | str, int | str],
    site: str = "stream", *, apart: float = APART, progress: Progress | None = None,
) -> PatchSweep:  # fmt: skip
    """The corrupted prompt with one activation of the clean one (`prompt`) at a time, at all heads of a position.

    `answers`: the token that is right after the clean prompt and the one it is compared with, ids or texts. Positions before
    the first differing token change nothing and cost nothing; the others run as rows of a batch. Stream L is the input of
    the final norm.

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
    first = _first_difference(ids, others)
    step, done, total = max(1, BATCH_TOKENS // T), 0, len(layers) * (T - first)
    for n in layers:
        (name,) = edit.points(model, n)
        for low in range(first, T, step):
            cells = range(low, min(low + step, T))
            patch = partial(_one_in_each, source=inputs.activations["other", name][0], positions=cells)
            with model.hooks([(name, patch)]):
                lead = _lead(model, ids.expand(len(cells), -1), right, wrong)
            restored[n, cells.start : cells.stop] = (lead - start) / (reached - start)
            done += len(cells)
            if progress is not None:
                progress(done, total)
    return PatchSweep(edit=str(edit), restored=restored, clean=reached, corrupted=start)


def _one_in_each(tensor: Tensor, hook: Any, source: Tensor, positions: range) -> Tensor:
    """Row i of [len(positions), pos, ...] with positions[i] of `source` [pos, ...]."""
    new = tensor.clone()
    for row, at in zip(new, positions, strict=True):
        row[at] = source[at].to(row)
    return new


def _lead(model: HookedModel, ids: Tensor, right: int, wrong: int) -> np.ndarray:
    """Logit of one token minus another's after each prompt [batch]."""
    points: Any = [("unembed.hook_in", lambda x, hook: x[:, -1:])] if isinstance(model, Transformer) else []
    with model.hooks(points):
        logits = model(ids)[:, -1].double()
    return (logits[:, right] - logits[:, wrong]).cpu().numpy()


def _first_difference(ids: Tensor, others: Tensor) -> int:
    """The first position at which two prompts [1, pos] differ; their length where they do not."""
    differing = (ids[0] != others[0]).nonzero()
    return int(differing[0]) if len(differing) else ids.shape[1]
