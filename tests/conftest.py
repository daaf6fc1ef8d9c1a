"""Shared fixtures: one thread, no network, tiny models."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dashboard
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


# ---- the dashboard ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def populated(tmp_path_factory):
    """A small folder of runs with their numbers."""
    return dashboard.populate(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def folders(populated, tmp_path_factory):
    """Every kind of folder that a page may be shown."""
    made = {"populated": populated, "empty": tmp_path_factory.mktemp("empty")}
    made["missing"] = made["empty"] / "nowhere"
    made["one"] = tmp_path_factory.mktemp("one")
    dashboard.copied(populated / "text-resformer-s1", made["one"] / "text-resformer-s1")
    made["damaged"] = dashboard.damage(dashboard.copied(populated, tmp_path_factory.mktemp("d") / "runs"))
    made["half_written"] = dashboard.half_write(tmp_path_factory.mktemp("half"))
    made["foreign"] = dashboard.foreign(tmp_path_factory.mktemp("foreign"))
    return made


@pytest.fixture
def browse(monkeypatch):
    """`browse(folder, "depth", metric="...")`: the page as a browser at that address sees it, once its work is done."""
    from streamlit.testing.v1 import AppTest

    def show(folder, name="start", **address):
        monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
        monkeypatch.setattr(sys, "argv", ["main.py"])
        at = AppTest.from_file(str(dashboard.MAIN), default_timeout=60)
        if name != "start":
            at.switch_page(f"views/{name}.py")
        for key, value in address.items():
            at.query_params[key] = value if isinstance(value, list) else str(value)
        return dashboard.settled(at.run())

    return show


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    import browsing

    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=browsing.BROWSER, args=browsing.FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def screenshots(tmp_path):
    """Where pictures of pages go: $WORKBENCH_SCREENSHOTS, else a folder that pytest forgets."""
    folder = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
