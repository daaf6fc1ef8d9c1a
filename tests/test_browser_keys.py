"""The dashboard with keys alone, in a real browser: every control reached and seen, used, and the focus kept."""

from __future__ import annotations

from pathlib import Path

import browsing
import dashboard
import pytest
from browsing import at, settled

from workbench.views import Link, pins

pytestmark = pytest.mark.slow
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
FOCUS = """
() => {
  let e = document.activeElement;
  while (e?.shadowRoot?.activeElement) e = e.shadowRoot.activeElement;
  if (!e || e === document.body) return null;
  let shown = e.checkVisibility({ visibilityProperty: true }) ? 1 : 0;
  for (let n = e; n; n = n.parentElement || (n.getRootNode().host ?? null)) shown *= parseFloat(getComputedStyle(n).opacity);
  const dress = () => { // a ring: another shade of its ground is none
    const said = [];
    for (let n = e, i = 0; n && i < 6; n = n.parentElement || (n.getRootNode().host ?? null), i++) {
      const s = getComputedStyle(n);
      if (n.offsetWidth > 1) said.push(s.outlineStyle, s.outlineColor, s.boxShadow, s.borderColor);
    }
    return said.join('|');
  };
  const name = (e.getAttribute('aria-label') || [...(e.labels || [])].map((l) => l.textContent).join('') || e.textContent).trim();
  window.undressed = () => dress();
  const hidden = shown < 0.5 || e.getBoundingClientRect().right < 0;
  return { tag: e.tagName, name: name.slice(0, 60), dress: dress(), hidden };
}
"""


@pytest.mark.parametrize(
    ("address", "figures", "names"),
    [
        ("depth?metric=sink_mass", 2, ["Collapse sidebar", "Experiment", "Model A", "Step of A", "Measure", "More"]),
        ("attention?layer=1&head=0", 0, ["Text", "Layer", "Head", "More", "Whole prompt"]),
    ],
)  # fmt: skip
def test_the_tabulator_reaches_every_control_and_shows_where_it_is(opened, server, address, figures, names):
    page = opened()
    page.set_viewport_size({"width": 1280, "height": 2400})
    at(page, server, address, figures)
    page.add_style_tag(content="* { transition: none !important; }")  # colours that fade in are there at once
    reached, unseen, hidden, last = [], [], [], None
    for _ in range(120):
        page.keyboard.press("Tab")
        page.evaluate(FRAMES)
        if last and page.evaluate("window.undressed()") == last["dress"]:
            unseen.append(last)
        last = page.evaluate(FOCUS)
        if last is None:
            break
        reached.append(last["name"])
        hidden += [last["name"]] * last["hidden"]
    assert reached[0] == "Skip to main content"
    missed = [name for name in names if not any(name in one for one in reached)]  # a button's icon is part of its text
    assert missed == []
    assert any("Provenance and self-check" in name for name in reached), "the drawer at the end"
    own = address.partition("?")[0].capitalize()
    blind = [u["name"] for u in unseen if u["tag"] not in ("MAIN", "TD", "CANVAS") and not u["name"].endswith(own)]
    assert blind == []
    assert hidden == []


