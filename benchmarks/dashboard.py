"""How fast and how heavy the dashboard is, in a real headless Chromium: on 1,000 generated runs, and on two models of the demo.

    OMP_NUM_THREADS=1 python benchmarks/dashboard.py [--quick] [--slack 1.3]

The runs: 20 architectures x 50 seeds, 50 checkpoints each, with as much telemetry and as many records as the demo's text runs
have; weights and tables are hard links, so they take seconds to make. A click lasts from the pointer going down to the
last change of the page. Records are read from the runs and from the server's caches, and nothing is measured.
A page with a heading alone shows the toolkit's own cost. The limits belong to a machine that paints it within `FLOOR`; on a slower
machine they grow in proportion. Bytes are what the server sends for a view: websocket frames and HTTP,
without the front end's own files. The two models have the demo's shape and read a text of 512 tokens that the server has not seen.
Memory is the server's resident set at the end. Times are medians of `REPEATS`; other work on the machine adds to them, so `--slack`
widens their limits further, but not those of bytes and memory. Exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from dashboard_runs import generate, prose
from playwright.sync_api import Error, Page, expect, sync_playwright

from workbench.claims import stored_verdicts
from workbench.runs.run import Run
from workbench.runs.sqlite_index import INDEX
from workbench.views.prompt import LENS

CLICK, WORST, PAINT, PROMPT = 0.3, 0.5, 0.8, 1.0  # seconds; of clicks the median and the slowest
COLD, COLD_FIGURE, SERVER = (
    1.5,
    3.0,
    0.1,
)  # seconds to words and to figures of a server that has just started; CPU seconds of a click
FLOOR = 0.85  # seconds, of a page with nothing but a heading
BYTES, MEMORY = 500_000, 1024  # of a view; MiB of the server
REPEATS, TOKENS, STEP_MS = 5, 512, 5000
SHARE = 0.5  # of the CPU time of a bare page: a paint above it, and a click
PAGES = {  # least number of SVGs of figures, select box ("" for radio buttons), options to click in turn
    "start": (3, "", ("Runs", "Main result")),
    "training": (3, "", ("Learning rate and throughput", "Loss")),
    "depth": (3, "Measure", ("sink mass", "row entropy")),
    "attention": (0, "Layer", ("1", "0")),
    "heads": (3, "Sort", ("highest first", "lowest first")),
    "prompt": (6, "", ("Logit lens", "Next token")),
    "intervene": (6, "", ("Sweep", "Edits")),
}
BARE = "import streamlit as st\n\nst.title('bare')\n"
PLAIN = """
import json
from pathlib import Path

import plotly.graph_objects as go
import streamlit as st

st.title("plain")
page = json.loads((Path(__file__).parent / f"{st.query_params['page']}.json").read_text())
options = list(page["figures"])
if page["label"]:
    shown = st.selectbox(page["label"], options)
else:
    shown = st.segmented_control("Figures", options, default=options[0])
for number, (traces, layout) in enumerate(page["figures"][shown]):
    st.plotly_chart(go.Figure(traces, layout), key=str(number))
