"""Pages for everybody, in a real browser: contrast, names, the keyboard alone, narrow screens, and commands pasted as shown."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import browsing
import dashboard
import pandas as pd
import pytest
from browsing import downloaded, files_of, settled

from workbench import plots

pytestmark = pytest.mark.slow
A, BOTH = "a=text-resformer-s0&step=20", "a=text-resformer-s0&step=20&compare=1&b=text-transformer-s0&step_b=20"
PAGES = {
    "?show=model": 4, "?show=here": 0, "?show=verdicts": 1, "?show=demo": 4,
    "training?show=loss": 3, "training?show=gradients": 2, "training?show=coefficients": 1, "training?show=pace": 2,
    "depth?metric=sink_mass": 1, "attention?layer=1&head=0": 0, "heads?metric=sink_mass": 2, "prompt?show=next": 2, "prompt?show=layers": 1,
    "prompt?show=who": 1, "prompt?show=carries": 2, "intervene?sweep=remove:part%3Dmlp": 3,
}  # fmt: skip
"""Address -> figures; the attention page draws itself."""
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
      if (!text || !box.width || !box.height || style.visibility === 'hidden') continue;
      if (e.closest('style, script, noscript, .heatmaplayer, :disabled') || e.closest('[data-testid="stSliderThumbValue"]')) continue;
      const ink = rgba(e instanceof SVGElement ? style.fill : style.color);
      for (let n = e; n; n = above(n)) ink[3] *= parseFloat(getComputedStyle(n).opacity);
      const below = ground(e), [a, b] = [light(over(ink, below)), light(below)];
      const ratio = Math.max(a, b) / Math.min(a, b), large = parseFloat(style.fontSize) >= 24;
      if (ink[3] > 0.02 && ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
    }
  };
  look(document.body);
  return found;
}
"""
"""Text with too little contrast (WCAG 2.2, AA): 4.5 to 1, large text 3 to 1. On maps Plotly chooses black or white by the cell."""
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
  for (const e of document.querySelectorAll('[data-testid="stPlotlyChart"]'))
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
FOCUS = """
() => {
  let e = document.activeElement;
  while (e?.shadowRoot?.activeElement) e = e.shadowRoot.activeElement;
  if (!e || e === document.body) return null;
  const dress = () => {
    const said = [];
    for (let n = e, i = 0; n && i < 5; n = n.parentElement || (n.getRootNode().host ?? null), i++) {
      const s = getComputedStyle(n);
      said.push(s.outline, s.boxShadow, s.borderColor, s.backgroundColor, s.textDecoration);
    }
    return said.join('|');
  };
  const name = (e.getAttribute('aria-label') || [...(e.labels || [])].map((l) => l.textContent).join('') || e.textContent).trim();
  window.undressed = () => dress();
  return { tag: e.tagName, name: name.slice(0, 60), dress: dress() };
}
"""


@pytest.fixture(scope="module")
def server(populated, tmp_path_factory):
    """The dashboard's address."""
    with browsing.served(dashboard.copied(populated, tmp_path_factory.mktemp("copied") / "runs")) as url:
        yield url


@pytest.fixture
def opened(browser, server):
    """`opened(scheme, width)`: a page; nothing may go wrong in it until the test ends."""
    contexts, wrong = [], []

    def make(scheme="light", width=1280, **more):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more))
        return browsing.watched(contexts[-1].new_page(), server, wrong, wrong)

    yield make
    for context in contexts:
        context.close()
    assert not wrong


def at(page, server, address, figures):
    """Open an address with models to look at, and wait until it is drawn."""
    page.goto(f"{server}/{address}&{A if 'a=' not in address else ''}".rstrip("&"))
    settled(page, figures)
    if address.startswith("attention"):
        page.locator(".attention .map canvas").first.wait_for()


def test_every_page_can_be_read_by_day_and_night_on_a_laptop_and_in_a_narrow_window(opened, server):
    """Contrast, names of controls and figures, nothing cut off and nothing to scroll sideways; every other page opens at night."""
    page = opened()
    schemes = ["light", "dark"]
    main = "document.querySelector('[data-testid=\"stMain\"]')"
    for address, figures in [*PAGES.items(), (f"?show=model&{BOTH}", 4), (f"prompt?show=layers&{BOTH}", 1)]:
        at(page, server, address, figures)
        for width in (1280, 1024):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)
            assert page.evaluate(f"{main}.scrollWidth <= {main}.clientWidth"), (width, address)
            assert width < 1280 or page.evaluate(CUT) == [], address
        page.set_viewport_size({"width": 1280, "height": 900})
        assert page.evaluate(FAINT) == [], (schemes[0], address)
        schemes.reverse()
        page.emulate_media(color_scheme=schemes[0])
        page.wait_for_timeout(1500)
        assert page.evaluate(FAINT) == [], (schemes[0], address)
        assert page.evaluate(UNNAMED) == [], address


