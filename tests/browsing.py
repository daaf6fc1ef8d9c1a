"""A real browser for the tests of the dashboard, and the dashboard as `workbench app` starts it."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
from pathlib import Path

import pytest

from workbench.cli import dashboard_process

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MODEL_A = "a=text-resformer-s0&step=20"
MISSING = "no chromium, chromium-browser or google-chrome on PATH; `make browser` installs one"
FLAGS = [
    f"--{flag}" for flag in ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
                             "disable-component-update", "disable-sync", "process-per-site")
]  # fmt: skip
"""One process for all pages of a person: 1.5 CPU seconds for a page whose scripts are compiled, 3.5 in a process of its own."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port, path, host=None, method="GET", **headers):
    """The answer of the dashboard on a port to one request, and its body."""
    wire = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    wire.request(method, path, headers=headers if host is None else {"Host": host} | headers)
    answer = wire.getresponse()
    body = answer.read()
    wire.close()
    return answer, body


def connected(port, origin):
    """The status of asking for a page's wire, as a browser asks on behalf of a page."""
    asked = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    wire = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    wire.request("GET", "/_stcore/stream", headers=asked | key | ({} if origin is None else {"Origin": origin}))
    status = wire.getresponse().status
    wire.close()
    return status


@contextlib.contextmanager
def served(runs):
    """Address of a dashboard that shows these runs; skips where there is no browser to open it with."""
    if BROWSER is None:
        pytest.skip(MISSING)
    server = dashboard_process.serve(runs, free_port())
    try:
        yield server.url
    finally:
        dashboard_process.stop(server)


def watched(page, server, wrong, outside):
    """Note what goes wrong in a page, and what leaves this machine."""
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: m.type == "error" and wrong.append(m.text))
    page.on("response", lambda r: r.status >= 400 and wrong.append(f"{r.status} {r.url}"))
    page.on("request", lambda r: not r.url.startswith((server, "data:", "blob:")) and outside.append(r.url))
    return page


def insist(*steps):
    """Do steps that a page which is still being drawn may undo, such as opening a list and choosing from it: again, a few times."""
    from playwright.sync_api import TimeoutError as Late

    for last in (False, False, False, False, True):
        try:
            for step in steps:
                step(timeout=5000)
        except Late:
            if last:
                raise
        else:
            return


def settled(page, figures=1):
    """Wait until the script has run, no work is under way and the figures stand."""
    page.wait_for_timeout(250)
    page.wait_for_function(
        f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {figures}"
        " && document.querySelector('[data-testid=\"stApp\"]')?.dataset.testScriptState === 'notRunning'"
        " && !document.querySelector('[class*=\"st-key-cancel_\"]')"
    )
    page.wait_for_timeout(300)
    assert page.locator('[data-testid="stException"]').all_inner_texts() == []


def at(page, server, address, figures):
    """Open an address with models to look at, and wait until it is drawn."""
    joint = "&" if "?" in address else "?"
    page.goto(f"{server}/{address}{'' if 'a=' in address else joint + MODEL_A}")
    settled(page, figures)
    if address.startswith("attention"):
        page.locator(".attention .map canvas").first.wait_for()


def files_of(page, view):
    """Open the menu of a figure; the part of the page that holds it."""
    page.locator(f".st-key-open_{view} button").first.click()
    panel = page.locator('[data-testid="stPopoverBody"]')
    panel.get_by_role("button", name="Numbers (CSV)").wait_for()
    return panel


def downloaded(page, button):
    """Name and text of the file behind a button; clicked again where the page took the first click for another place."""
    found = []

    def click(timeout):
        with page.expect_download(timeout=timeout) as download:
            button.click(timeout=timeout)
        found.append(download.value)

    insist(click)
    return found[0].suggested_filename, Path(found[0].path()).read_text(encoding="utf-8")


def picture(page, name):
    """The whole page, though it scrolls in a box of its own, into $WORKBENCH_SCREENSHOTS where that is set."""
    if not (folder := os.environ.get("WORKBENCH_SCREENSHOTS")):
        return
    height = page.evaluate("document.querySelector('[data-testid=\"stMain\"]').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": int(height) + 20})
    page.wait_for_timeout(700)
    page.screenshot(path=Path(folder) / name)
    page.set_viewport_size({"width": 1280, "height": 900})


def drawn(page, key, axis="y", trace=0):
    """Numbers of a figure's trace, as the browser holds them."""
    return page.evaluate(
        "([key, axis, trace]) => Array.from(document.querySelector(`.st-key-${key} .js-plotly-plot`)._fullData[trace][axis], Number)",
        [key, axis, trace],
    )


def pick(page, label, option):
    box = page.locator(f'[data-testid="stSelectbox"]:has-text("{label}") input').first
    insist(box.click, page.get_by_role("option", name=option, exact=True).click)


def typed(page, text, area=0):
    box = page.locator("textarea").nth(area)
    box.fill(text)
    box.press("Control+Enter")
