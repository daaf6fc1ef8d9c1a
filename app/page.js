// Keys, where the toolkit's elements answer to a mouse alone.
const STOP = 'a[href], button:not(:disabled, [aria-label^="Help for"]), input:not(:disabled), textarea:not(:disabled), summary, [tabindex="0"]';
const FOLDS = '[data-testid="stSidebarCollapseButton"] button, [data-testid="stExpandSidebarButton"]'; // one of them is seen
const REST = 100; // ms without a change, after which a page stands
const isSeen = (e) => e.isConnected && e.checkVisibility({ visibilityProperty: true });
const stops = (root) => [...root.querySelectorAll("*")].flatMap((e) => (e.shadowRoot ? stops(e.shadowRoot) : e.matches(STOP) && isSeen(e) ? [e] : []));

document.addEventListener("keydown", (event) => {
  const at = document.activeElement;
  left ||= event.key === "Tab";
  if (event.key === "Tab" && !event.shiftKey && at.matches('[aria-haspopup="dialog"][aria-expanded="true"]')) {
    // an open panel stands at the end of the document: the next stop is its first control
    const panel = document.querySelector('[data-testid="stPopoverBody"]');
    const first = panel && stops(panel)[0];
    if (first) first.focus(), event.preventDefault();
  } else if (event.key.startsWith("Arrow") && at.matches('[data-testid="data-grid-canvas"]')) {
    // in a table that has a chosen row no cell takes the keys until it has the focus
    at.querySelector('[aria-selected="true"] [role="gridcell"], tbody [role="gridcell"]')?.focus();
  }
}, true);

// Where what has the focus is folded or redrawn away, the nearest thing around it takes it: the button that opened a menu, the other
// button of the sidebar, else the first control of what stands there now.
let trail = [], left = false, rests; // the element with the focus, what is around it, and behind a panel what had it before
document.addEventListener("focusin", (event) => {
  const around = event.composedPath().filter((n) => n instanceof Element);
  left = !around[0].matches(":focus-visible"); // for a mouse, or with the tabulator beyond the page's end
  trail = around.some((n) => n.id === "root") ? around : [...new Set([...around.slice(0, -2), ...trail])];
});
document.addEventListener("pointerdown", () => (left = true), true);

function refocus() {
  const [lost] = trail, running = document.querySelector('[data-test-script-state="running"]');
  if (!lost || left || lost.disabled || running || document.activeElement !== document.body) return; // a busy button comes back
  const fold = lost.matches(FOLDS) && [...document.querySelectorAll(FOLDS)].find(isSeen);
  const near = fold || trail.filter(isSeen).map((n) => (n.matches(STOP) ? n : stops(n)[0])).find(Boolean);
  near?.focus();
}
new MutationObserver(() => {
  clearTimeout(rests);
  rests = setTimeout(refocus, REST);
}).observe(document, { childList: true, subtree: true, attributeFilter: ["data-collapsed", "data-test-script-state", "disabled"] });
