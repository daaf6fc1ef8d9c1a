"""Analyses of one model on one tokenised prompt; torch is imported at first use.

from workbench import prompts

lens = prompts.logit_lens(model, "def main():", top=5)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.prompts.attention_maps import (
        AttentionInputs,
        Overview,
        Pool,
        Window,
        attention_inputs,
        attention_map,
        attention_overview,
    )
    from workbench.prompts.attention_passages import Excerpt, excerpt, sharpest_pairs
    from workbench.prompts.attention_score import ScoreAttribution, part_in_words, score_attribution, sink_attribution
    from workbench.prompts.attribution_of_logits import Attribution, logit_attribution
    from workbench.prompts.edit_effects import Effect, Over, PatchSweep, Sweep, edit_effect, edit_sweep, patch_sweep
    from workbench.prompts.lens_and_next_tokens import Lens, Predictions, logit_lens, next_tokens
    from workbench.prompts.path_of_token import TokenPath, ValueFlow, token_path, value_flow
    from workbench.prompts.prompt import Prompt, PromptLike, tokenise
    from workbench.prompts.self_check import check_model
    from workbench.prompts.tuned_lens import TunedLens, fit_tuned_lens, load_tuned_lens
    from workbench.prompts.value_norms_and_identity import Identity, ValueNorms, token_identity, value_norms

_MODULES = {
    "attention_maps": ("AttentionInputs", "Overview", "Pool", "Window", "attention_inputs", "attention_map", "attention_overview"),
    "attribution_of_logits": ("Attribution", "logit_attribution"),
    "edit_effects": ("Effect", "Over", "PatchSweep", "Sweep", "edit_effect", "edit_sweep", "patch_sweep"),
    "lens_and_next_tokens": ("Lens", "Predictions", "logit_lens", "next_tokens"),
    "attention_passages": ("Excerpt", "excerpt", "sharpest_pairs"),
    "path_of_token": ("TokenPath", "ValueFlow", "token_path", "value_flow"),
    "prompt": ("Prompt", "PromptLike", "tokenise"),
    "attention_score": ("ScoreAttribution", "part_in_words", "score_attribution", "sink_attribution"),
    "self_check": ("check_model",),
    "tuned_lens": ("TunedLens", "fit_tuned_lens", "load_tuned_lens"),
    "value_norms_and_identity": ("Identity", "ValueNorms", "token_identity", "value_norms"),
}  # fmt: skip
__all__ = [
    "AttentionInputs", "Attribution", "Effect", "Excerpt", "Identity", "Lens", "Over", "Overview", "PatchSweep",
    "Pool", "Predictions", "Prompt", "PromptLike", "ScoreAttribution", "Sweep", "TokenPath", "TunedLens", "ValueFlow", "ValueNorms",
    "Window", "attention_inputs", "attention_map", "attention_overview", "check_model", "edit_effect", "edit_sweep", "excerpt",
    "fit_tuned_lens", "load_tuned_lens", "logit_attribution", "logit_lens", "next_tokens", "part_in_words", "patch_sweep",
    "score_attribution", "sharpest_pairs", "sink_attribution", "token_identity", "token_path", "tokenise", "value_flow", "value_norms",
]  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a checker sees the functions themselves

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'workbench.prompts' has no attribute {name!r}")
        return getattr(importlib.import_module(f"workbench.prompts.{_HOMES[name]}"), name)
