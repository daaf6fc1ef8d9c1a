"""Pages for everybody, in a real browser: contrast, names, narrow screens, and commands pasted as shown."""

from __future__ import annotations

import io
import os
import re
import subprocess
from dataclasses import dataclass, field

import browsing
import pandas as pd
import pytest
from browsing import at, downloaded, files_of, picture
from typer.testing import CliRunner

from workbench import plots
from workbench.cli import app

pytestmark = pytest.mark.slow
BOTH = "a=text-resformer-s0&step=20&compare=1&b=text-transformer-s0&step_b=20"
PAGES = {
    "?show=here": 0, "?show=verdicts": 1, "?show=demo": 4, f"?show=model&{BOTH}": 4,
    "training": 3, f"depth?metric=importance_entropy&{BOTH}": 2, "kept": 0,
    f"attention?{BOTH}": 0, "heads?a=race-svformer-s0": 3, "prompt?show=follow": 1, f"prompt?show=next&{BOTH}": 2,
    "intervene?sweep=remove:part%3Dmlp": 3, f"intervene?{BOTH}": 2,
}  # fmt: skip
"""Address -> figures at least; the attention page draws itself."""
FAINT = """
() => {
  const pixel = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (text) => {
    if (!text || text === 'none') return [0, 0, 0, 0];
    pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = text; pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat([1]);
  const linear = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]) + 0.05;
  const above = (e) => e.parentElement || (e.getRootNode().host ?? null);
  const ground = (e) => {
    const layers = [];
    for (let n = e; n; n = above(n)) { layers.push(rgba(getComputedStyle(n).backgroundColor)); if (layers.at(-1)[3] === 1) break; }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const found = [];
  const look = (root) => {
    for (const e of root.querySelectorAll('*')) {
      if (e.shadowRoot) look(e.shadowRoot);
      const text = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent).join('').trim();
      const box = e.getBoundingClientRect(), style = getComputedStyle(e);
      const mark = /^[●■◆▲▼✚✖★⬢⬟┈╌┄]$/.test(text); // of a line, in its colour
      if (!text || !box.width || !box.height || style.visibility === 'hidden') continue;
      if (e.closest('style, script, noscript, .heatmaplayer, :disabled') || e.closest('[data-testid="stSliderThumbValue"]')) continue;
      const ink = rgba(e instanceof SVGElement ? style.fill : style.color);
      for (let n = e; n; n = above(n)) ink[3] *= parseFloat(getComputedStyle(n).opacity);
      const below = ground(e), [a, b] = [light(over(ink, below)), light(below)];
      const ratio = Math.max(a, b) / Math.min(a, b), large = parseFloat(style.fontSize) >= 24;
      if (ink[3] > (mark ? 0.5 : 0.02) && ratio < (mark || large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
    }
  };
  look(document.body);
  return found;
}
"""
"""Too little contrast (WCAG 2.2, AA): text 4.5 to 1, large text and marks 3 to 1. On maps Plotly chooses black or white by the cell.

Pale marks of context points are left out.
"""
UNNAMED = """
() => {
  const found = [];
  const look = (root) => {
    for (const e of root.querySelectorAll('*')) {
      if (e.shadowRoot) look(e.shadowRoot);
      if (!e.matches('button, a[href], input, select, textarea, [role=button], [role=slider], [role=application]')) continue;
      if (!e.getBoundingClientRect().width || getComputedStyle(e).visibility === 'hidden') continue;
      const by = (e.getAttribute('aria-labelledby') || '').split(' ').map((id) => root.getElementById?.(id)?.textContent || '');
      const named = [e.getAttribute('aria-label'), ...by, ...[...(e.labels || [])].map((l) => l.textContent), e.textContent, e.title];
      if (!named.some((n) => n && n.trim())) found.push(e.outerHTML.slice(0, 200));
    }
  };
  look(document.body);
  for (const e of document.querySelectorAll('.wb-figure'))
    if (e.getAttribute('role') !== 'figure' || (e.getAttribute('aria-label') || '').length < 20) found.push('a figure without words');
  return found;
}
"""
CUT = """
() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => {
  const room = plot.querySelector('.main-svg').getBoundingClientRect();
  return [...plot.querySelectorAll('text')].filter((t) => {
    const box = t.getBoundingClientRect();
    return box.width && (box.left < room.left - 1 || box.right > room.right + 1 || box.top < room.top - 1 || box.bottom > room.bottom + 1);
  }).map((t) => t.textContent);
})
"""
DARK = """
(dark) => {
  const [r, g, b] = getComputedStyle(document.querySelector('.stApp')).backgroundColor.match(/\\d+/g).map(Number);
  return (r + g + b < 384) === dark;
}
"""
PHONE = 390  # pixels
WIDE = """
(() => {
  const scrolls = ({ scrollWidth, clientWidth }) => scrollWidth > clientWidth;
  const abreast = ({ _fullLayout: l }) => new Set(Object.keys(l).filter((k) => k.startsWith('xaxis')).map((k) => l[k].domain[0])).size;
  return scrolls(document.querySelector('[data-testid="stMain"]'))
    || [...document.querySelectorAll('.wb-figure')].some((f) => scrolls(f) && abreast(f.querySelector('.js-plotly-plot')) > 1);
})()
"""
TRACES = "[...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => plot.data.map((t) => [t.name, t.type]))"
COLOURS = """
[...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => plot._fullData.flatMap((t) =>
  t.showlegend === false || !t.visible ? [] : [[t.name, t.line?.color && t.mode ? t.line.color : t.marker?.color]]))
"""
WORDS = """
() => {
  const said = [];
  const look = (root) => {
    for (const e of root.querySelectorAll('*')) {
      if (e.shadowRoot) look(e.shadowRoot);
      if (e.matches('.js-plotly-plot')) said.push(e.textContent);
      if (e.hasAttribute('aria-label')) said.push(e.getAttribute('aria-label'));
    }
  };
  look(document.body);
  return said.join('\\n');
}
"""