"""
TRACES = """() => Array.from(document.querySelectorAll('.js-plotly-plot')).filter((div) => div._fullData).map((div) => {
  const plain = (value) => value?.length === undefined || typeof value === 'string' ? value : Array.from(value, plain);
  const chosen = (from, keys) => Object.fromEntries(keys.filter((key) => from[key] != null).map((key) => [key, plain(from[key])]));
  const axes = Object.entries(div._fullLayout).filter(([key]) => /^[xy]axis\\d*$/.test(key));
  const layout = Object.fromEntries(axes.map(([key, axis]) => [key, chosen(axis, ['domain', 'anchor', 'type'])]));
  const kinds = ['type', 'mode', 'orientation', 'xaxis', 'yaxis', 'x', 'y', 'z'];
  return [div._fullData.map((trace) => chosen(trace, kinds)), {height: div._fullLayout.height, ...layout}];
})"""
"""Figure's traces without their style, and a layout with its height and its axes' places alone."""
ROOT = Path(__file__).parent.parent
FLAGS = [f"--{flag}" for flag in ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
                                  "disable-component-update", "disable-sync")]  # fmt: skip

# ---- server and browser ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(runs: Path, script: Path | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of the dashboard, or of another script."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    streamlit = ["streamlit", "run", str(script), f"--server.port={port}", "--server.address=127.0.0.1"]
    ours = ["app.server", f"--port={port}", "--runs", str(runs)]
    command = [sys.executable, "-m", *(streamlit if script else ours)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/_stcore/health", timeout=1):
                break
            time.sleep(0.25)
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=20)


WATCH = """
window.__last = 0; window.__heard = 0; window.__asked = 0; window.__words = 0; window.__figure = 0;
for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => { window.__asked = performance.now(); }, true);
window.WebSocket = class extends WebSocket { // a run that is quick is never seen as running, but it is answered
  constructor(...asked) { super(...asked); this.addEventListener("message", () => { window.__heard = performance.now(); }); }
};
new MutationObserver((found) => {
  if (!found.some((m) => m.target.closest?.('[data-testid="stMain"]') || m.target.parentElement?.closest('[data-testid="stMain"]'))) return;
  window.__last = performance.now();
  if (!window.__words && document.querySelector('[data-testid="stMain"] [data-testid="stHeading"]')) window.__words = window.__last;
  if (!window.__figure && document.querySelector('.js-plotly-plot .main-svg')) window.__figure = window.__last;
}).observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
"""
QUIET = """([asked, figures]) => window.__last > asked && window.__heard > asked && performance.now() - window.__last > 600
  && document.querySelectorAll('.js-plotly-plot .main-svg').length >= figures
  && document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState === 'notRunning'
  && !document.querySelector('[class*="st-key-cancel_"]')"""


@dataclass(frozen=True)
class Change:
    """What one press did."""

    seconds: float  # to the last change of the page
    bytes: int  # that the server sent
    server: float  # CPU seconds
    browser: float  # CPU seconds


def cpu(process: psutil.Process) -> float:
    """CPU seconds of a process and those it started."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


class Browser:
    """A page whose changes are timed and whose bytes are counted."""

    def __init__(self, page: Page, server: psutil.Process) -> None:
        self.page, self.server, self.bytes, self.urls = page, server, 0, dict[str, str]()
        page.add_init_script(WATCH)
        page.set_default_timeout(120_000)
        wire = page.context.new_cdp_session(page)
        wire.send("Network.enable")
        wire.on("Network.webSocketFrameReceived", self._frame)
        wire.on("Network.responseReceived", lambda e: self.urls.__setitem__(e["requestId"], e["response"]["url"]))
        wire.on("Network.loadingFinished", self._loaded)

    def _frame(self, event: dict[str, Any]) -> None:
        frame = event["response"]
        self.bytes += len(frame["payloadData"]) * (3 if frame["opcode"] == 2 else 4) // 4

    def _loaded(self, event: dict[str, Any]) -> None:
        path = urlsplit(self.urls.get(event["requestId"], "")).path
        if "/static/" not in path and ("/_stcore/" in path or "/media/" in path):
            self.bytes += int(event["encodedDataLength"])

    def settle(self, asked: float = 0.0, figures: int = 1) -> float:
        """Wait until nothing changes any more; seconds from `asked` (milliseconds of the page's clock) to the last change."""
        self.page.wait_for_function(QUIET, arg=[asked, figures])
        return (self.page.evaluate("window.__last") - asked) / 1e3

    def open(self, address: str, figures: int = 1) -> float:
        """Go to an address; seconds from the start of the navigation to the last change."""
        self.page.goto(address)
        return self.settle(0.0, figures)

    def after(self, act: Callable[[], object], figures: int = 1) -> Change:
        """Return the change that the last press in `act` causes; the CPU time covers all of `act`."""
        before, server, here = self.bytes, cpu(self.server), cpu(psutil.Process())
        act()
        seconds = self.settle(self.page.evaluate("window.__asked"), figures)
        server = cpu(self.server) - server
        return Change(seconds, self.bytes - before, server, cpu(psutil.Process()) - here - server)


@contextlib.contextmanager
def chromium(server: psutil.Process) -> Iterator[Callable[[], Browser]]:
    """`new()`: a page in a fresh context."""
    path = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield lambda: Browser(browser.new_context(viewport={"width": 1280, "height": 900}).new_page(), server)
        browser.close()


# ---- what is measured ------------------------------------------------------------------------------------------------


