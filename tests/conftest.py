"""Shared fixtures: one thread, no network, tiny models.

What takes long to import is imported where it is used: the process that hands tests to others reads this file, and no more.
"""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import zlib
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_configure():
    """Ctrl-C reaches the processes that tests start, also in the background of a shell, which ignores it; no logs.

    What tests write need not outlive the machine.
    """
    os.fsync = lambda file: None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable(logging.WARNING)  # Streamlit logs each call outside a page, thousands of them


LONGEST = (
    "browser_everyone", "wheel", "estimating", "docs", "studies", "compile", "browser", "notebooks", "cluster", "demo",
    "browser_tasks", "gpu", "analyses", "killed", "server_visitors", "truth",
)  # fmt: skip
"""Files of minutes, taken first: what is left at the end are seconds, in which no process waits for another."""


PAGES = re.compile(
    r"test_(analyses|app|background|claims|confidence|demo|extremes|figure_outputs|kept_records|legible|measuring|pins|plots|"
    r"published|report|run_before|server|sklearn|studies|token_strip|verdict|views|workers|xray)"
)
"""Files that import pandas, plotly or streamlit and share folders of runs: one process imports and makes these things for all."""


def pytest_collection_modifyitems(items):
    """Files that share an import, a fixture or the forkserver, which takes seconds, stand together.

    Of a grid marked `fast` the cases in between become slow.
    """
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    forking = {item.path for item in items if "forkserver" in item.fixturenames}
    items.sort(
        key=lambda item: (
            order.get(item.path.stem, len(order)), item.path not in forking, not PAGES.match(item.path.stem)
        )
    )  # fmt: skip
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast"):
            grids[item.parent, item.originalname].append(item)
    for (_, name), cases in grids.items():
        most = min(cases[0].get_closest_marker("fast").args[0], len(cases))
        first = zlib.crc32(name.encode())  # others of another test, so that each case is fast somewhere
        fast = {(first + len(cases) * number // most) % len(cases) for number in range(most)}
        for number, item in enumerate(cases):
            if number not in fast:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays to the end: the collector need not walk through it, neither meanwhile nor afterwards."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.set_threshold(
        20_000, 10, 100
    )  # a file's end collects; with Python's 700 a twelfth of the time goes into looking
    gc.enable()
    return found


def pytest_collection_finish():
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what a file has imported on its way: without this a walk takes from half a second to more than one."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


PRELOADED = ["workbench.observing.observation", "workbench.studies.study_runs", "torch._dynamo", "scipy.stats"]


TINY = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 61, "n_ctx": 128}


@pytest.fixture(autouse=True, scope="session")
def without_evidence(tmp_path_factory):
    """An empty folder of runs is empty: what ships with the project is shown where a test asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EVIDENCE", "MODELS"):
            patch.setattr(f"workbench.views.source.{name}", tmp_path_factory.getbasetemp() / "nothing-shipped")
        yield


def pytest_generate_tests(metafunc):
    """`any_architecture`: those that stand for all; `any_attention`: for all that attention weights depend on; half of them are slow.

    `some_architecture`: every third of those that stand for all. Each test has others, so that each stands in many.
    """
    for name in {"any_architecture", "any_attention", "some_architecture"} & set(metafunc.fixturenames):
        import equations
        import seams

        first = zlib.crc32(metafunc.definition.name.encode())
        if name == "some_architecture":
            metafunc.parametrize(name, seams.TOGETHER[first % 3 :: 3])
            continue
        models = seams.TOGETHER if name == "any_architecture" else seams.ATTENDING
        fast = {*models[first % 2 :: 2], *(model for model in models if not equations.written(model))}
        metafunc.parametrize(
            name, [pytest.param(model, marks=() if model in fast else pytest.mark.slow) for model in models]
        )


MAIN = sys.modules["__main__"]
"""What a new process imports first; a page that Streamlit's AppTest runs takes its place and leaves a removed file there."""