def test_keys_alone_change_the_view_and_the_address(opened, server):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    at(page, server, "depth?metric=importance_entropy", 1)
    assert page.title() == "Depth · workbench"
    page.get_by_role("button", name="models").focus()
    page.keyboard.press("Enter")
    find = page.get_by_role("textbox", name="Find")
    find.wait_for()
    page.keyboard.press("Tab")
    assert find.evaluate("(e) => e === document.activeElement"), "the open panel is the next stop"
    page.get_by_role("button", name="ResFormer").focus()
    page.keyboard.press("Space")
    page.wait_for_url("**models=**")
    assert page.evaluate("document.activeElement.textContent") == "ResFormer", "the focus stays"
    page.keyboard.press("Escape")
    page.get_by_role("button", name="More").focus()
    page.keyboard.press("Enter")
    page.get_by_role("switch", name="Relative depth").focus()
    page.keyboard.press("Space")
    page.wait_for_url("**depth=1**")
    page.keyboard.press("Escape")
    page.get_by_role("combobox", name="Measure").focus()
    page.keyboard.type("sink rate")
    page.keyboard.press("Enter")
    page.wait_for_url("**metric=sink_rate**")
    settled(page, 1)
    page.get_by_role("button", name="Figure").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Numbers (CSV)").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Share").focus()
    page.keyboard.press("Enter")
    page.locator('[data-testid="stCode"]').first.wait_for()
    for key in ("Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    page.wait_for_function("async () => (await navigator.clipboard.readText()).includes('/depth?')")


def test_keys_alone_choose_a_row_and_fold_the_sidebar(opened, server):
    page = opened()
    at(page, server, "heads?a=race-svformer-s0", 3)

    def choose(timeout):
        for key in ("Tab", "ArrowDown", "Shift+Space"):
            page.keyboard.press(key)
        page.wait_for_url("**head=**", timeout=timeout)

    browsing.insist(page.get_by_role("button", name="Fullscreen").first.focus, choose)
    page.get_by_role("button", name="Collapse sidebar").focus()
    page.keyboard.press("Enter")
    focused(page, "Expand sidebar")
    page.keyboard.press("Enter")
    focused(page, "Collapse sidebar")


@pytest.mark.parametrize(
    ("address", "view", "keys", "told"),
    [
        ("prompt?show=layers&prompt=return%20values", "lens", ["ArrowRight", "ArrowRight", "ArrowDown"], "position=1"),
        ("heads?a=race-svformer-s0", "ranking", ["ArrowDown", "ArrowDown"], "head="),
    ],
)  # fmt: skip
def test_keys_point_at_a_figure_and_choose_what_a_click_would(opened, server, address, view, keys, told):
    page = opened()
    at(page, server, address, 1)
    figure = page.locator(f".st-key-figure_{view} .wb-figure")
    figure.focus()
    for key in keys:
        page.keyboard.press(key)
        figure.locator(".hovertext").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{told}**")
    assert figure.evaluate("(e) => e === document.activeElement"), "the next point is an arrow away"


def focused(page, name):
    """Wait until the focus is on what has this name."""
    said = "document.activeElement.ariaLabel ?? document.activeElement.textContent"
    page.wait_for_function(f"(name) => document.activeElement !== document.body && ({said}).includes(name)", arg=name)


def test_the_focus_stays_near_what_a_key_took_away(opened, server):
    """Not on the whole document, from where the tabulator begins at the top."""
    page = opened()
    for address in ("prompt", "attention", "intervene"):
        at(page, server, address, 0)
        page.get_by_role("button", name="Examples").focus()
        for key in ("Enter", "ArrowDown", "Enter"):
            page.keyboard.press(key)
            page.wait_for_timeout(200)
        page.wait_for_url("**prompt=**")
        focused(page, "Examples")
    at(page, server, "intervene?show=patching", 0)
    page.get_by_role("button", name="Use “").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**other=**")
    page.wait_for_function("document.activeElement !== document.body")
    page.get_by_role("button", name="Collapse sidebar").click()
    page.get_by_role("button", name="Expand sidebar").wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate("document.activeElement === document.body"), "a mouse is where it is"


def test_what_is_kept_is_taken_along_and_let_go_with_keys_alone(new_page, populated, tmp_path):
    """The focus comes back to a button that was busy, and goes on to the next view from one that is let go."""
    runs = dashboard.copied(populated, tmp_path / "runs")
    for metric in ("sink_rate", "sink_mass"):
        pins.add(runs, Link.parse(f"depth?metric={metric}"), "layers", f"why {metric}")
    with browsing.served(runs) as url:
        page = browsing.watched(new_page(), url, wrong := [], wrong)
        page.goto(f"{url}/kept")
        settled(page, 2)
        page.get_by_role("button", name="Page (HTML)").focus()
        with page.expect_download() as taken:
            page.keyboard.press("Enter")
        assert "why sink_mass" in Path(taken.value.path()).read_text(encoding="utf-8")
        focused(page, "Page (HTML)")
        page.get_by_role("button", name="Remove").first.focus()
        page.keyboard.press("Enter")
        page.get_by_text("why sink_mass").wait_for(state="detached")
        focused(page, "Open")
    assert not wrong
    assert [pin.note for pin in pins.pins(runs)] == ["why sink_rate"]
