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
    from workbench.prompts.attribution import Attribution, logit_attribution
    from workbench.prompts.edit_effects import Effect, Over, PatchSweep, Sweep, edit_effect, edit_sweep, patch_sweep
    from workbench.prompts.flow import ValueFlow, value_flow
    from workbench.prompts.lens import Lens, Predictions, logit_lens, next_tokens
    from workbench.prompts.passages import Excerpt, excerpt, sharpest_pairs
    from workbench.prompts.paths import TokenPath, token_path
    from workbench.prompts.prompt import Prompt, PromptLike, tokenise
    from workbench.prompts.scores import ScoreAttribution, part_in_words, score_attribution, sink_attribution
    from workbench.prompts.self_check import check_model
    from workbench.prompts.tuned_lens import TunedLens, fit_tuned_lens, load_tuned_lens
    from workbench.prompts.vectors import Identity, ValueNorms, token_identity, value_norms

_MODULES = {
    "attention_maps": ("AttentionInputs", "Overview", "Pool", "Window", "attention_inputs", "attention_map", "attention_overview"),
    "attribution": ("Attribution", "logit_attribution"),
    "edit_effects": ("Effect", "Over", "PatchSweep", "Sweep", "edit_effect", "edit_sweep", "patch_sweep"),
    "flow": ("ValueFlow", "value_flow"),
    "lens": ("Lens", "Predictions", "logit_lens", "next_tokens"),
    "passages": ("Excerpt", "excerpt", "sharpest_pairs"),
    "paths": ("TokenPath", "token_path"),
    "prompt": ("Prompt", "PromptLike", "tokenise"),
    "scores": ("ScoreAttribution", "part_in_words", "score_attribution", "sink_attribution"),
    "self_check": ("check_model",),
    "tuned_lens": ("TunedLens", "fit_tuned_lens", "load_tuned_lens"),
    "vectors": ("Identity", "ValueNorms", "token_identity", "value_norms"),
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
