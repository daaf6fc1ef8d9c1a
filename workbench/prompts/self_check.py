"""Self-check of a model on a prompt: parts sum to the stream, and no position sees the future."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.hook_names import stream_hook
from workbench.models.decomposition import By, decompose
from workbench.models.hooked import HookedModel
from workbench.prompts.attention_maps import attention_inputs, attention_map
from workbench.prompts.prompt import PromptLike, single_prompt

MAX_TOKENS = 256
ROUNDING = 1e-3  # largest relative error that float32 sums of a deep model may show


@torch.no_grad()
def check_model(model: HookedModel, prompt: PromptLike) -> pd.DataFrame:
    """A row for each check: check, error (relative, largest), holds, meaning.

    - `attention rows`: every row of the attention maps sums to 1, with what goes to no token;
    - `parts of the stream`: embedding, heads and MLPs add up to the final norm's input;
    - `value paths`: with heads split into own, first and other values, the sum is the same;
    - `causality`: a changed last token changes no earlier prediction;
    - `repeatability`: a second run gives the same logits.

    A check that does not apply to the model gives None, with the reason in `meaning`. A sum that the decomposition refuses fails.
    """
    ids = single_prompt(model, prompt).ids[:, :MAX_TOKENS]
    run = model.everywhere
    logits = run(ids)
    size = float(logits.abs().max())

    def other_end() -> float:
        changed = ids.clone()
        changed[0, -1] = (changed[0, -1] + 1) % model.config.d_vocab
        return float((run(changed)[:, :-1] - logits[:, :-1]).abs().max()) / size

    def row_error() -> float:
        try:
            inputs = attention_inputs(model, ids)
        except WorkbenchError as reason:  # an observed model that shows no attention
            raise BadData(str(reason)) from reason
        errors = []
        for layer, softmaxes in enumerate(inputs.layers):
            nulls = [s.null for s in softmaxes if s.null is not None]
            for head in range(softmaxes[0].heads):
                rows = np.nan_to_num(attention_map(inputs, layer, head, most=ids.shape[1]).weights).sum(-1)
                errors.append(float(abs(rows + sum(null[head] for null in nulls) - 1).max()))
        return max(errors)

    def sum_error(by: By) -> float:
        parts, end = decompose(model, ids, by=by), stream_hook(model.config.n_layers, model.config.n_layers)
        stream = model.run_with_cache(ids, names_filter=[end])[1][end]
        return float((sum(p.double() for p in parts.parts) - stream.double()).abs().max() / stream.abs().max())

    stream = "embedding, heads and MLPs add up to the stream that the final norm reads"
    checks = {
        "attention rows": (row_error, "each row of attention sums to 1"),
        "parts of the stream": (lambda: sum_error("head"), stream),
        "value paths": (lambda: sum_error("value_path"), "own, first and other values add up to the same"),
        "causality": (other_end, "a changed last token changes no earlier prediction"),
        "repeatability": (lambda: float((run(ids) - logits).abs().max()) / size, "a second run gives the same"),
    }
    table = []
    for name, (error_of, meaning) in checks.items():
        try:
            error = error_of()
            table.append({"check": name, "error": error, "holds": error < ROUNDING, "meaning": meaning})
        except (BadData, UnknownName) as reason:
            table.append({"check": name, "error": None, "holds": None, "meaning": f"does not apply: {reason}"})
        except WorkbenchError as reason:
            table.append({"check": name, "error": None, "holds": False, "meaning": str(reason)})
    return pd.DataFrame(table)
