"""One pass through the dashboard in a real headless Chromium: every page, deep link, back button, a select box, dark mode.

Screenshots go to $WORKBENCH_SCREENSHOTS, else to pytest's temporary folder; $WORKBENCH_RUNS shows that folder's runs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import dashboard
import pytest

pytestmark = pytest.mark.slow
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    f"--{flag}" for flag in ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
                             "disable-component-update", "disable-sync")
]  # fmt: skip
MAIN = Path(__file__).parent.parent / "app" / "main.py"
HARMLESS = ("/_stcore/health", "/_stcore/host-config")  # what the front end tries first below a page's own address
PAGES = {"": 4, "xray": 4, "training": 4, "depth": 1, "prompt": 3}  # address -> figures at least


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The dashboard's address."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH; `make browser` installs one")
    runs = os.environ.get("WORKBENCH_RUNS") or dashboard.populate(tmp_path_factory.mktemp("runs"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        str(MAIN),
        f"--server.port={port}",
        "--server.address=127.0.0.1",
    ]
    log = (tmp_path_factory.mktemp("log") / "server.log").open("wb")
    process = subprocess.Popen([*command, "--", "--runs", str(runs)], cwd=MAIN.parent.parent, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"{url}/_stcore/health", timeout=1):
                    break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.25)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)
        log.close()


@pytest.fixture(scope="module")
def browser(server):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def screenshots(tmp_path):
    folder = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def opened(browser, server):
    """`opened(scheme)`: a page, and the lists of what went wrong and of what left this machine."""
    contexts = []

    def make(scheme="light"):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, wrong, outside = context.new_page(), [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: m.type == "error" and "status of 404" not in m.text and wrong.append(m.text))
        page.on(
            "response",
            lambda r: r.status >= 400 and not r.url.endswith(HARMLESS) and wrong.append(f"{r.status} {r.url}"),
        )
        page.on("request", lambda r: not r.url.startswith((server, "data:", "blob:")) and outside.append(r.url))
        return page, wrong, outside

    yield make
    for context in contexts:
        context.close()


def settled(page, figures=1):
    """Wait until the script has run and the figures stand."""
    page.wait_for_function(
        f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {figures}"
        " && !document.querySelector('[data-testid=\"stStatusWidget\"]')",
        timeout=60_000,
    )
    page.wait_for_timeout(700)
    assert page.locator('[data-testid="stException"]').count() == 0


def picture(page, path):
    """The whole page, though it scrolls in a box of its own."""
    height = page.evaluate("document.querySelector('[data-testid=\"stMain\"]').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": int(height) + 20})
    page.wait_for_timeout(1200)
    page.screenshot(path=path)
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_by_deep_link_without_a_word_to_the_outside(opened, server, screenshots, scheme):
    page, wrong, outside = opened(scheme)
    for name, figures in PAGES.items():
        page.goto(f"{server}/{name}")
        settled(page, figures)
        assert page.locator('[role="dialog"]').count() == 0
        picture(page, screenshots / f"{name or 'start'}_{scheme}.png")
    assert not wrong
    assert not outside
    background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    brightness = sum(int(c) for c in background.strip("rgba()").split(",")[:3])
    assert (brightness < 384) == (scheme == "dark"), background


def test_choices_links_and_the_back_button(opened, server):
    page, wrong, _ = opened()
    page.goto(f"{server}/depth?metric=importance_entropy")
    settled(page)
    page.get_by_text("Importance entropy").first.wait_for()
    page.locator('[data-testid="stSelectbox"] input').nth(1).click()
    page.get_by_role("option", name="sink mass", exact=True).click()
    page.wait_for_url("**metric=sink_mass**")
    page.get_by_text("Sink mass").first.wait_for()
    page.go_back()
    page.wait_for_url("**metric=importance_entropy**")
    page.get_by_text("Importance entropy").first.wait_for()
    page.locator('[data-testid="stSidebar"]').get_by_role("link", name="Training").click()
    page.wait_for_url("**/training?**metric=importance_entropy**")
    settled(page)
    page.locator('[data-testid="stSidebar"]').get_by_role("link", name="Depth").click()
    page.wait_for_url("**/depth?**metric=importance_entropy**")
    settled(page)
    page.get_by_text("Importance entropy").first.wait_for()
    assert not wrong


def test_a_typed_prompt_reaches_the_models_and_the_address(opened, server):
    page, wrong, _ = opened()
    page.goto(f"{server}/prompt")
    settled(page, 3)
    box = page.locator("textarea").first
    box.fill("return values <b>now</b>")
    box.press("Control+Enter")
    page.wait_for_url("**prompt=return**")
    settled(page, 3)
    assert page.locator(".js-plotly-plot b").count() == 0
    assert not wrong