class Findings:
    """Lines of a table, each with its limit."""

    def __init__(self, slack: float) -> None:
        self.asked, self.slack, self.broken = slack, slack, list[str]()
        print(f"{'':64s} {'measured':>12s} {'limit':>12s}", flush=True)

    def scale(self, bare: float) -> None:
        """Widen the limits of seconds, until the next call, for a machine on which a bare page takes longer than `FLOOR`."""
        self.add("a page with nothing but a heading: first paint of a warm server", bare, "s")
        self.slack = self.asked * max(1.0, bare / FLOOR)
        self.add("limits of seconds are widened by", self.slack, "")

    def changes(self, what: str, changes: Sequence[Change], limit: float | None) -> None:
        """Medians of what presses led to, the slowest of clicks, and the most bytes."""
        clicked = limit == CLICK
        self.add(f"{what}, press to drawn", statistics.median(c.seconds for c in changes), "s", limit)
        if clicked:
            self.add("  the slowest", max(c.seconds for c in changes), "s", WORST)
        self.add(
            "  of it on a core: the server",
            statistics.median(c.server for c in changes),
            "s",
            SERVER if clicked else None,
        )
        self.add("  of it on a core: the browser", statistics.median(c.browser for c in changes), "s")
        self.add("  bytes sent", max(c.bytes for c in changes), "bytes", BYTES)

    def add(self, what: str, value: float, unit: str, limit: float | None = None) -> None:
        allowed = None if limit is None else limit * self.slack if unit == "s" else limit
        bad = allowed is not None and value > allowed
        told = "" if allowed is None else f"{allowed:,.3g} {unit}"
        print(f"{what:64s} {f'{value:,.3g} {unit}':>12s} {told:>12s}{'  BROKEN' if bad else ''}", flush=True)
        if bad:
            self.broken.append(what)


def pick(page: Page, label: str, option: str) -> None:
    """Choose an option of a select box, until the server has answered the press and the box says that it is chosen.

    A press on a list that is drawn anew under the pointer is lost: nothing follows it that could be waited for, so it is done
    again. The list is narrowed first, as a long one holds only what is in sight.
    """
    box = page.locator(f'[data-testid="stSelectbox"]:has-text("{label}") input').first
    wanted, last = page.get_by_role("option", name=option, exact=True), None
    for _ in range(5):
        try:
            box.fill(option, timeout=STEP_MS)
            wanted.click(timeout=STEP_MS)
            page.wait_for_function("window.__heard > window.__asked", timeout=STEP_MS)
            expect(box).to_have_value(option, timeout=STEP_MS)
        except (Error, AssertionError) as error:
            last = error
            page.keyboard.press("Escape")
        else:
            return
    raise SystemExit(f"{label}: {option} could not be chosen: {last}")


