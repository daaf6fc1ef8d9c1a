"""Shared fixtures: one thread, no network, tiny models."""

from __future__ import annotations

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from workbench.models import ARCHITECTURES, build

torch.set_num_threads(1)

TINY = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 61, "n_ctx": 128}


@pytest.fixture(params=list(ARCHITECTURES))
def any_architecture(request):
    """Each registered architecture in turn."""
    return request.param


@pytest.fixture
def forkserver(monkeypatch):
    """Processes of a pool come from one that has imported torch, not each from nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workbench.measuring", "workbench.training"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)


@pytest.fixture
def tiny():
    """`tiny("resformer", n_key_value_heads=2, lambda_v1=0.3)`: a small random model, matrices large enough to matter."""

    def make(architecture="transformer", *, seed=0, std=0.2, dtype=None, config=None, **options):
        return build(architecture, {**TINY, "init_std": std, **(config or {})}, seed=seed, dtype=dtype, **options)

    return make


@pytest.fixture
def awake(tiny):
    """`tiny` whose learned coefficients and gains have left their neutral start."""

    def make(architecture="transformer", **options):
        model = tiny(architecture, **options)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim < 2 or name.startswith("dwa."):
                    p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return model

    return make