@pytest.mark.parametrize(
    ("address", "figures", "names"),
    [
        ("depth?metric=sink_mass", 1, ["Experiment", "Model A", "Training step of A", "Measure", "View", "Relative depth"]),
        ("attention?layer=1&head=0", 0, ["Text", "Layer", "Head", "More", "Whole prompt"]),
        ("intervene?edits=sink&show=sweep", 1, ["Text", "Change", "Layers", "Try", "Add", "In turn", "Effect on", "Figure"]),
    ],
)  # fmt: skip
def test_the_tabulator_reaches_every_control_and_shows_where_it_is(opened, server, address, figures, names):
    page = opened()
    page.set_viewport_size({"width": 1280, "height": 2400})
    at(page, server, address, figures)
    reached, unseen, last = [], [], None
    for _ in range(120):
        page.keyboard.press("Tab")
        page.wait_for_timeout(40)
        if last and page.evaluate("window.undressed()") == last["dress"]:
            unseen.append(last)
        page.wait_for_timeout(160)  # colours fade in
        last = page.evaluate(FOCUS)
        if last is None:
            break
        reached.append(last["name"])
    assert reached[0] == "Skip to main content"
    missed = [name for name in names if not any(name in one for one in reached)]  # a button's icon is part of its text
    assert missed == []
    assert any("Where this comes from" in name for name in reached), "the drawer at the end"
    own = address.partition("?")[0].capitalize()
    blind = [u["name"] for u in unseen if u["tag"] not in ("MAIN", "TD", "CANVAS") and not u["name"].endswith(own)]
    assert blind == []


def test_keys_alone_change_the_view_and_the_address(opened, server):
    page = opened()
    at(page, server, "depth?metric=importance_entropy", 1)
    page.get_by_role("button", name="models").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="ResFormer").focus()
    page.keyboard.press("Space")
    page.wait_for_url("**models=**")
    assert page.evaluate("document.activeElement.textContent") == "ResFormer", "the focus stays"
    page.keyboard.press("Escape")
    page.get_by_role("switch", name="Relative depth").focus()
    page.keyboard.press("Space")
    page.wait_for_url("**depth=1**")
    page.get_by_role("combobox", name="Measure").focus()
    page.keyboard.type("sink rate")
    page.keyboard.press("Enter")
    page.wait_for_url("**metric=sink_rate**")
    settled(page, 1)
    page.get_by_role("button", name="Figure").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Numbers (CSV)").wait_for()


def test_a_model_has_one_colour_on_every_page_in_light_and_dark(opened, server):
    wanted = {"ResFormer": plots.colour("resformer"), "Transformer": plots.colour("transformer")}
    seen = set()
    colours = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => plot._fullData.flatMap((t) =>
      t.showlegend === false || !t.visible ? [] : [[t.name, t.line?.color && t.mode ? t.line.color : t.marker?.color]]))"""
    page = opened()
    for address in ("?show=demo", "training?show=loss", "training?show=pace", "depth?metric=importance_entropy",
                    f"depth?metric=importance_entropy&{BOTH}", f"prompt?show=next&{BOTH}", f"?show=model&{BOTH}"):  # fmt: skip
        at(page, server, address, 1)
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(500)
            for name, colour in page.evaluate(colours):
                model = re.sub(r"^[AB]: | · .*$", "", str(name))
                if model in wanted and isinstance(colour, str):
                    assert colour.upper() == wanted[model], (address, name)
                    seen.add((address, scheme, model))
    assert len(seen) >= 20


def test_the_command_of_every_page_pasted_into_a_shell_writes_the_numbers_that_the_page_gives(opened, server, tmp_path):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    shell = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for address, view in {
        "?show=model": "token_share", "training?show=gradients": "gradients", "depth?metric=sink_mass&view=heads": "layers",
        "prompt?show=who&prompt=def%20f(%22a%22):%20%24x": "attribution", "intervene?edits=remove:part%3Dmlp": "effect",
    }.items():  # fmt: skip
        at(page, server, address, 1)
        panel = files_of(page, view)
        told = pd.read_csv(io.StringIO(downloaded(page, panel.get_by_role("button", name="Numbers (CSV)"))[1]))
        code = panel.locator('[data-testid="stCode"]').nth(1)
        browsing.insist(page.locator("h1").first.hover, code.hover, code.locator("button").first.click)
        pasted = page.evaluate("navigator.clipboard.readText()").replace(f"{view}.svg", f"{view}.parquet")
        done = subprocess.run(
            ["bash", "-c", pasted], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (pasted, done.stderr + done.stdout)
        written = plots.table(pd.read_parquet(tmp_path / f"{view}.parquet"))
        assert len(written) == len(told), address
        numbers = [c for c in written if pd.api.types.is_float_dtype(written[c]) and c in told]
        assert numbers, address
        for column in numbers:
            assert sorted(written[column].dropna()) == pytest.approx(sorted(told[column].dropna()), abs=1e-4), (
                address,
                column,
            )
