// What all elements share: one view for each place on the page, nodes made of text, and which token is pointed at.

function shown(make, read) {
  const views = new WeakMap();
  return ({ data, parentElement, setTriggerValue }) => {
    let view = views.get(parentElement);
    if (!view) views.set(parentElement, (view = make(parentElement)));
    view.ask = (wish) => setTriggerValue("asked", wish);
    const found = read(data), count = (view.count = (view.count ?? 0) + 1);
    if (found instanceof Promise) found.then((parts) => count === view.count && view.show(parts));
    else view.show(found);
    return () => { // when the element goes away, and for a call that another overtook while the script was on its way
      if (parentElement.isConnected) return;
      view.count = null;
      view.leave();
      views.delete(parentElement);
    };
  };
}

function made(tag, name, parent, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// At most three significant digits, with a true minus sign.
const number = (v) => {
  const size = Math.abs(v);
  if (v === null || Number.isNaN(v)) return "–";
  const text = size >= 999.5 ? v.toFixed(0) : size >= 0.0005 ? v.toPrecision(3) : v ? v.toExponential(1) : "0";
  return text.replaceAll("-", "−");
};

// Tells the other elements of the page which token a person points at (null: none), and hears it from them. `other`: a second one,
// as the key that a query looks at.
class Pointing {
  constructor(from, mark) {
    this.from = from;
    this.last = [null, null];
    this.hear = ({ detail }) => detail && detail.from !== from && mark(detail.index ?? null, detail.other ?? null);
    document.addEventListener("workbench:token", this.hear);
  }

  tell(index, other = null) {
    if (index === this.last[0] && other === this.last[1]) return;
    this.last = [index, other];
    document.dispatchEvent(new CustomEvent("workbench:token", { detail: { index, other, from: this.from } }));
  }

  leave() {
    this.tell(null);
    document.removeEventListener("workbench:token", this.hear);
  }
}