def bare(found: Findings, repeats: int) -> None:
    """The floor of a first paint, a page of the same toolkit that holds one heading and nothing else: what limits are held against."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "bare.py"
        script.write_text(BARE, encoding="utf-8")
        with serving(Path(scratch), script) as (address, process), chromium(process) as new:
            words = []
            for _ in range(repeats + 1):
                browser = new()
                browser.open(address, 0)
                words.append(browser.page.evaluate("window.__words") / 1e3)
                browser.page.context.close()
    found.scale(statistics.median(words[1:]))


def every_page(found: Findings, repeats: int) -> None:
    """CPU time of a first paint and of a click on every page, above two pages of the toolkit.

    The bare page has a heading. The plain page also has what takes most of a browser's time whoever draws it: the own page's traces
    as Plotly draws them by default, and one widget that swaps them. The folder has no runs, so pages show what ships. Bare, own and
    plain pages alternate, and the server has shown the page before. The time is that of the server's and the browser's processes:
    other work on the machine changes it less than seconds on the clock.
    """
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        scripts = {"bare": BARE, "plain": PLAIN}
        for kind, text in scripts.items():
            (Path(scratch) / f"{kind}.py").write_text(text, encoding="utf-8")
        servers = {
            kind: stack.enter_context(serving(Path(scratch), Path(scratch) / f"{kind}.py" if kind in scripts else None))
            for kind in ("bare", "own", "plain")
        }
        new = stack.enter_context(chromium(servers["own"][1]))
        for name, (figures, label, options) in PAGES.items():
            changes = defaultdict[str, list[Change]](list)
            drawn = Path(scratch) / f"{name}.json"
            for _ in range(repeats + 1):
                for kind, (address, process) in servers.items():
                    link = {"bare": "", "own": name, "plain": f"?page={name}"}[kind]
                    browser = new()
                    browser.server = process
                    browser.page.set_default_timeout(600_000)  # the first visit of Heads reads validation text
                    opening = functools.partial(browser.page.goto, f"{address}/{link}")
                    changes[kind].append(browser.after(opening, 0 if kind == "bare" else figures))
                    traces = {"first": browser.page.evaluate(TRACES)}
                    for option in options if kind != "bare" else ():
                        act = functools.partial(pick, browser.page, label, option)
                        if not label:
                            act = browser.page.get_by_role("radio", name=option, exact=kind == "plain").click
                        changes[f"{kind} click"].append(browser.after(act, 0))
                        traces[option] = browser.page.evaluate(TRACES)
                    if kind == "own" and not drawn.exists():
                        drawn.write_text(json.dumps({"label": label, "figures": traces}), encoding="utf-8")
                    browser.page.context.close()
            costs = {
                kind: [statistics.median(values) for values in zip(*((c.server, c.browser) for c in each), strict=True)]
                for kind, each in ((kind, each[len(each) // (repeats + 1) :]) for kind, each in changes.items())
            }
            floor = sum(costs["bare"])
            found.add(f"{name}: a bare page, server and browser", floor, "CPU s")
            for what, own, others in (
                ("paint", "own", {"the bare page": costs["bare"], "a page of plain figures": costs["plain"]}),
                ("click", "own click", {"nothing": [0.0, 0.0], "a click on plain figures": costs["plain click"]}),
            ):
                for other, (server, painted) in others.items():
                    above = costs[own][0] - server, costs[own][1] - painted
                    found.add(f"{name}: {what} above {other}, the server", above[0], "CPU s")
                    found.add("  the browser", above[1], "CPU s")
                    found.add("  both, of the bare page", sum(above) / floor, "", SHARE)


def many_runs(found: Findings, series: int, seeds: int, checkpoints: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        start = time.perf_counter()
        generate(runs, series, seeds, checkpoints)
        print(f"{series * seeds} runs of {checkpoints} checkpoints, made in {time.perf_counter() - start:.0f} s")
        views = {"start": "?show=here", "finding": "?show=finding", "training": "training", "depth": "depth"}
        figures_of = {"start": 0}  # figures at least, one where it is not said
        with serving(runs) as (address, process), chromium(process) as new:
            for name, link in views.items():  # thousands of small tables, once for all servers to come
                new().open(f"{address}/{link}", figures_of.get(name, 1))
            found.add("the first reading of these runs, on a core of the server", cpu(process), "s")
        for name, link in views.items():
            with serving(runs) as (address, process), chromium(process) as new:
                browser = new()
                browser.open(f"{address}/{link}", figures_of.get(name, 1))
                words, figure = browser.page.evaluate("[window.__words, window.__figure]")
                found.add(f"{name}: first visit of a server that has just started, words", words / 1e3, "s", COLD)
                found.add(f"{name}: the same, the first figure", figure / 1e3, "s", COLD_FIGURE)
        bare(found, repeats)
        with serving(runs) as (address, process), chromium(process) as new:
            for name, link in views.items():
                new().open(f"{address}/{link}", figures_of.get(name, 1))
            for name, link in views.items():
                url, figures, pages = f"{address}/{link}", figures_of.get(name, 1), []
                for _ in range(repeats):
                    browser = new()
                    browser.open(url, figures)
                    told = browser.page.evaluate("[window.__words, window.__figure, window.__last]")
                    pages.append((*told, browser.bytes))
                    browser.page.context.close()
                words, figure, last, size = (statistics.median(column) for column in zip(*pages, strict=True))
                found.add(f"{name}: first paint of a warm server, words", words / 1e3, "s", PAINT)
                found.add(f"{name}: the same, the first figure", figure / 1e3, "s")
                found.add(f"{name}: the same, all of it", last / 1e3, "s")
                found.add(f"{name}: bytes of the view", size, "bytes", BYTES)
            clicks(found, new(), address, repeats)
            memory = process.memory_info().rss / 2**20
            found.add("memory of the server", memory, "MiB", MEMORY)
            loaded = "torch" in " ".join(m.path for m in process.memory_maps())
            found.add("libraries of models loaded by pages of tables", int(loaded), "", 0)
            index = [p.name for p in runs.iterdir() if p.is_file()]
            found.add(f"index files ({', '.join(index)})", len(index), "", 1)
            judged(found, new(), address, "for the first time")
        with serving(runs) as (address, process), chromium(process) as new:
            new().open(f"{address}/?show=verdicts")
            words = statistics.median(new().open(f"{address}/?show=verdicts") for _ in range(repeats))
            found.add("verdicts: what was judged before, all of it", words, "s")
        (runs / INDEX).unlink()
        (runs / stored_verdicts.FILE).unlink()
        with serving(runs) as (address, process), chromium(process) as new:
            judged(found, new(), address, "before any page has read the runs")


def judged(found: Findings, browser: Browser, address: str, when: str) -> None:
    """Every claim put to all runs, in a process that the server starts."""
    most, server, began = 0, browser.server, time.perf_counter()
    before = cpu(server)
    browser.page.goto(f"{address}/?show=verdicts")
    while not browser.page.locator(".js-plotly-plot .main-svg").count():
        with contextlib.suppress(psutil.NoSuchProcess):
            most = max([most, *(p.memory_info().rss for p in server.children(recursive=True))])
        browser.page.wait_for_timeout(50)
    found.add(f"verdicts: judged {when}, until the figure", time.perf_counter() - began, "s")
    found.add("  of it on a core: the server", cpu(server) - before, "s")
    found.add("  memory of the process that judges", most / 2**20, "MiB", MEMORY)
    found.add("  memory of the server after it", server.memory_info().rss / 2**20, "MiB", MEMORY)


def clicks(found: Findings, browser: Browser, address: str, repeats: int) -> None:
    """Clicks between two things that were both seen before."""
    page = browser.page

    def measure(name: str) -> Callable[[], object]:
        return lambda: pick(page, "Measure", name)

    def seed(name: str) -> Callable[[], object]:
        return lambda: pick(page, "Seed", name)

    def part(name: str) -> Callable[[], object]:
        return lambda: page.get_by_role("radio", name=name).click()

    for name, what, acts in (
        ("depth", "another measure", (measure("sink mass"), measure("token identity share"))),
        ("depth", "one seed, all seeds", (seed("3"), seed("all"))),
        ("training", "another part", (part("Gradients"), part("Loss"))),
    ):
        browser.open(f"{address}/{name}")
        told(found, browser, f"{name}: {what}, seen before", acts, repeats, CLICK)


def told(
    found: Findings, browser: Browser, what: str, acts: Sequence[Callable[[], object]], repeats: int, limit: float
) -> None:
    """Do each act once, then time them."""
    changes = [[browser.after(act) for act in acts] for _ in range(repeats + 1)]
    found.changes(what, list(itertools.chain(*changes[1:])), limit)


def two_models(found: Findings, repeats: int) -> None:
    """Two models of the demo's shape and a text of 512 tokens, on every page that runs models."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        generate(runs, series=2, seeds=1, checkpoints=2)
        tokenizer = Run.open(runs / "text-resformer-s0").tokenizer
        with serving(runs) as (address, process), chromium(process) as new:
            for name, figures in (("prompt", 2), ("attention", 0), ("intervene", 2)):
                browser, changes = new(), []
                both = "compare=1&a=text-resformer-s0&b=text-transformer-s0"
                browser.open(f"{address}/{name}?{both}", figures)
                for turn in range(repeats + 1):
                    text = tokenizer.decode(tokenizer.encode(prose(2000, seed=turn + 1))[:TOKENS])
                    changes.append(browser.after(functools.partial(ask, browser.page, text), figures))
                found.changes(f"{name}: {TOKENS} new tokens through two models", changes[1:], PROMPT)
                browser.page.context.close()
            browser = new()
            browser.open(f"{address}/prompt?show=layers&compare=1&a=text-resformer-s0&b=text-transformer-s0", 1)
            names = [LENS[kind][0] for kind in ("entropy", "probability")]
            kinds = [functools.partial(pick, browser.page, "Colour", name) for name in names]
            told(found, browser, "prompt: another reading of the lens, seen before", kinds, repeats, CLICK)
            found.add("memory of the server with two models", process.memory_info().rss / 2**20, "MiB", MEMORY)


def ask(page: Page, text: str) -> None:
    """Type a prompt; the last key pressed runs it."""
    box = page.locator("textarea").first
    box.fill(text)
    box.press("Control+Enter")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="20 runs of 5 checkpoints, one repeat")
    parser.add_argument("--pages", action="store_true", help="only the CPU time of every page above a bare one")
    parser.add_argument("--slack", type=float, default=1.0, help="times may exceed their limits by this factor")
    asked = parser.parse_args()
    found = Findings(asked.slack)
    every_page(found, 1 if asked.quick else REPEATS)
    if asked.pages:
        sys.exit(f"broken: {'; '.join(found.broken)}" if found.broken else 0)
    series, seeds, checkpoints, repeats = (4, 5, 5, 1) if asked.quick else (20, 50, 50, REPEATS)
    bare(found, repeats)
    two_models(found, repeats)
    bare(found, repeats)
    many_runs(found, series, seeds, checkpoints, repeats)
    if found.broken:
        sys.exit(f"broken: {'; '.join(found.broken)}")


if __name__ == "__main__":
    main()
