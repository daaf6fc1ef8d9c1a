"""One logit taken apart: into layers, these into heads, these by where their values come from; each level sums to it.

parts = logit_attribution(model, ids, position=-1, token=answer, against=other) parts.frame.query("level == 'head' and layer == 3")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from workbench.errors import BadData, WorkbenchError
from workbench.models.decomposition import TOLERANCE, By, anatomy_of, decompose, label_parts
from workbench.models.hooked import HookedModel, refuse_token
from workbench.prompts.prompt import PromptLike, cached_run, one_position, single_prompt

LEVELS: tuple[By, ...] = ("layer", "head", "value_path")
COLUMNS = ["level", "part", "layer", "head", "path", "value"]


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Parts of a logit, or of the difference of two, by direct effect."""

    position: int
    token: str
    against: str | None
    frame: pd.DataFrame
    """A row for each part of each level.

    level: `layer`, `head` or `value_path`; part: `embed`, `attn`, `mlp` or `bias` (what the final norm and the head of an
    observed model add by themselves); layer and head, absent where they do not apply (an `attn` without a head beside heads is
    what W_O adds by itself); path: `own`, `first`, `source.<j>`, `table`, `cross`, ..., of the last level; value in logits.
    """
    logit: float  # what the model computed
    totals: dict[str, float]  # sum of the parts of each level
    notes: list[str] = field(default_factory=list)  # levels that an observed model does not show, and why

    @property
    def error(self) -> float:
        """Largest distance between a level's sum and the logit."""
        return max(abs(total - self.logit) for total in self.totals.values())


@torch.no_grad()
def logit_attribution(
    model: HookedModel, prompt: PromptLike, position: int, token: int, against: int | None = None
) -> Attribution:
    """Logit attribution: the contributions of embedding, attention, MLPs, heads and value paths to a logit at one position.

    The final norm's scale is frozen. Indirect effects count for the later layers. Costs one run and, for each value
    path of a layer, its attention once more: O(L T^2 d_model) time and O(L T d_model) memory, no T x T array. Observed
    models need one more run on the example tokens, and patterns of layers that do not show queries and keys. Raises
    `BadData` for a position outside the prompt, an id outside the vocabulary, or an observed model that cannot be
    decomposed. Raises `WorkbenchError` if the parts do not sum to the logit, for example because a hook changed the stream.
    """
    prompt, n_layers = single_prompt(model, prompt), model.config.n_layers
    at = one_position(prompt.ids.shape[1], position)
    chosen = [token] if against is None else [token, against]
    for i in chosen:
        refuse_token(model, i)
    anatomy = anatomy_of(model)
    levels, names, notes = list[By](), list[str](), list[str]()
    for by in LEVELS:
        try:
            names += anatomy.needed(by, n_layers, frozen=True)
            levels.append(by)
        except BadData as reason:
            if by == "layer":
                raise
            notes.append(f"No parts by {by.replace('_', ' ')}: {reason}.")
    logits, cache = cached_run(model, prompt.ids, names, slice(at, at + 1))
    row = logits[0, 0].double()
    logit = float(row[token] - (0.0 if against is None else row[against]))
    if row[chosen].isinf().any():
        raise BadData(
            f"the logits of tokens {chosen} are {row[chosen].tolist()}: a token that the model rules out has no parts"
        )
    rows: list[dict[str, Any]] = []
    for by in levels:
        parts = decompose(
            model, cache, to="logits", by=by, tokens=token, against=against, pos=(at, at + 1), anatomy=anatomy
        )
        for label, value in zip(parts.labels, parts.parts[:, 0, 0].tolist(), strict=True):
            rows.append(dict(zip(COLUMNS, (by, *label_parts(label), value), strict=True)))
    frame = pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64", "head": "Int64", "path": "string"})
    strings = prompt.strings(chosen)
    found = Attribution(
        position=at, token=strings[0], against=None if against is None else strings[1], frame=frame, logit=logit,
        totals={by: float(frame.loc[frame["level"] == by, "value"].sum()) for by in levels}, notes=notes,
    )  # fmt: skip
    size = float(frame.loc[frame["level"] == "layer", "value"].abs().sum())
    if not found.error <= 2 * TOLERANCE[model.embed.weight.dtype] * max(size, *row[chosen].abs().tolist()):
        raise WorkbenchError(
            f"the parts sum to {found.totals['layer']:.6g}, the model computed {logit:.6g}: a hook changed it"
        )
    return found
