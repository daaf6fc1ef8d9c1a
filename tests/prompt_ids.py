"""Random prompts of models with a vocabulary of 61."""

import torch

V = 61


def some_ids(T=23, seed=0):
    return torch.randint(V, (1, T), generator=torch.Generator().manual_seed(seed))
