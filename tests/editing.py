"""What tests of edits share: prompts of models with a vocabulary of 61, and what a finished edit would leave behind."""

import torch


def some_tokens(n=2, T=16, seed=0):
    return torch.randint(61, (n, T), generator=torch.Generator().manual_seed(seed))


def hooks_standing(model):
    """Names of modules with anything attached that a finished edit would leave."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or {"attend", "softmaxes"} & set(module.__dict__)
    ]