@pytest.fixture
def forkserver(monkeypatch):
    """Processes of a pool come from one that has imported what they train and measure with, not each from nothing.

    It starts here and not in the pool, which delays Ctrl-C while it starts processes: they would inherit that.
    """
    multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)
    monkeypatch.setitem(sys.modules, "__main__", MAIN)


@pytest.fixture
def tiny():
    """`tiny("resformer", n_key_value_heads=2, lambda_v1=0.3)`: a small random model, matrices large enough to matter."""
    from workbench.models import build

    def make(architecture="transformer", *, seed=0, std=0.2, dtype=None, config=None, **options):
        return build(architecture, {**TINY, "init_std": std, **(config or {})}, seed=seed, dtype=dtype, **options)

    return make


@pytest.fixture
def awake(tiny):
    """`tiny` whose learned coefficients and gains have left their neutral start."""
    import torch

    def make(architecture="transformer", **options):
        model = tiny(architecture, **options)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim < 2 or name.startswith("dwa."):
                    p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return model

    return make


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A run that was trained at one go."""
    import training_runs

    run = training_runs.start(tmp_path_factory.mktemp("uninterrupted"))
    with training_runs.unchanged(run.path):
        yield run


@pytest.fixture
def forked(forkserver):
    """`forked(root)`: a training in another process, and the pipe of its steps."""
    import training_runs

    return training_runs.launched


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def measured_runs(tmp_path_factory):
    """One short run per architecture on repeated tokens, shared by all tests: their records grow."""
    import measured
    import training_runs

    runs = measured.trained(root := tmp_path_factory.mktemp("runs"))
    with training_runs.unchanged(root):
        yield runs


@pytest.fixture(scope="session")
def everything(measured_runs):
    """A run and the records of every metric and experiment on five of its documents."""
    import measured

    from workbench.measurement.measuring import measure

    return measured_runs["svformer"], measure(measured_runs["svformer"], measured.EVERYTHING, n=5, batch=2)


@pytest.fixture
def forwards(monkeypatch):
    """A list that grows with every run of any model."""
    from workbench.models.hooked import HookedModel

    calls, inner = [], HookedModel.forward
    monkeypatch.setattr(HookedModel, "forward", lambda self, *a, **k: calls.append(1) or inner(self, *a, **k))
    return calls


@pytest.fixture
def gpt():
    """A small GPT as in many a notebook, which knows nothing of the workbench."""
    import own_loop
    import torch

    torch.manual_seed(0)
    return own_loop.GPT()


@pytest.fixture
def ids():
    """Two sequences of 40 token ids below 61."""
    import torch

    return torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_memory_is_nan():
    """Whatever the kernel does not write shows as NaN."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


# ---- the dashboard ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def populated(tmp_path_factory):
    """A small folder of runs with their numbers, which all tests share: who writes into it takes a copy."""
    import dashboard

    folder = dashboard.populate(tmp_path_factory.mktemp("runs"))
    made = dashboard.listing(folder)
    yield folder
    assert dashboard.listing(folder) == made


@pytest.fixture(scope="session")
def folders(populated, tmp_path_factory):
    """Every kind of folder that a page may be shown."""
    import dashboard

    made = {"populated": populated, "empty": tmp_path_factory.mktemp("empty")}
    made["missing"] = made["empty"] / "nowhere"
    made["one"] = tmp_path_factory.mktemp("one")
    dashboard.copied(populated / "text-resformer-s1", made["one"] / "text-resformer-s1")
    made["damaged"] = dashboard.damage(dashboard.copied(populated, tmp_path_factory.mktemp("d") / "runs"))
    made["half_written"] = dashboard.half_write(tmp_path_factory.mktemp("half"))
    made["foreign"] = dashboard.foreign(tmp_path_factory.mktemp("foreign"))
    return made