# ---- every page, each visited once ----


@dataclass
class Seen:
    """What is found on a page; by day and by night where it depends on that."""

    dialogues: int
    ignored: int
    wide: list[int]
    cut: list[str]
    words: str
    traces: list[list[str]]
    unnamed: list[str] = field(default_factory=list)
    faint: dict[str, list[str]] = field(default_factory=dict)
    colours: dict[str, list[list[str]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def every_page(visitor, server):
    """Address -> what is seen there, every other page opened at night; what went wrong, and what left this machine."""
    wrong, outside, found = [], [], {}
    page = browsing.watched(visitor.new_page(), server, wrong, outside)
    schemes = ["light", "dark"]
    for address, figures in PAGES.items():
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme=schemes[0])
        at(page, server, address, figures)
        found[address] = seen = Seen(
            page.locator('[role="dialog"]').count(), page.locator('[data-testid="stAlert"]:has-text("ignored")').count(),
            [], page.evaluate(CUT), page.evaluate(WORDS), page.evaluate(TRACES),
        )  # fmt: skip
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(DARK, arg=scheme == "dark")
            seen.faint[scheme], seen.colours[scheme] = faint(page), page.evaluate(COLOURS)
            picture(page, f"{re.sub(r'[^a-z]+', '_', address).strip('_')}_{scheme}.png")
        seen.unnamed = page.evaluate(UNNAMED)
        seen.wide += [1280] if page.evaluate(WIDE) else []
        page.set_viewport_size({"width": PHONE, "height": 900})
        seen.wide += [PHONE] if stays_wide(page) else []
        page.goto("about:blank")  # what is left is not laid out again
        schemes.reverse()
    page.close()
    return found, wrong, outside


def stays_wide(page):
    """Whether a page is still too wide once its figures are drawn for a window that has changed."""
    for wait in (300, 700, 2000):
        page.wait_for_timeout(wait)
        if not page.evaluate(WIDE):
            return False
    return True


def faint(page):
    """What is hard to read on a page once its colours have faded in, which a busy machine takes its time for."""
    for wait in (500, 500, 1000, 2000):
        page.wait_for_timeout(wait)
        if not (found := page.evaluate(FAINT)):
            break
    return found


def test_every_page_opens_by_its_link_without_a_word_to_the_outside(every_page):
    found, wrong, outside = every_page
    assert not wrong
    assert not outside
    assert {address: s for address, s in found.items() if s.dialogues or s.ignored} == {}


def test_every_page_can_be_read_by_day_and_night_on_a_laptop_and_on_a_phone(every_page):
    """Contrast, names of controls and figures, nothing cut off and nothing to scroll sideways."""
    found, _, _ = every_page
    flaws = {address: (s.faint["light"], s.faint["dark"], s.unnamed, s.cut, s.wide) for address, s in found.items()}
    assert {address: flaw for address, flaw in flaws.items() if any(flaw)} == {}


def test_comparing_draws_a_and_b_and_their_difference_on_every_page(every_page):
    both = {address: seen for address, seen in every_page[0].items() if BOTH in address}
    assert len(both) == 5
    for address, seen in both.items():
        assert ("B: Layer 0, head 1" if address.startswith("attention") else "B: Transformer") in seen.words, address
    names = {name for name, _ in both[f"depth?metric=importance_entropy&{BOTH}"].traces}
    assert {"A: ResFormer · s0, step 20", "B: Transformer · s0, step 20", "A − B"} <= names


def test_a_model_has_one_colour_on_every_page_in_light_and_dark(every_page):
    wanted = {"ResFormer": plots.colour("resformer"), "Transformer": plots.colour("transformer")}
    seen = set()
    for address, page in every_page[0].items():
        for scheme, traces in page.colours.items():
            for name, colour in traces:
                model = re.sub(r"^[AB]: | · .*$", "", str(name))
                if model in wanted and isinstance(colour, str):
                    assert colour.upper() == wanted[model], (address, name)
                    seen.add((address, scheme, model))
    assert len(seen) >= 20


# ---- commands ----


def test_the_command_of_every_page_pasted_into_a_shell_writes_the_numbers_that_the_page_gives(
    opened, server, tmp_path, monkeypatch
):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    (told := tmp_path / "workbench").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    told.chmod(0o755)
    shell = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.chdir(tmp_path)
    for address, view in {
        "?show=model": "token_share", "training?show=gradients": "gradients", "depth?metric=sink_mass&view=heads": "layers",
        "prompt?show=who&prompt=def%20f(%22a%22):%20%24x": "attribution", "intervene?edits=remove:part%3Dmlp": "effect",
    }.items():  # fmt: skip
        at(page, server, address, 1)
        panel = files_of(page, view)
        told = pd.read_csv(io.StringIO(downloaded(page, panel.get_by_role("button", name="Numbers (CSV)"))[1]))
        panel.get_by_role("tab", name="Code").click()
        code = panel.locator('[data-testid="stCode"]').nth(1)
        browsing.insist(page.locator("h1").first.hover, code.hover, code.locator("button").first.click)
        pasted = page.evaluate("navigator.clipboard.readText()").replace(f"{view}.svg", f"{view}.parquet")
        words = subprocess.run(["bash", "-c", pasted], env=shell, capture_output=True, text=True, check=True).stdout
        done = CliRunner().invoke(app, words.split("\0")[:-1])
        assert done.exit_code == 0, (pasted, done.output)
        written = plots.table(pd.read_parquet(tmp_path / f"{view}.parquet"))
        assert len(written) == len(told), address
        numbers = [c for c in written if pd.api.types.is_float_dtype(written[c]) and c in told]
        assert numbers, address
        for column in numbers:
            assert sorted(written[column].dropna()) == pytest.approx(sorted(told[column].dropna()), abs=1e-4), (
                address,
                column,
            )