@pytest.fixture(scope="session")
def scanned_once():
    """What Streamlit looks for in every installed package, anew for each page of a test, is looked for once."""
    from streamlit.components.v2 import manifest_scanner

    with pytest.MonkeyPatch.context() as patch:
        found = functools.cache(manifest_scanner.scan_component_manifests)
        patch.setattr(manifest_scanner, "scan_component_manifests", found)
        yield


@pytest.fixture(scope="session")
def dashboard_settings():
    """Streamlit is told what the dashboard's server tells it."""
    from app import streamlit_settings

    streamlit_settings.apply()


@pytest.fixture
def browse(monkeypatch, scanned_once, dashboard_settings):
    """`browse(folder, "depth", metric="...")`: the page as a browser at that address sees it, once its work is done."""
    import dashboard
    from streamlit.testing.v1 import AppTest

    from app import background_tasks
    from workbench.claims.stored_verdicts import judge_all

    monkeypatch.setattr(background_tasks, "POLL_S", 20.0)  # long work is waited for; pages that poll: test_background
    # a process of its own: test_views_start, and every page in a browser
    monkeypatch.setattr("app.cached_source.judge_apart", lambda folder, entries, progress: judge_all(entries, progress))

    def show(folder, name="start", **address):
        monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
        monkeypatch.setattr(sys, "argv", ["main.py"])
        at = AppTest.from_file(str(dashboard.MAIN), default_timeout=60)
        if name != "start":
            at.switch_page(f"screens/{name}.py")
        for key, value in address.items():
            at.query_params[key] = value if isinstance(value, list) else str(value)
        return dashboard.settled(at.run())

    return show


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    import browsing

    if browsing.BROWSER is None:
        pytest.skip(browsing.MISSING)
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=browsing.BROWSER, args=browsing.FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def shown(populated, tmp_path_factory):
    """The runs that pages show in a browser, one of them long: those of $WORKBENCH_RUNS where it is set."""
    import dashboard

    if folder := os.environ.get("WORKBENCH_RUNS"):
        return Path(folder)
    folder = dashboard.copied(populated, tmp_path_factory.mktemp("shown") / "runs")
    dashboard.run(folder, "long", "mqa", 0, "text", steps=range(dashboard.LONG))
    return folder


@pytest.fixture(scope="session")
def server(shown):
    """The address of one dashboard for all tests that only look: who writes into its runs, or wants it cold, starts another."""
    import browsing

    with browsing.served(shown) as url:
        yield url


STORED_BY_PAGES = "cookies,local_storage,indexeddb,cache_storage,service_workers"


@pytest.fixture(scope="session")
def visitor(browser):
    """One person's browser."""
    context = browser.new_context()
    yield context
    context.close()


@pytest.fixture
def new_page(browser, visitor):
    """`new_page(scheme, width, height)`: a page until the test ends, of the one visitor, or with `more` of another person's browser.

    The visitor's last page stays open, empty, and with it the process that has compiled the front end, for the next test. Nothing that
    the pages stored stays.
    """
    others, origins = [], set()

    def make(scheme="light", width=1280, height=900, **more):
        if more:
            others.append(browser.new_context(**more))
        page = (others[-1] if more else visitor).new_page()
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.on("framenavigated", lambda frame: origins.add("/".join(frame.url.split("/")[:3])))
        return page

    yield make
    for context in others:
        context.close()
    for page in visitor.pages[:-1]:
        page.close()
    for page in visitor.pages:
        page.goto("about:blank")
        session = visitor.new_cdp_session(page)
        for origin in sorted(origin for origin in origins if origin.startswith("http")):
            session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": STORED_BY_PAGES})
        session.detach()


@pytest.fixture
def opened(new_page, server):
    """`opened()`: a page; nothing may go wrong in it until the test ends."""
    import browsing

    wrong = []
    yield lambda **more: browsing.watched(new_page(**more), server, wrong, wrong)
    assert not wrong
